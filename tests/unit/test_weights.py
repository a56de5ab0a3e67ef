"""Per-token weights, against the fractions that each normalisation's formula gives."""

import math
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from megatron_rl.algorithms.weights import NORMALISATIONS, loss_weights
from megatron_rl.errors import UserError

# Two groups of uneven size: responses of 2, 4 and 1 tokens, and of 3 and 5.
LENGTHS, IDS = torch.tensor([2, 4, 1, 3, 5]), torch.tensor([0, 0, 0, 1, 1])


def weights(lengths: list[int], ids: list[int], mode: str, budget: int | None = None) -> list[float]:
    return loss_weights(torch.tensor(lengths), torch.tensor(ids), mode=mode, budget=budget).tolist()


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("sequence_mean", [1 / 10, 1 / 20, 1 / 5, 1 / 15, 1 / 25]),
        ("token_mean_group", [1 / 14, 1 / 14, 1 / 14, 1 / 16, 1 / 16]),
        ("token_mean_batch", [1 / 15] * 5),
        ("constant", [1 / 55] * 5),
    ],
)
def test_uneven_groups(mode: str, expected: list[float]) -> None:
    found = loss_weights(LENGTHS, IDS, mode=mode, budget=11)
    assert found.dtype == torch.float64
    assert found.tolist() == pytest.approx(expected, rel=1e-15)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        # Trained: 2 and 1 tokens of group 0, 5 of group 1, none of group 2. N = 3, Q = 2, 8 tokens.
        ("sequence_mean", [1 / 6, 0, 1 / 3, 0, 1 / 15, 0, 0]),
        ("token_mean_group", [1 / 6, 0, 1 / 6, 0, 1 / 10, 0, 0]),
        ("token_mean_batch", [1 / 8, 0, 1 / 8, 0, 1 / 8, 0, 0]),
        ("constant", [1 / 33, 0, 1 / 33, 0, 1 / 33, 0, 0]),
    ],
)
def test_responses_that_are_not_trained_count_nowhere(mode: str, expected: list[float]) -> None:
    assert weights([2, 0, 1, 0, 5, 0, 0], [0, 0, 0, 1, 1, 2, 2], mode, budget=11) == pytest.approx(expected, rel=1e-15)


@pytest.mark.parametrize("mode", NORMALISATIONS)
def test_nothing_to_train_on_is_all_zeros(mode: str) -> None:
    assert weights([0, 0, 0], [0, 0, 1], mode, budget=11) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("mode", ["sequence_mean", "token_mean_group", "token_mean_batch"])
def test_means_have_weights_that_sum_to_one(mode: str) -> None:
    assert (loss_weights(LENGTHS, IDS, mode=mode) * LENGTHS).sum().item() == pytest.approx(1, abs=1e-15)


def test_groups_are_told_apart_by_id_in_any_order() -> None:
    assert weights([2, 3, 4, 5, 1], [8, -2, 8, -2, 8], "token_mean_group") == pytest.approx(
        [1 / 14, 1 / 16, 1 / 14, 1 / 16, 1 / 14], rel=1e-15
    )


@pytest.mark.parametrize("budget", [None, 0])
def test_the_constant_needs_its_budget(budget: int | None) -> None:
    with pytest.raises(ValueError, match="needs budget"):
        weights([2, 1], [0, 0], "constant", budget)


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'mean': one of sequence_mean, .*, or module:function"):
        weights([2, 1], [0, 0], "mean")


# ---- a function of one's own


def by_group_and_budget(lengths: Tensor, group_ids: Tensor, budget: int | None) -> Tensor:
    """One over the length and the budget, and the group's id."""
    assert budget is not None
    return 1 / (lengths * budget) + group_ids


def test_a_normalisation_of_ones_own_sees_lengths_groups_and_budget() -> None:
    # The third response is not trained on: 0, though the function returns infinity for it.
    found = weights([2, 4, 0], [0, 3, 3], f"{__name__}:by_group_and_budget", budget=10)
    assert found == pytest.approx([1 / 20, 3 + 1 / 40, 0.0], abs=1e-15)


def whole_numbers(lengths: Tensor, group_ids: Tensor, budget: int | None) -> Tensor:
    return group_ids


def test_it_may_return_another_type_of_number_and_zeros() -> None:
    assert weights([2, 4], [0, 3], f"{__name__}:whole_numbers") == [0.0, 3.0]


def wrong_shape(lengths: Tensor, group_ids: Tensor, budget: int | None) -> Tensor:
    return lengths.sum()


def a_list(lengths: Tensor, group_ids: Tensor, budget: int | None) -> list[float]:
    return lengths.tolist()


def negative(lengths: Tensor, group_ids: Tensor, budget: int | None) -> Tensor:
    return 3 - lengths


def not_a_number(lengths: Tensor, group_ids: Tensor, budget: int | None) -> Tensor:
    return torch.full_like(lengths, math.nan)


def infinite(lengths: Tensor, group_ids: Tensor, budget: int | None) -> Tensor:
    return 1 / (lengths - 2)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("wrong_shape", "did not return one number for each of 2 responses"),
        ("a_list", "did not return one number for each of 2 responses"),
        ("negative", "returned a weight that is negative or not finite"),
        ("not_a_number", "returned a weight that is negative or not finite"),
        ("infinite", "returned a weight that is negative or not finite"),
    ],
)
def test_what_is_not_one_weight_for_each_response_is_refused(name: str, message: str) -> None:
    with pytest.raises(UserError, match=rf"^algorithm\.normalisation: {__name__}:{name} {message}"):
        weights([2, 4], [0, 0], f"{__name__}:{name}")


def test_a_normalisation_that_is_not_there_is_refused_with_its_option() -> None:
    with pytest.raises(UserError, match=r"^algorithm\.normalisation: .*no_such_function"):
        weights([2, 4], [0, 0], f"{__name__}:no_such_function")


# ---- properties

any_responses = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3)), min_size=1, max_size=12)


@given(any_responses, st.sampled_from(NORMALISATIONS))
def test_weights_times_lengths_sum_to_one_and_those_of_the_constant_to_how_full_the_budget_is(
    responses: list[tuple[int, int]], mode: str
) -> None:
    lengths, ids = ([one[i] for one in responses] for i in (0, 1))
    assume(any(lengths))
    total = sum(w * n for w, n in zip(weights(lengths, ids, mode, budget=11), lengths, strict=True))
    trained = sum(length > 0 for length in lengths)
    assert total == pytest.approx(sum(lengths) / (trained * 11) if mode == "constant" else 1, abs=1e-12)


@given(any_responses, st.sampled_from(NORMALISATIONS), st.randoms(use_true_random=False))
def test_weights_follow_a_shuffle(responses: list[tuple[int, int]], mode: str, random: Any) -> None:
    lengths, ids = ([one[i] for one in responses] for i in (0, 1))
    found = weights(lengths, ids, mode, budget=11)
    order = list(range(len(lengths)))
    random.shuffle(order)
    shuffled = weights([lengths[i] for i in order], [ids[i] for i in order], mode, budget=11)
    assert shuffled == pytest.approx([found[i] for i in order], rel=1e-12)
