"""Dynamic sampling: a group is kept by how many are right, never by shaped rewards."""

import pytest

from megatron_rl.algorithms.filters import keep_group
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
