"""Groups to sequences with advantages and weights, and the figures about them."""

import math
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.config_files import load_config
from megatron_rl.training.batch import make_batch, untrained
from megatron_rl.types import TrainedResponse
from tests.tiny import graded_group, run_config

NAN = math.nan
# One of four is right; lengths 2, 4, 1, 3. Then two of three, lengths 1, 5, 2. Then one of two, lengths 3, 6.
GROUPS = [
    graded_group(0, [1, 0, 0, 0], [2, 4, 1, 3], prompt_ids=(1, 5)),
    graded_group(1, [1, 0, 1], [1, 5, 2], prompt_ids=(1, 6, 7, 8)),
    graded_group(2, [0, 1], [3, 6], prompt_ids=(1,)),
]
ALL = [1.5, -0.5, -0.5, -0.5, 1 / math.sqrt(3), -2 / math.sqrt(3), 1 / math.sqrt(3), -math.sqrt(0.5), math.sqrt(0.5)]


def algorithm(**switches: Any) -> dict[str, Any]:
    return {"advantage": "grpo", "normalisation": "token_mean_group", "std_eps": 0.0, **switches}


def advantages(sequences: tuple[TrainedResponse, ...]) -> list[float]:
    return [sequence.advantage for sequence in sequences]


def weights(sequences: tuple[TrainedResponse, ...]) -> list[float]:
    return [sequence.weight for sequence in sequences]


def test_a_batch_keeps_the_order_the_ids_and_the_logprobs() -> None:
    (update,) = make_batch(GROUPS, run_config(algorithm=algorithm())).updates
    assert [sequence.length for sequence in update] == [2, 4, 1, 3, 1, 5, 2, 3, 6]
    assert [sequence.prompt_ids for sequence in update] == [(1, 5)] * 4 + [(1, 6, 7, 8)] * 3 + [(1,)] * 2
    answers = [graded for group in GROUPS for graded in group.responses]
    assert [sequence.response for sequence in update] == [answer.response for answer in answers]
    assert [sequence.home for sequence in update] == [answer.home for answer in answers]
    assert advantages(update) == pytest.approx(ALL, abs=1e-12)
    assert [sequence.group for sequence in update] == [0] * 4 + [1] * 3 + [2] * 2
    assert [sequence.number for sequence in update] == list(range(9))


def test_groups_and_numbers_go_on_over_optimizer_steps() -> None:
    _, second, third = make_batch(GROUPS, run_config(algorithm=algorithm(updates_per_rollout=3))).updates
    assert [(sequence.group, sequence.number) for sequence in second + third] == [
        (1, 4),
        (1, 5),
        (1, 6),
        (2, 7),
        (2, 8),
    ]


def test_responses_to_be_scored_only_have_the_same_ids_groups_and_numbers() -> None:
    (update,) = make_batch(GROUPS, run_config(algorithm=algorithm())).updates
    scored = untrained(GROUPS)
    for key in ("prompt_ids", "length", "home", "response", "group", "number"):
        assert [getattr(one, key) for one in scored] == [getattr(one, key) for one in update]
    assert advantages(tuple(scored)) == [0.0] * 9
    assert 0.0 not in weights(tuple(scored))  # one of weight 0 would not be scored


@pytest.mark.parametrize(
    ("normalisation", "expected"),
    [
        ("token_mean_group", [1 / 30] * 4 + [1 / 24] * 3 + [1 / 27] * 2),
        ("token_mean_batch", [1 / 27] * 9),
        ("sequence_mean", [1 / (9 * n) for n in (2, 4, 1, 3, 1, 5, 2, 3, 6)]),
        ("constant", [1 / (9 * 11)] * 9),
    ],
)
def test_the_weights_of_each_normalisation(normalisation: str, expected: list[float]) -> None:
    config = run_config(algorithm=algorithm(normalisation=normalisation), rollout={"max_response_tokens": 11})
    (update,) = make_batch(GROUPS, config).updates
    assert weights(update) == pytest.approx(expected, rel=1e-12)


