"""The worked vectors of tests/cases/loss_vectors.json, every number of them: advantages, weights, losses, gradients.

Their common batch is one group with rewards [1, 0, 0, 0], responses of 2, 4, 1 and 3 tokens and a budget of 10. Old
log-probs are 0, so a log-prob is the logarithm of the ratio, and a loss is minus the objective.
"""

import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.algorithms.advantages import ESTIMATORS, group_advantages
from megatron_rl.algorithms.filters import keep_group
from megatron_rl.algorithms.losses import masked_mean, ppo_clip
from megatron_rl.algorithms.shaping import soft_overlong_penalty
from megatron_rl.algorithms.weights import loss_weights
from megatron_rl.training.batch import make_batch
from tests.cases.group import group_of_one
from tests.cases.logits import logprobs_of_logits
from tests.cases.step import Responses, Step, double, gradient, loss_inputs
from tests.tiny import graded_group, run_config

VECTORS = json.loads((Path(__file__).parents[1] / "cases" / "loss_vectors.json").read_text(encoding="utf-8"))
V1, V6, V7 = (VECTORS[name] for name in ("V1_advantages", "V6_dapo_two_groups_normaliser", "V7_microbatch_or_DP_split"))
V10, V11, V12 = (VECTORS[name] for name in ("V10_dynamic_sampling", "V11_overlong_filtering", "V12_degenerate"))
RATIOS, REWARDS = VECTORS["common_batch"]["ratios"], VECTORS["common_batch"]["rewards"]
COMMON: Responses = (RATIOS, REWARDS)
ON_POLICY: Responses = ([[1.0] * len(of_one) for of_one in RATIOS], REWARDS)
CLIP_HIGHER: dict[str, Any] = {"clip_low": 0.2, "clip_high": 0.28}


def near(expected: Any) -> Any:
    return pytest.approx(expected, rel=0, abs=1e-12)


def flat(ragged: list[list[float]]) -> list[float]:
    return list(itertools.chain(*ragged))


def advantages(rewards: list[float], estimator: str, *, eps: float = 0.0, ddof: int = 1) -> list[float]:
    ids = torch.zeros(len(rewards), dtype=torch.int64)
    return group_advantages(double(rewards), ids, estimator=estimator, std_ddof=ddof, std_eps=eps).tolist()


def test_there_are_fourteen_vectors() -> None:
    names = {name.split("_")[0] for name in VECTORS}
    assert names == {"", "common", *(f"V{number}" for number in range(1, 15))}
    assert VECTORS["common_batch"]["lengths"] == [len(of_one) for of_one in RATIOS]


@pytest.mark.parametrize(
    ("name", "estimator", "options"),
    [
        ("grpo_ddof1_eps0", "grpo", {}),
        ("grpo_ddof0_eps0", "grpo", {"ddof": 0}),
        ("grpo_ddof1_eps1e-6_verl", "grpo", {"eps": 1e-6}),
        ("grpo_ddof1_eps1e-4_trl", "grpo", {"eps": 1e-4}),
        ("grpo_ddof1_eps1e-8_oat", "grpo", {"eps": 1e-8}),
        ("drgrpo", "dr_grpo", {}),
        ("rloo", "rloo", {}),
        ("rloo_equals_drgrpo_times_G_over_Gm1", "rloo", {}),
    ],
)
def test_v1_advantages(name: str, estimator: str, options: dict[str, Any]) -> None:
    assert advantages(V1["rewards_01"], estimator, **options) == near(V1[name])


@pytest.mark.parametrize(
    ("name", "estimator"),
    [("pm1_grpo_ddof1_eps0 (same as 0/1: affine invariant)", "grpo"), ("pm1_drgrpo (doubles)", "dr_grpo")],
)
def test_v1_rewards_of_plus_and_minus_one(name: str, estimator: str) -> None:
    assert advantages(V1["rewards_pm1"], estimator) == near(V1[name])


def test_v1_mean_and_both_deviations() -> None:
    centred = advantages(V1["rewards_01"], "dr_grpo")[0]
    assert 1 - centred == near(V1["mean"])
    for ddof in (0, 1):
        assert centred / advantages(V1["rewards_01"], "grpo", ddof=ddof)[0] == near(V1[f"std_ddof{ddof}"])


@pytest.mark.parametrize("size", [4, 8, 16])
def test_v1_the_two_deviations_differ_by_a_factor_of_the_group_size(size: int) -> None:
    rewards = [1.0] + [0.0] * (size - 1)
    ratio = advantages(rewards, "grpo")[0] / advantages(rewards, "grpo", ddof=0)[0]
    assert ratio == near(V1["ddof_ratio_sqrt((G-1)/G)"][f"G{size}"])


