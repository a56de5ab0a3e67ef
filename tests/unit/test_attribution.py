"""Where the gradient goes: what Liu et al. (2025) say of the normalisers, seen in batches worked out by hand."""

import math

import pytest
import torch

from megatron_rl.algorithms.advantages import group_advantages
from megatron_rl.algorithms.attribution import QUARTERS, gradient_shares
from megatron_rl.algorithms.weights import loss_weights
from tests.cases.step import double

NAN = math.nan
OBJECTIVES = {
    "grpo": ("grpo", "sequence_mean"),
    "dapo": ("grpo", "token_mean_group"),
    "dr_grpo": ("dr_grpo", "constant"),
}


def shares(objective: str, scores: list[float], lengths: list[int], groups: list[int]) -> dict[str, float]:
    """Of the objective, as fractions of the whole; those that are 0 left out."""
    estimator, mode = OBJECTIVES[objective]
    tokens, ids = torch.tensor(lengths), torch.tensor(groups)
    found = gradient_shares(
        group_advantages(double(scores), ids, estimator=estimator, std_eps=0.0),
        loss_weights(tokens, ids, mode=mode, budget=3000),
        tokens,
        double(scores),
        ids,
    )
    return {name: part / total for name, (part, total) in found.items() if part}


def by_length(of_all: dict[str, float]) -> dict[str, float]:
    return {name.removeprefix("length_"): share for name, share in of_all.items() if name.startswith("length_")}


def by_pass_rate(of_all: dict[str, float]) -> dict[str, float]:
    return {name.removeprefix("pass_rate_"): share for name, share in of_all.items() if name.startswith("pass_rate_")}


@pytest.mark.parametrize(
    ("objective", "expected"),
    [
        # One over length: a wrong answer of 1,000 tokens costs as much as one of 10, a hundredth per token.
        ("grpo", [1 / 4, 1 / 4, 1 / 4, 1 / 4]),
        # The same weight for each token of the group, or of all: shares go by length.
        ("dapo", [10 / 1310, 100 / 1310, 200 / 1310, 1000 / 1310]),
        ("dr_grpo", [10 / 1310, 100 / 1310, 200 / 1310, 1000 / 1310]),
    ],
)
def test_short_and_long_wrong_answers(objective: str, expected: list[float]) -> None:
    found = by_length(shares(objective, [0, 1, 1, 0], [10, 100, 200, 1000], [0, 0, 0, 0]))
    names = ["0_25_wrong", "25_50_right", "50_75_right", "75_100_wrong"]
    assert found == pytest.approx(dict(zip(names, expected, strict=True)), abs=1e-15)


@pytest.mark.parametrize(
    ("objective", "hard"),
    [
        # One of eight right, and four of eight: |r − mean| sums to 7/4 and 4, the deviations are √(1/8) and √(2/7).
        ("grpo", 1.75 * math.sqrt(8) / (1.75 * math.sqrt(8) + 4 * math.sqrt(3.5))),
        ("dapo", 1.75 * math.sqrt(8) / (1.75 * math.sqrt(8) + 4 * math.sqrt(3.5))),
        ("dr_grpo", 1.75 / (1.75 + 4.0)),
    ],
)
def test_the_deviation_favours_the_question_that_nearly_none_gets_right(objective: str, hard: float) -> None:
    scores = [1.0] + [0.0] * 7 + [1.0] * 4 + [0.0] * 4
    found = by_pass_rate(shares(objective, scores, [5] * 16, [0] * 8 + [1] * 8))
    assert found == pytest.approx({"0_25": hard, "50_75": 1 - hard}, abs=1e-12)


def test_one_group_of_ten_and_one_of_a_thousand_tokens() -> None:
    scores, lengths, groups = [1.0, 0.0, 1.0, 0.0], [5, 5, 500, 500], [0, 0, 1, 1]
    long = ("75_100_right", "75_100_wrong", "50_75_right", "50_75_wrong")
    found = {
        name: sum(share for key, share in by_length(shares(name, scores, lengths, groups)).items() if key in long)
        for name in OBJECTIVES
    }
    # DAPO (eq. 8 by groups) gives each question the same; Dr. GRPO each token.
    assert found == pytest.approx({"grpo": 1 / 2, "dapo": 1 / 2, "dr_grpo": 1000 / 1010}, abs=1e-12)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_all_shares_of_a_kind_sum_to_one(objective: str) -> None:
    scores = [1, 0, 0.5, 0, 1, 1, 0, 0.25, 1, 0, 0, 0]
    found = shares(objective, scores, [3, 9, 4, 7, 1, 2, 8, 6, 5, 5, 3, 2], [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2])
    assert sum(by_length(found).values()) == pytest.approx(1, abs=1e-12)
    assert sum(by_pass_rate(found).values()) == pytest.approx(1, abs=1e-12)