def test_optimizer_steps_hold_whole_groups_and_are_weighted_one_by_one() -> None:
    two = make_batch(GROUPS, run_config(algorithm=algorithm(updates_per_rollout=2))).updates
    assert [len(update) for update in two] == [4, 5]
    assert [advantages(update) for update in two] == [pytest.approx(ALL[:4]), pytest.approx(ALL[4:])]
    assert weights(two[0]) == pytest.approx([1 / 10] * 4)
    assert weights(two[1]) == pytest.approx([1 / 16] * 3 + [1 / 18] * 2)
    three = make_batch(GROUPS, run_config(algorithm=algorithm(updates_per_rollout=3))).updates
    assert [len(update) for update in three] == [4, 3, 2]


def test_fewer_groups_than_optimizer_steps_make_one_step_each() -> None:
    config = run_config(algorithm=algorithm(updates_per_rollout=5))
    assert [len(update) for update in make_batch(GROUPS, config).updates] == [4, 3, 2]
    assert [len(update) for update in make_batch(GROUPS[:1], config).updates] == [4]


def test_rewards_are_wrong_and_right_and_what_lies_between() -> None:
    group = graded_group(0, [1, 0, 0.25], [2, 3, 4])
    config = run_config(algorithm=algorithm(advantage="dr_grpo"), rewards={"wrong": -1, "right": 3})
    (update,) = make_batch([group], config).updates
    # Rewards 3, −1, 0: mean 2/3.
    assert advantages(update) == pytest.approx([7 / 3, -5 / 3, -2 / 3])


def test_a_baseline_weighted_by_length_gets_the_lengths() -> None:
    (update,) = make_batch(GROUPS, run_config(algorithm=algorithm(advantage="opo"))).updates
    # Right: 2 of 10 tokens, 1 + 2 of 8, and 6 of 9.
    assert advantages(update) == pytest.approx([0.8, -0.2, -0.2, -0.2, 5 / 8, -3 / 8, 5 / 8, -2 / 3, 1 / 3], abs=1e-12)


def test_a_soft_punishment_is_added_to_the_reward_after_grading() -> None:
    # A budget of 20 and a buffer of 8: 16 tokens cost 1/2, 20 cost 1.
    group = graded_group(0, [1, 1, 0, 0], [12, 16, 20, 3], truncated=(2,))
    config = run_config(
        algorithm=algorithm(advantage="dr_grpo", soft_overlong={"buffer": 8}),
        rollout={"max_response_tokens": 20},
        rewards={"wrong": -1.0},
    )
    batch = make_batch([group], config)
    # Rewards 1, 1/2, −2, −1: mean −3/8.
    assert advantages(batch.updates[0]) == pytest.approx([1.375, 0.875, -1.625, -0.625])
    assert batch.metrics["batch/reward"] == (pytest.approx(-1.5), 4.0)


def test_truncated_responses_stay_in_the_statistics_and_are_not_trained_on() -> None:
    group = graded_group(0, [1, 0, 0, 0], [2, 4, 1, 3], truncated=(1,))
    (update,) = make_batch([group], run_config(algorithm=algorithm(mask_truncated=True))).updates
    assert advantages(update) == pytest.approx([1.5, -0.5, -0.5, -0.5])  # of all four
    assert weights(update) == pytest.approx([1 / 6, 0, 1 / 6, 1 / 6])
    (update,) = make_batch([group], run_config(algorithm=algorithm(mask_truncated=False))).updates
    assert weights(update) == pytest.approx([1 / 10] * 4)


def test_ungraded_responses_leave_the_statistics_and_are_not_trained_on() -> None:
    group = graded_group(0, [1, NAN, 0, 0, 0], [2, 7, 4, 1, 3])
    batch = make_batch([group], run_config(algorithm=algorithm()))
    assert advantages(batch.updates[0]) == pytest.approx([1.5, 0, -0.5, -0.5, -0.5])
    assert weights(batch.updates[0]) == pytest.approx([1 / 10, 0, 1 / 10, 1 / 10, 1 / 10])
    assert batch.metrics["batch/reward"] == (1.0, 4.0)
    assert batch.metrics["batch/tokens"] == (10.0, 1.0)