@pytest.mark.parametrize("correct", range(1, 8))
def test_v1_the_weight_of_a_question_by_how_many_of_eight_get_it_right(correct: int) -> None:
    rewards = [1.0] * correct + [0.0] * (8 - correct)
    grpo, dr_grpo = advantages(rewards, "grpo"), advantages(rewards, "dr_grpo")
    assert dr_grpo[0] / grpo[0] == near(V1["G8_k_correct_std_ddof1"][str(correct)])
    sums = [sum(map(abs, of_one)) for of_one in (grpo, dr_grpo)]
    assert sums == near(V1["G8_k_correct_sum_abs_adv_ddof1 (question weight; drgrpo beside)"][str(correct)])


OBJECTIVES: dict[str, dict[str, Any]] = {
    "V2_grpo_eps0.2": {"estimator": "grpo", "mode": "sequence_mean"},
    "V3_drgrpo_eps0.2": {"estimator": "dr_grpo", "mode": "constant"},
    "V4_dapo_token_level_0.2_0.28": {"estimator": "grpo", "mode": "token_mean_group", **CLIP_HIGHER},
    "V5_rloo_eps0.2": {"estimator": "rloo", "mode": "constant"},
}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_v2_to_v5_the_common_batch(name: str) -> None:
    vector, step = VECTORS[name], Step(COMMON, **OBJECTIVES[name])
    if "A_ddof1" in vector:
        assert advantages(REWARDS, "grpo") == near(vector["A_ddof1"])
    loss, by_token = step.loss_and_gradient()
    assert loss == near(vector["loss"])
    assert by_token.tolist() == near(flat(vector["grad_logp"]))
    assert (-step.losses()[1]).tolist() == near(flat(vector["per_token_objective"]))


@pytest.mark.parametrize("name", [name for name in OBJECTIVES if not name.startswith("V5")])
def test_v2_to_v4_on_policy(name: str) -> None:
    vector, step = VECTORS[name], Step(ON_POLICY, **OBJECTIVES[name])
    expected = vector.get("on_policy") or vector["on_policy(all r=1)"]
    loss, by_token = step.loss_and_gradient()
    assert loss == near(expected["loss"])
    assert by_token.tolist() == near(flat(expected["grad_logp"]))
    assert (-step.losses()[1]).tolist() == near(flat(expected["per_token_objective"]))


def test_v2_with_the_population_deviation() -> None:
    loss, _ = Step(COMMON, mode="sequence_mean", ddof=0).loss_and_gradient()
    assert loss == near(VECTORS["V2_grpo_eps0.2"]["loss_with_ddof0"])


def test_v3_by_the_constants_of_others() -> None:
    vector = VECTORS["V3_drgrpo_eps0.2"]
    without_budget, _ = Step(COMMON, estimator="dr_grpo", mode="constant", budget=1).loss_and_gradient()
    assert without_budget == near(vector["paper_eq_no_L (1/G sum_i sum_t)"])
    ours, _ = Step(COMMON, estimator="dr_grpo", mode="constant").loss_and_gradient()
    assert 4 * ours == near(vector["verl_seq-mean-token-sum-norm (sum/L, no 1/G)"])


def test_v5_is_v3_times_four_thirds() -> None:
    ours, _ = Step(COMMON, estimator="dr_grpo", mode="constant").loss_and_gradient()
    assert ours * 4 / 3 == near(VECTORS["V5_rloo_eps0.2"]["equals"])


SECOND: Responses = (V6["group2"]["ratios"], V6["group2"]["rewards"])


@pytest.mark.parametrize(
    ("mode", "loss", "weights"),
    [
        ("token_mean_group", "paper_per_group_then_mean_over_questions", ("paper_g1", "paper_g2")),
        ("token_mean_batch", "batch_level_token_mean (verl token-mean, TRL dapo)", ("batch_level", "batch_level")),
    ],
)
def test_v6_two_groups_of_ten_and_twenty_four_tokens(mode: str, loss: str, weights: tuple[str, str]) -> None:
    step = Step(COMMON, SECOND, mode=mode, **CLIP_HIGHER)
    assert step.loss_and_gradient()[0] == near(V6[loss])
    assert (step.weights[0].item(), step.weights[-1].item()) == near([V6["per_token_weight"][key] for key in weights])
    objectives = -step.losses()[1]
    first = step.response < 4
    assert [int(first.sum()), int((~first).sum())] == V6["tokens"]
    assert [objectives[first].sum().item(), objectives[~first].sum().item()] == near(V6["sum_token_objective"])
    of_responses = [step.advantages[step.response == number][0].item() for number in range(4, 8)]
    assert of_responses == near(V6["group2"]["A_ddof1"])


