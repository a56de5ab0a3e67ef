"""Group advantages, against values worked out by hand: rewards [1, 0, 0, 0] have mean 1/4 and deviation exactly 1/2."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatron_rl.algorithms.advantages import group_advantages

NAN = math.nan


def one_group(rewards: list[float], estimator: str, **options: float) -> list[float]:
    ids = torch.zeros(len(rewards), dtype=torch.int64)
    return group_advantages(torch.tensor(rewards, dtype=torch.float64), ids, estimator=estimator, **options).tolist()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("estimator", "options", "expected"),
    [
        ("grpo", {"std_ddof": 1, "std_eps": 0.0}, [1.5, -0.5, -0.5, -0.5]),
        (
            "grpo",
            {"std_ddof": 0, "std_eps": 0.0},
            [math.sqrt(3), -1 / math.sqrt(3), -1 / math.sqrt(3), -1 / math.sqrt(3)],
        ),
        ("grpo", {}, [0.75 / 0.500001, -0.25 / 0.500001, -0.25 / 0.500001, -0.25 / 0.500001]),
        ("grpo", {"std_eps": 1e-4}, [0.75 / 0.5001, -0.25 / 0.5001, -0.25 / 0.5001, -0.25 / 0.5001]),
        ("dr_grpo", {}, [0.75, -0.25, -0.25, -0.25]),
        ("rloo", {}, [1.0, -1 / 3, -1 / 3, -1 / 3]),
    ],
)
def test_the_worked_example(estimator: str, options: dict[str, float], expected: list[float]) -> None:
    assert one_group([1, 0, 0, 0], estimator, **options) == pytest.approx(expected, abs=1e-15)


def test_rewards_of_plus_and_minus_one_double_the_centred_estimators_and_leave_grpo() -> None:
    assert one_group([1, -1, -1, -1], "grpo", std_eps=0.0) == pytest.approx([1.5, -0.5, -0.5, -0.5], abs=1e-15)
    assert one_group([1, -1, -1, -1], "dr_grpo") == [1.5, -0.5, -0.5, -0.5]
    assert one_group([1, -1, -1, -1], "rloo") == pytest.approx([2.0, -2 / 3, -2 / 3, -2 / 3], abs=1e-15)


def test_rloo_is_the_reward_less_the_mean_of_the_others() -> None:
    rewards = [0.9, -0.3, 0.4, 1.7, 0.2]
    by_hand = [r - (sum(rewards) - r) / 4 for r in rewards]
    assert one_group(rewards, "rloo") == pytest.approx(by_hand, abs=1e-14)


def test_groups_are_told_apart_by_id_in_any_order_and_of_any_size() -> None:
    # Group 7: [1, 0, 0, 0]; group 2: [4, 1]; group −5: [0.5, 0.5, 2]; interleaved.
    ids = torch.tensor([7, 2, 7, -5, 7, -5, 2, -5, 7])
    rewards = torch.tensor([0, 4, 1, 0.5, 0, 0.5, 1, 2, 0], dtype=torch.float64)
    expected = [-0.25, 1.5, 0.75, -0.5, -0.25, -0.5, -1.5, 1.0, -0.25]
    assert group_advantages(rewards, ids, estimator="dr_grpo").tolist() == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo", "rloo"])
@pytest.mark.parametrize("eps", [0.0, 1e-6])
def test_equal_rewards_give_exactly_zero(estimator: str, eps: float) -> None:
    # In float32 the deviation of sixteen −1.3 is noise: not 0, and a thousand times the eps of some systems.
    assert one_group([-1.3] * 16, estimator, std_eps=eps) == [0.0] * 16
    rewards = torch.full((16,), -1.3, dtype=torch.float32)
    ids = torch.zeros(16, dtype=torch.int64)
    assert group_advantages(rewards, ids, estimator=estimator, std_eps=eps).tolist() == [0.0] * 16


def test_float32_rewards_are_worked_on_in_float64() -> None:
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0])
    advantages = group_advantages(rewards, torch.zeros(7, dtype=torch.int64), estimator="dr_grpo")
    assert advantages.dtype == torch.float64
    assert advantages[0].item() == pytest.approx(6 / 7, abs=1e-15)


@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo", "rloo"])
def test_an_ungraded_response_leaves_the_statistics_and_gets_zero(estimator: str) -> None:
    whole = one_group([1, 0, 0, 0], estimator)
    assert one_group([NAN, 1, 0, NAN, 0, 0], estimator) == [0.0, whole[0], whole[1], 0.0, whole[2], whole[3]]


@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo", "rloo"])
def test_a_group_without_grades_gets_zero(estimator: str) -> None:
    assert one_group([NAN, NAN, NAN], estimator) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo"])
@pytest.mark.parametrize("rewards", [[0.7], [0.7, NAN, NAN]])
def test_a_group_of_one_graded_response_gets_zero(estimator: str, rewards: list[float]) -> None:
    assert one_group(rewards, estimator, std_eps=0.0) == [0.0] * len(rewards)


@pytest.mark.parametrize("rewards", [[0.7], [NAN, 0.7]])
def test_rloo_refuses_a_group_of_one(rewards: list[float]) -> None:
    with pytest.raises(ValueError, match="group 4 has one graded response: rloo needs"):
        group_advantages(torch.tensor(rewards), torch.full((len(rewards),), 4), estimator="rloo")


def test_an_unknown_estimator_is_refused() -> None:
    with pytest.raises(ValueError, match="'ppo'"):
        one_group([1, 0], "ppo")


def test_the_arguments_are_not_changed() -> None:
    rewards, ids = torch.tensor([1.0, 0.0, NAN], dtype=torch.float64), torch.tensor([3, 3, 3])
    before = rewards.clone()
    group_advantages(rewards, ids, estimator="grpo")
    assert torch.equal(rewards.nan_to_num(9.0), before.nan_to_num(9.0))


def correct_of_eight(correct: int) -> Tensor:
    return torch.tensor([1.0] * correct + [0.0] * (8 - correct), dtype=torch.float64)


@pytest.mark.parametrize(
    ("correct", "grpo", "dr_grpo"),
    [
        (1, 4.949747468305832, 1.75),
        (2, 6.48074069840786, 3.0),
        (3, 7.245688373094719, 3.75),
        (4, 7.483314773547883, 4.0),
        (7, 4.949747468305832, 1.75),
    ],
)
def test_the_weight_of_a_question_by_how_many_get_it_right(correct: int, grpo: float, dr_grpo: float) -> None:
    ids, rewards = torch.zeros(8, dtype=torch.int64), correct_of_eight(correct)
    normed = group_advantages(rewards, ids, estimator="grpo", std_eps=0.0)
    centred = group_advantages(rewards, ids, estimator="dr_grpo")
    assert (normed.abs().sum().item(), centred.abs().sum().item()) == pytest.approx((grpo, dr_grpo), abs=1e-12)


@given(
    st.lists(st.lists(st.floats(-4, 4), min_size=2, max_size=6), min_size=1, max_size=4),
    st.sampled_from(["grpo", "dr_grpo", "rloo"]),
    st.randoms(use_true_random=False),
)
def test_advantages_of_a_group_sum_to_zero_and_follow_a_shuffle(
    groups: list[list[float]], estimator: str, random: "object"
) -> None:
    rewards = torch.tensor([r for group in groups for r in group], dtype=torch.float64)
    ids = torch.tensor([number for number, group in enumerate(groups) for _ in group])
    advantages = group_advantages(rewards, ids, estimator=estimator)
    for number in range(len(groups)):
        assert advantages[ids == number].sum().item() == pytest.approx(0, abs=1e-8)
    order = list(range(len(ids)))
    random.shuffle(order)  # type: ignore[attr-defined]
    shuffled = group_advantages(rewards[order], ids[order], estimator=estimator)
    assert shuffled.tolist() == pytest.approx(advantages[order].tolist(), rel=1e-9, abs=1e-9)
