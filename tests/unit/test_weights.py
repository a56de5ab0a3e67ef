"""Per-token weights, against the fractions that each normalisation's formula gives."""

import pytest
import torch

from megatron_rl.algorithms.advantages import group_advantages
from megatron_rl.algorithms.weights import Normalisation, loss_weights

# Two groups of uneven size: responses of 2, 4 and 1 tokens, and of 3 and 5.
LENGTHS, IDS = torch.tensor([2, 4, 1, 3, 5]), torch.tensor([0, 0, 0, 1, 1])


def weights(lengths: list[int], ids: list[int], mode: Normalisation, budget: int | None = None) -> list[float]:
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
def test_uneven_groups(mode: Normalisation, expected: list[float]) -> None:
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
def test_responses_that_are_not_trained_count_nowhere(mode: Normalisation, expected: list[float]) -> None:
    assert weights([2, 0, 1, 0, 5, 0, 0], [0, 0, 0, 1, 1, 2, 2], mode, budget=11) == pytest.approx(expected, rel=1e-15)


@pytest.mark.parametrize("mode", ["sequence_mean", "token_mean_group", "token_mean_batch", "constant"])
def test_nothing_to_train_on_is_all_zeros(mode: Normalisation) -> None:
    assert weights([0, 0, 0], [0, 0, 1], mode, budget=11) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("mode", ["sequence_mean", "token_mean_group", "token_mean_batch"])
def test_means_have_weights_that_sum_to_one(mode: Normalisation) -> None:
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
    with pytest.raises(ValueError, match="'mean'"):
        weights([2, 1], [0, 0], "mean")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("estimator", "mode", "expected"),
    [
        # |A| w of a right answer of 100 tokens and of wrong ones of 10 and 1,000.
        ("grpo", "sequence_mean", [0.003849001794597505, 0.01924500897298752, 0.0001924500897298752]),
        ("dr_grpo", "constant", [7.407407407407409e-05, 3.7037037037037037e-05, 3.7037037037037037e-05]),
        ("grpo", "token_mean_group", [0.001040270755296623, 0.0005201353776483114, 0.0005201353776483114]),
    ],
)
def test_what_a_token_weighs_by_the_length_of_its_answer(
    estimator: str, mode: Normalisation, expected: list[float]
) -> None:
    lengths, ids = torch.tensor([100, 10, 1000]), torch.tensor([0, 0, 0])
    advantages = group_advantages(torch.tensor([1.0, 0.0, 0.0]), ids, estimator=estimator, std_eps=0.0)
    found = advantages.abs() * loss_weights(lengths, ids, mode=mode, budget=3000)
    assert found.tolist() == pytest.approx(expected, rel=1e-12)