def test_v7_micro_batches_add_up_and_are_not_averaged() -> None:
    step = Step(COMMON, **CLIP_HIGHER)
    split = step.response < 2, step.response >= 2
    assert [int(tokens.sum()) for tokens in split] == V7["micro_tokens"]
    assert [-step.losses(tokens)[1].sum().item() for tokens in split] == near(V7["micro_sums"])
    parts = [step.loss_and_gradient(tokens)[0] for tokens in split]
    assert sum(parts) == near(V7["RIGHT_global"])
    assert sum(parts) != pytest.approx(V7["WRONG_mean_of_micro_means"], abs=1e-3)
    assert [2 * part for part in parts] == near(V7["RIGHT_via_DDP_mean (each rank: dp*sum_r/T, then averaged)"])


CLIPS: dict[str, dict[str, Any]] = {
    "sym0.2": {"clip_low": 0.2, "clip_high": 0.2},
    "higher0.2_0.28": CLIP_HIGHER,
    "higher_dual3": {**CLIP_HIGHER, "dual_clip": 3.0},
    "higher_dual10": {**CLIP_HIGHER, "dual_clip": 10.0},
}


@pytest.mark.parametrize("clip", CLIPS)
def test_v8_the_clip_table(clip: str) -> None:
    rows = VECTORS["V8_clip_table"]["rows"]
    assert (len(rows), set(rows[0])) == (20, {"A", "ratio", *CLIPS})
    inputs = loss_inputs(double([row["ratio"] for row in rows]).log(), double([row["A"] for row in rows]))
    losses = ppo_clip(inputs, **CLIPS[clip]).losses
    assert (-losses).tolist() == near([row[clip]["obj"] for row in rows])
    assert gradient(inputs, -losses.sum()).tolist() == near([row[clip]["dobj_dlogp"] for row in rows])


@pytest.mark.parametrize("name", ["paper", "toy"])
def test_v9_soft_overlong_punishment(name: str) -> None:
    vector = VECTORS["V9_soft_overlong"][name]
    lengths = torch.tensor([case["len"] for case in vector["cases"]])
    budget, buffer = vector["L_max"], vector["L_cache"]
    found = soft_overlong_penalty(lengths, max_length=budget, buffer=buffer, floor=-1.0)
    assert found.tolist() == near([case["penalty"] for case in vector["cases"]])
    if name == "paper":
        found = soft_overlong_penalty(lengths, max_length=budget, buffer=buffer, floor=None)
        assert found.tolist() == near([case["verl"] for case in vector["cases"]])


@pytest.mark.parametrize("case", VECTORS["V9_soft_overlong"]["paper"]["cases"], ids=lambda case: str(case["len"]))
@pytest.mark.parametrize(("score", "total"), [(1.0, "total_if_correct(+1)"), (0.0, "total_if_wrong(-1)")])
def test_v9_the_punishment_is_added_to_rewards_of_plus_and_minus_one(
    case: dict[str, float], score: float, total: str
) -> None:
    config = run_config(algorithm={"soft_overlong": {"buffer": 4096}}, rewards={"wrong": -1.0})
    batch = make_batch([graded_group(0, [score], [int(case["len"])])], config)
    assert batch.metrics["batch/reward"] == (near(case[total]), 1.0)


@pytest.mark.parametrize("case", V10["cases"], ids=lambda case: case["group"])
def test_v10_groups_are_kept_by_accuracy_and_not_by_score(case: dict[str, Any]) -> None:
    assert keep_group(case["acc"]) is case["keep_by_acc(paper 0<k<G)"]
    shaped = advantages(case["score"], "grpo", eps=1e-6)
    assert shaped == near(case["grpo_A_from_score_ddof1_eps1e-6"])
    assert any(shaped) is case["keep_by_score_std>0"]


def test_v10_the_groups_that_fill_a_batch_of_three() -> None:
    assert "0/4,2/4,4/4,1/4,4/4,3/4,2/4 -> kept prompts indices 1,3,5" in V10["fill_example"]
    kept = [n for n, right in enumerate([0, 2, 4, 1, 4, 3, 2]) if keep_group([1.0] * right + [0.0] * (4 - right))]
    assert (kept[:3], len(kept)) == ([1, 3, 5], 4)


