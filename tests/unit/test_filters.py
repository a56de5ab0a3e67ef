"""Dynamic sampling: a group is kept by how many are right, never by shaped rewards."""

from collections.abc import Sequence

import pytest

from megatron_rl.algorithms.filters import keep_group, load_filter
from megatron_rl.errors import UserError
from tests.tiny import graded_group


@pytest.mark.parametrize(
    ("scores", "kept"),
    [
        ([1, 1, 1, 1], False),
        ([0, 0, 0, 0], False),
        ([1, 0, 0, 0], True),
        ([0, 1, 1, 1], True),
        ([0.5, 0.5, 0.5], False),
        ([0.5, 0.25, 0.5], True),
        ([1], False),
        ([], False),
    ],
)
def test_kept_are_the_groups_with_some_right_and_some_wrong(scores: list[float], kept: bool) -> None:
    assert keep_group(scores) is kept


def test_ungraded_answers_do_not_make_a_group_mixed() -> None:
    nan = float("nan")
    assert not keep_group(graded_group(0, [1, nan, 1], [2, 3, 4]).graded_scores)
    assert keep_group(graded_group(0, [nan, 0, 1], [2, 3, 4]).graded_scores)
    assert not keep_group(graded_group(0, [nan, nan, nan], [2, 3, 4]).graded_scores)


def hard_ones(accuracies: Sequence[float]) -> bool:
    """A user's filter."""
    return 0 < sum(accuracies) / len(accuracies) < 0.5


def test_a_filter_is_loaded_by_its_name_or_its_place() -> None:
    assert load_filter("mixed") is keep_group
    own = load_filter(f"{__name__}:hard_ones")
    assert [own(scores) for scores in ([1, 0, 0], [1, 1, 0], [0, 0, 0])] == [True, False, False]


def inverse(accuracies: Sequence[float]) -> object:
    """A filter that raises, or returns what is neither True nor False, by its first score."""
    return 1 / accuracies[0]


@pytest.mark.parametrize(
    ("score", "begins"), [(0.0, "inverse: ZeroDivisionError: "), (2.0, "inverse returned 0.5, not True or False")]
)
def test_a_filter_that_fails_is_told_in_one_line_with_its_option(score: float, begins: str) -> None:
    keeps = load_filter(f"{__name__}:inverse")
    with pytest.raises(UserError) as caught:
        keeps([score, 1.0])
    assert str(caught.value).startswith(f"algorithm.group_filter: {__name__}:{begins}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["mixd", "no.such.module:keep", f"{__name__}:no_such_filter"])
def test_a_filter_that_is_not_there_is_refused_with_its_option(name: str) -> None:
    with pytest.raises(UserError, match=r"^algorithm\.group_filter: ") as caught:
        load_filter(name)
    assert name in str(caught.value)