@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo"])  # the collector lets no such group through
def test_a_group_with_one_graded_response_does_not_end_the_run(estimator: str) -> None:
    lone = graded_group(3, [NAN, 1, NAN], [2, 4, 1])
    (update,) = make_batch([GROUPS[0], lone], run_config(algorithm=algorithm(advantage=estimator))).updates
    assert advantages(update)[4:] == [0.0, 0.0, 0.0]


def test_figures_about_the_batch() -> None:
    metrics = make_batch(GROUPS, run_config(algorithm=algorithm(advantage="dr_grpo"))).metrics
    assert metrics["batch/groups"] == (3.0, 1.0)
    assert metrics["batch/responses"] == (9.0, 1.0)
    assert metrics["batch/tokens"] == (27.0, 1.0)
    assert metrics["batch/reward"] == (4.0, 9.0)
    # |A|: 0.75 + 3 · 0.25, then 1/3 + 2/3 + 1/3, then 1/2 + 1/2.
    assert metrics["batch/advantage_abs"] == (pytest.approx(1.5 + 4 / 3 + 1), 9.0)


# ---- the divergence from a reference, taken from the reward


def test_the_divergence_is_taken_from_the_reward_before_advantages() -> None:
    config = run_config(
        algorithm=algorithm(advantage="dr_grpo", kl={"coef": 0.5, "place": "reward"}), rewards={"wrong": -1.0}
    )
    batch = make_batch(GROUPS[:1], config, kl=[0.2, 1.0, -0.4, 0.0])
    # Rewards 1 − 0.1, −1 − 0.5, −1 + 0.2, −1: mean −0.6.
    assert advantages(batch.updates[0]) == pytest.approx([1.5, -0.9, -0.2, -0.4], abs=1e-12)
    assert batch.metrics["batch/reward"] == (pytest.approx(-2.4), 4.0)
    assert batch.metrics["batch/kl"] == (pytest.approx(0.8), 10.0)  # per token


def test_it_comes_on_top_of_the_soft_punishment_and_gives_ungraded_responses_nothing() -> None:
    group = graded_group(0, [1, NAN, 0], [16, 3, 20])
    config = run_config(
        algorithm=algorithm(advantage="dr_grpo", soft_overlong={"buffer": 8}, kl={"coef": 0.5, "place": "reward"}),
        rollout={"max_response_tokens": 20},
    )
    (update,) = make_batch([group], config, kl=[0.6, 9.0, 0.2]).updates
    # Rewards 1 − 0.5 − 0.3 and 0 − 1 − 0.1.
    assert advantages(update) == pytest.approx([0.65, 0, -0.65], abs=1e-12)


def test_without_a_divergence_there_is_no_figure_of_it() -> None:
    assert "batch/kl" not in make_batch(GROUPS, run_config(algorithm=algorithm())).metrics


# ---- the floor of the soft punishment


@pytest.mark.parametrize(
    ("length", "floor", "penalty"),
    [(17, -1.0, -0.625), (17, -0.5, -0.5), (17, None, -0.625), (24, -1.0, -1.0), (24, None, -1.5)],
)
def test_the_soft_punishment_stops_at_its_floor(length: int, floor: float | None, penalty: float) -> None:
    # A budget of 20 and a buffer of 8: 17 tokens cost 5/8, and 24, which no engine samples, 12/8.
    config = run_config(
        algorithm=algorithm(soft_overlong={"buffer": 8, "floor": floor}), rollout={"max_response_tokens": 20}
    )
    assert make_batch([graded_group(0, [1, 1], [length, 3])], config).metrics["batch/reward"] == (2 + penalty, 2.0)


# ---- where the gradient goes


def shares(metrics: Any, objective: str, kind: str) -> dict[str, tuple[float, float]]:
    prefix = f"share_{objective}/{kind}_"
    return {name.removeprefix(prefix): pair for name, pair in metrics.items() if name.startswith(prefix)}