def pairs(
    advantages: list[float], weights: list[float], lengths: list[int], scores: list[float], groups: list[int]
) -> dict[str, tuple[float, float]]:
    ids = torch.tensor(groups, dtype=torch.int64)
    return gradient_shares(double(advantages), double(weights), torch.tensor(lengths), double(scores), ids)


def test_every_share_is_there_with_the_whole_as_its_weight() -> None:
    found = pairs([0.5, -0.25], [0.5, 2.0], [4, 6], [1, 0], [0, 0])
    sides = [f"length_{quarter}_{side}" for quarter in QUARTERS for side in ("right", "wrong")]
    assert set(found) == {*sides, *(f"pass_rate_{quarter}" for quarter in QUARTERS)}
    # |A| w len: 1 and 3.
    assert {whole for _, whole in found.values()} == {4.0}
    assert found["length_0_25_right"] == (1.0, 4.0)
    assert found["length_75_100_wrong"] == (3.0, 4.0)
    assert found["pass_rate_50_75"] == (4.0, 4.0)


def test_ungraded_responses_count_in_no_share_and_in_no_pass_rate() -> None:
    found = pairs([0.5, -0.25, 9.0], [0.5, 2.0, 1.0], [4, 6, 1000], [1, 0, NAN], [0, 0, 0])
    assert found == pairs([0.5, -0.25], [0.5, 2.0], [4, 6], [1, 0], [0, 0])


def test_responses_that_are_not_trained_move_no_quarter_and_keep_their_part_in_the_pass_rate() -> None:
    # Lengths 4 and 6 are trained; two truncated answers of 1,000 tokens, wrong, are not.
    found = pairs([0.75, -0.25, -0.25, -0.25], [0.5, 2.0, 0.0, 0.0], [4, 6, 1000, 1000], [1, 0, 0, 0], [0] * 4)
    assert found["length_0_25_right"] == (1.5, 4.5)
    assert found["length_75_100_wrong"] == (3.0, 4.5)
    assert found["pass_rate_25_50"] == (4.5, 4.5)  # one of four, not one of two


def test_where_nothing_is_trained_there_are_no_shares() -> None:
    assert pairs([0.5, -0.5], [0.0, 0.0], [4, 6], [1, 0], [0, 0]) == {}
    assert pairs([0.0, 0.0], [0.5, 0.5], [4, 6], [NAN, NAN], [0, 0]) == {}
    assert pairs([], [], [], [], []) == {}


def test_without_advantages_the_whole_is_zero() -> None:
    found = pairs([0.0, 0.0], [0.5, 0.5], [4, 6], [1, 1], [0, 0])
    assert set(found.values()) == {(0.0, 0.0)}


@pytest.mark.parametrize(
    ("rate", "quarter"),
    [(0.0, "0_25"), (0.24, "0_25"), (0.25, "25_50"), (0.5, "50_75"), (0.75, "75_100"), (1.0, "75_100")],
)
def test_the_bounds_of_pass_rates(rate: float, quarter: str) -> None:
    found = pairs([1.0, 1.0], [1.0, 1.0], [3, 3], [rate, rate], [7, 7])
    assert {name for name, (part, _) in found.items() if name.startswith("pass_rate") and part} == {
        f"pass_rate_{quarter}"
    }


@pytest.mark.parametrize(("score", "side"), [(0.49, "wrong"), (0.5, "right"), (1.0, "right")])
def test_an_answer_is_right_from_one_half_on(score: float, side: str) -> None:
    found = pairs([1.0], [1.0], [3], [score], [0])
    assert found[f"length_75_100_{side}"] == (3.0, 3.0)


def test_many_answers_of_the_longest_length_are_the_longest_quarter() -> None:
    """As in a batch of which half was cut off at the budget."""
    lengths = [5, 6, 7, 8, *[100] * 6]
    found = pairs([1.0] * 10, [0.01] * 10, lengths, [0.0] * 10, [0] * 10)
    assert found["length_75_100_wrong"][0] == pytest.approx(6.0)
    assert found["length_25_50_wrong"][0] == pytest.approx(0.08)