def test_v11_a_masked_response_leaves_the_denominators_and_stays_in_the_statistics() -> None:
    dapo, by_token = Step(COMMON, untrained=[1], **CLIP_HIGHER).loss_and_gradient()
    grpo, _ = Step(COMMON, untrained=[1], mode="sequence_mean").loss_and_gradient()
    assert dapo == near(V11["dapo_token_level (denominator excludes its 4 tokens)"])
    assert by_token[2:6].tolist() == [0.0] * 4
    assert grpo == near(V11["grpo_seq_mean_over_unmasked(3)"])
    # And what it would be with the denominators of everything: 10 tokens, 4 responses.
    assert dapo * 6 / 10 == near(V11["WRONG_denominator_kept"])
    assert grpo * 3 / 4 == near(V11["grpo_seq_mean_over_G(4) (TRL; verl with global_batch_size)"])


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_v12_equal_rewards_are_exactly_zero_with_no_eps(estimator: str) -> None:
    assert "must be exactly 0" in V12["zero_std_A"]
    ids = torch.zeros(3, dtype=torch.int64)
    lengths = torch.tensor([3, 1, 2])
    found = group_advantages(double([0.7] * 3), ids, estimator=estimator, std_eps=0.0, lengths=lengths)
    assert found.tolist() == [0.0] * 3


def test_v12_a_group_of_one() -> None:
    assert V12["G1"]["drgrpo"] == advantages([1.0], "dr_grpo")[0] == 0.0
    assert V12["G1"]["grpo_ddof1"].startswith("nan")
    assert advantages([1.0], "grpo") == [0.0]  # neither NaN nor verl's 0.999999
    assert V12["G1"]["rloo"] == "division by zero"
    with pytest.raises(ValueError, match="rloo needs the rewards of others"):
        advantages([1.0], "rloo")


@pytest.mark.parametrize(
    ("name", "estimator", "mode"),
    [
        ("grpo_ddof1", "grpo", "sequence_mean"),
        ("drgrpo_L3000", "dr_grpo", "constant"),
        ("dapo", "grpo", "token_mean_group"),
    ],
)
def test_v13_what_a_token_weighs_by_the_length_of_its_answer(name: str, estimator: str, mode: str) -> None:
    ((said, expected),) = VECTORS["V13_length_weights"].items()
    assert said.startswith("wrong answers 10 and 1000 tokens, right 100; R=[1,0,0]")
    ratios = [[1.0] * 100, [1.0] * 10, [1.0] * 1000]
    _, by_token = Step((ratios, [1.0, 0.0, 0.0]), estimator=estimator, mode=mode, budget=3000).loss_and_gradient()
    assert by_token[[0, 100, 110]].abs().tolist() == near(expected[name])


V14 = VECTORS["V14_entropy"]


@pytest.fixture(scope="module")
def group() -> Iterator[dist.ProcessGroup]:
    with group_of_one() as one:
        yield one


def scored(temperature: float, group: dist.ProcessGroup) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs and entropy of three tokens that all have the distribution of the vector."""
    logits, labels = double(V14["p"]).log().expand(3, 3), torch.arange(3)
    return logprobs_of_logits(logits, labels, temperature=temperature, vocabulary=3, group=group)


@pytest.mark.parametrize(
    ("temperature", "entropy", "distribution"), [(1.0, "H_nats", "p"), (0.5, "H_at_T0.5_of_same_logits", "q_T0.5")]
)
def test_v14_entropy_and_probabilities(
    temperature: float, entropy: str, distribution: str, group: dist.ProcessGroup
) -> None:
    logprobs, entropies, _ = scored(temperature, group)
    assert entropies.tolist() == pytest.approx([V14[entropy]] * 3, rel=0, abs=1e-12)
    assert logprobs.exp().tolist() == pytest.approx(V14[distribution], rel=0, abs=1e-12)
    assert V14[entropy] == near(-sum(p * math.log(p) for p in V14[distribution]))


def test_v14_the_mean_entropy_is_over_tokens() -> None:
    expected = V14["token_mean_over_two_answers_lengths_1_and_3_with_H=[[1],[0,0,0]]"]
    entropies = double([1, 0, 0, 0])
    total, weight = masked_mean(entropies, torch.ones(4, dtype=torch.bool))
    assert (total / weight).item() == expected["token_mean"]
    of_responses = loss_weights(torch.tensor([1, 3]), torch.zeros(2, dtype=torch.int64), mode="sequence_mean")
    assert (entropies * of_responses[[0, 1, 1, 1]]).sum().item() == near(expected["seq_mean"])