@pytest.mark.parametrize("updates", [1, 2])
@pytest.mark.parametrize("objective", ["this", "grpo", "dapo", "dr_grpo"])
def test_the_shares_of_each_objective_are_there_and_sum_to_one(objective: str, updates: int) -> None:
    config = run_config(algorithm=algorithm(advantage="rloo", updates_per_rollout=updates))
    metrics = make_batch(GROUPS, config).metrics
    for kind, count in (("length", 8), ("pass_rate", 4)):
        found = shares(metrics, objective, kind)
        assert len(found) == count
        assert sum(part / whole for part, whole in found.values()) == pytest.approx(1, abs=1e-12)


def test_the_shares_of_the_first_group_by_hand() -> None:
    # One right of 2 tokens, wrong ones of 4, 1 and 3: quarters end at 1.75, 2.5 and 3.25 tokens.
    metrics = make_batch(GROUPS[:1], run_config(algorithm=algorithm(advantage="rloo"))).metrics
    for objective, masses in {
        "grpo": {"25_50_right": 3, "0_25_wrong": 1, "50_75_wrong": 1, "75_100_wrong": 1},  # |A| alone
        "dapo": {"25_50_right": 6, "0_25_wrong": 1, "50_75_wrong": 3, "75_100_wrong": 4},  # |A| len
        "dr_grpo": {"25_50_right": 6, "0_25_wrong": 1, "50_75_wrong": 3, "75_100_wrong": 4},
    }.items():
        found = {name: part / whole for name, (part, whole) in shares(metrics, objective, "length").items() if part}
        total = sum(masses.values())
        assert found == pytest.approx({name: mass / total for name, mass in masses.items()}, abs=1e-12)


def test_this_objective_is_compared_on_equal_terms() -> None:
    dr_grpo = {"advantage": "dr_grpo", "normalisation": "constant"}
    groups = [graded_group(0, [1, 0, 0, 0], [2, 4, 1, 3], truncated=(1,)), *GROUPS[1:]]
    for switches in (dr_grpo, {**dr_grpo, "mask_truncated": True}):
        metrics = make_batch(groups, run_config(algorithm=algorithm(**switches))).metrics
        for kind in ("length", "pass_rate"):
            this = shares(metrics, "this", kind)
            assert this == shares(metrics, "dr_grpo", kind)
            assert this != shares(metrics, "grpo", kind)


def test_shares_go_by_scores_and_not_by_shaped_rewards() -> None:
    # Rewards 1 − 0.75, −1 and −1: by them none of the three is right.
    config = run_config(
        algorithm=algorithm(soft_overlong={"buffer": 8}), rewards={"wrong": -1.0}, rollout={"max_response_tokens": 20}
    )
    metrics = make_batch([graded_group(0, [1, 0, 0], [18, 3, 4])], config).metrics
    assert metrics["share_this/length_75_100_right"][0] > 0
    assert metrics["share_this/pass_rate_25_50"][0] == pytest.approx(metrics["share_this/pass_rate_25_50"][1])


def test_a_batch_in_which_nothing_is_trained_has_no_shares() -> None:
    group = graded_group(0, [1, 0], [2, 4], truncated=(0, 1))
    metrics = make_batch([group], run_config(algorithm=algorithm(mask_truncated=True))).metrics
    assert not [name for name in metrics if name.startswith("share_")]


def test_the_reference_job_takes_sixteen_optimizer_steps_of_thirty_two_whole_groups() -> None:
    """DAPO: 512 prompts × 16 responses, mini-batches of 512 responses."""
    config = load_config(Path(__file__).parents[2] / "launch/recipes/dapo_qwen2.5_32b.yaml")
    scores = [float(sample < 5) for sample in range(16)]
    groups = [
        graded_group(number, scores, [1 + (number + sample) % 7 for sample in range(16)]) for number in range(512)
    ]
    updates = make_batch(groups, config).updates
    assert [len(update) for update in updates] == [512] * 16
    for number, update in enumerate(updates):
        assert {one.group for one in update} == set(range(32 * number, 32 * number + 32))
        assert sum(one.weight * one.length for one in update) == pytest.approx(1, abs=1e-12)
