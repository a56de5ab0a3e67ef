"""Group advantages, against values worked out by hand: rewards [1, 0, 0, 0] have mean 1/4 and deviation exactly 1/2."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatron_rl.algorithms.advantages import ESTIMATORS, group_advantages
from megatron_rl.errors import UserError

NAN = math.nan


def one_group(rewards: list[float], estimator: str, *, lengths: list[int] | None = None, **options: Any) -> list[float]:
    """Of one group; without lengths all responses have four tokens."""
    ids, tokens = torch.zeros(len(rewards), dtype=torch.int64), torch.tensor(lengths or [4] * len(rewards))
    values = torch.tensor(rewards, dtype=torch.float64)
    return group_advantages(values, ids, estimator=estimator, lengths=tokens, **options).tolist()


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
def test_the_worked_example(estimator: str, options: dict[str, Any], expected: list[float]) -> None:
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


def test_opo_takes_off_the_mean_weighted_by_length() -> None:
    # (1·2 + 0·5 + 0·1 + 0.5·12) / 20 = 0.4, and with one answer ungraded (2 + 6) / 15.
    assert one_group([1, 0, 0, 0.5], "opo", lengths=[2, 5, 1, 12]) == pytest.approx([0.6, -0.4, -0.4, 0.1], abs=1e-15)
    found = one_group([1, NAN, 0, 0.5], "opo", lengths=[2, 5, 1, 12])
    assert found == pytest.approx([7 / 15, 0, -8 / 15, -1 / 30], abs=1e-15)


def test_opo_weighs_within_a_group_only() -> None:
    rewards, ids = torch.tensor([1.0, 4.0, 0.0, 0.0]), torch.tensor([3, 8, 3, 8])
    found = group_advantages(rewards, ids, estimator="opo", lengths=torch.tensor([30, 1, 10, 3]))
    assert found.tolist() == pytest.approx([0.25, 3.0, -0.75, -1.0], abs=1e-15)


def test_opo_needs_lengths() -> None:
    with pytest.raises(ValueError, match="'opo' weighs rewards by length: it needs lengths"):
        group_advantages(torch.tensor([1.0, 0.0]), torch.zeros(2, dtype=torch.int64), estimator="opo")


TWO_GROUPS = torch.tensor([1.0, 0.0, 3.0, 0.0, 0.0], dtype=torch.float64), torch.tensor([5, 5, 1, 1, 1])


@pytest.mark.parametrize(("ddof", "over"), [(1, 4), (0, 5)])
def test_reinforce_plus_plus_divides_by_the_deviation_over_the_batch(ddof: int, over: int) -> None:
    rewards, ids = TWO_GROUPS
    # r − mean of the group: 1/2, −1/2, 2, −1, −1; their mean is 0 and their squares sum to 6.5.
    deviation = math.sqrt(6.5 / over)
    found = group_advantages(rewards, ids, estimator="reinforce_plus_plus_baseline", std_ddof=ddof, std_eps=0.0)
    assert found.tolist() == pytest.approx([x / deviation for x in (0.5, -0.5, 2, -1, -1)], abs=1e-15)
    found = group_advantages(rewards, ids, estimator="reinforce_plus_plus_baseline", std_ddof=ddof, std_eps=0.5)
    assert found.tolist() == pytest.approx([x / (deviation + 0.5) for x in (0.5, -0.5, 2, -1, -1)], abs=1e-15)


def test_the_deviation_over_the_batch_counts_groups_of_equal_rewards_and_no_ungraded_response() -> None:
    rewards, ids = TWO_GROUPS
    rewards = torch.cat((rewards, torch.tensor([0.7, 0.7, NAN, NAN], dtype=torch.float64)))
    ids = torch.cat((ids, torch.tensor([2, 2, 2, 5])))
    found = group_advantages(rewards, ids, estimator="reinforce_plus_plus_baseline", std_eps=0.0).tolist()
    # Seven graded, so 6.5 / 6.
    assert found[:5] == pytest.approx([x / math.sqrt(6.5 / 6) for x in (0.5, -0.5, 2, -1, -1)], abs=1e-15)
    assert found[5:] == [0.0] * 4


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("eps", [0.0, 1e-6])
def test_equal_rewards_give_exactly_zero(estimator: str, eps: float) -> None:
    # In float32 the deviation of sixteen −1.3 is noise: not 0, and a thousand times the eps of some systems.
    assert one_group([-1.3] * 16, estimator, std_eps=eps) == [0.0] * 16
    rewards = torch.full((16,), -1.3, dtype=torch.float32)
    ids = torch.zeros(16, dtype=torch.int64)
    lengths = torch.arange(1, 17)
    assert group_advantages(rewards, ids, estimator=estimator, std_eps=eps, lengths=lengths).tolist() == [0.0] * 16


def test_float32_rewards_are_worked_on_in_float64() -> None:
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0])
    advantages = group_advantages(rewards, torch.zeros(7, dtype=torch.int64), estimator="dr_grpo")
    assert advantages.dtype == torch.float64
    assert advantages[0].item() == pytest.approx(6 / 7, abs=1e-15)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_an_ungraded_response_leaves_the_statistics_and_gets_zero(estimator: str) -> None:
    whole = one_group([1, 0, 0, 0], estimator)
    assert one_group([NAN, 1, 0, NAN, 0, 0], estimator) == [0.0, whole[0], whole[1], 0.0, whole[2], whole[3]]


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_a_group_without_grades_gets_zero(estimator: str) -> None:
    assert one_group([NAN, NAN, NAN], estimator) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("estimator", [name for name in ESTIMATORS if name != "rloo"])
@pytest.mark.parametrize("rewards", [[0.7], [0.7, NAN, NAN]])
def test_a_group_of_one_graded_response_gets_zero(estimator: str, rewards: list[float]) -> None:
    assert one_group(rewards, estimator, std_eps=0.0) == [0.0] * len(rewards)


@pytest.mark.parametrize("rewards", [[0.7], [NAN, 0.7]])
def test_rloo_refuses_a_group_of_one(rewards: list[float]) -> None:
    with pytest.raises(ValueError, match="group 4 has one graded response: rloo needs"):
        group_advantages(torch.tensor(rewards), torch.full((len(rewards),), 4), estimator="rloo")


def test_an_unknown_estimator_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'ppo': one of grpo, dr_grpo, .*, or module:function"):
        one_group([1, 0], "ppo")


# ---- a function of one's own


def reward_less_length(rewards: Tensor, group_ids: Tensor, lengths: Tensor) -> Tensor:
    """The reward times ten, and the group's id, and a tenth of the length; NaN where the reward is."""
    return rewards * 10 + group_ids + lengths / 10


def test_an_estimator_of_ones_own_sees_rewards_groups_and_lengths() -> None:
    found = group_advantages(
        torch.tensor([1.0, NAN, 0.5]),
        torch.tensor([7, 7, 3]),
        estimator=f"{__name__}:reward_less_length",
        lengths=torch.tensor([20, 30, 40]),
    )
    assert found.dtype == torch.float64
    assert found.tolist() == [19.0, 0.0, 12.0]  # an ungraded response gets 0, whatever it returned


def whole_numbers(rewards: Tensor, group_ids: Tensor, lengths: Tensor) -> Tensor:
    """A tensor of integers."""
    return group_ids


def test_an_estimator_of_ones_own_may_return_another_type_of_number() -> None:
    ids, rewards = torch.tensor([3, 4]), torch.tensor([1.0, 0.0])
    found = group_advantages(rewards, ids, estimator=f"{__name__}:whole_numbers")
    assert (found.dtype, found.tolist()) == (torch.float64, [3.0, 4.0])


def wrong_shape(rewards: Tensor, group_ids: Tensor, lengths: Tensor) -> Tensor:
    return rewards[:, None]


def one_too_few(rewards: Tensor, group_ids: Tensor, lengths: Tensor) -> Tensor:
    return rewards[1:]


def a_list(rewards: Tensor, group_ids: Tensor, lengths: Tensor) -> list[float]:
    return rewards.tolist()


def nothing(rewards: Tensor, group_ids: Tensor, lengths: Tensor) -> None:
    """As a function that forgets its `return`."""


def not_a_number(rewards: Tensor, group_ids: Tensor, lengths: Tensor) -> Tensor:
    return rewards / 0 * 0


def infinite(rewards: Tensor, group_ids: Tensor, lengths: Tensor) -> Tensor:
    return -1 / rewards.sub(1).abs()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("wrong_shape", "wrong_shape did not return one number for each of 3 responses"),
        ("one_too_few", "one_too_few did not return one number for each of 3 responses"),
        ("a_list", "a_list did not return one number for each of 3 responses"),
        ("nothing", "nothing did not return one number for each of 3 responses"),
        ("not_a_number", "not_a_number returned nan"),
        ("infinite", "infinite returned -inf"),
    ],
)
def test_what_is_not_one_finite_number_for_each_response_is_refused(name: str, message: str) -> None:
    with pytest.raises(UserError, match=rf"^algorithm\.advantage: .*{message}"):
        one_group([1, 0, 0.5], f"{__name__}:{name}")


def test_an_estimator_that_is_not_there_is_refused_with_its_option() -> None:
    with pytest.raises(UserError, match=r"^algorithm\.advantage: .*no_such_function"):
        one_group([1, 0], f"{__name__}:no_such_function")


# ---- properties


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


any_groups = st.lists(st.lists(st.floats(-4, 4), min_size=2, max_size=6), min_size=1, max_size=4)
right_or_wrong = st.lists(st.sampled_from([0.0, 1.0]), min_size=2, max_size=9)


def columns(groups: list[list[float]]) -> tuple[Tensor, Tensor, Tensor]:
    """Rewards, group ids and uneven lengths."""
    rewards = torch.tensor([r for group in groups for r in group], dtype=torch.float64)
    ids = torch.tensor([number for number, group in enumerate(groups) for _ in group])
    return rewards, ids, torch.arange(len(ids)) * 3 % 7 + 1


@given(any_groups, st.sampled_from(["grpo", "dr_grpo", "rloo", "reinforce_plus_plus_baseline"]))
def test_advantages_of_a_group_sum_to_zero(groups: list[list[float]], estimator: str) -> None:
    rewards, ids, _ = columns(groups)
    advantages = group_advantages(rewards, ids, estimator=estimator)
    for number in range(len(groups)):
        assert advantages[ids == number].sum().item() == pytest.approx(0, abs=1e-8)


@given(any_groups)
def test_those_of_opo_do_when_weighted_by_length(groups: list[list[float]]) -> None:
    rewards, ids, lengths = columns(groups)
    weighted = group_advantages(rewards, ids, estimator="opo", lengths=lengths) * lengths
    for number in range(len(groups)):
        assert weighted[ids == number].sum().item() == pytest.approx(0, abs=1e-12)


@given(any_groups, st.sampled_from(ESTIMATORS), st.randoms(use_true_random=False))
def test_advantages_follow_a_shuffle(groups: list[list[float]], estimator: str, random: Any) -> None:
    rewards, ids, lengths = columns(groups)
    advantages = group_advantages(rewards, ids, estimator=estimator, lengths=lengths)
    order = list(range(len(ids)))
    random.shuffle(order)
    shuffled = group_advantages(rewards[order], ids[order], estimator=estimator, lengths=lengths[order])
    assert shuffled.tolist() == pytest.approx(advantages[order].tolist(), rel=1e-9, abs=1e-9)


@given(right_or_wrong)
def test_rewards_of_plus_and_minus_one_are_the_same_to_grpo_and_double_to_dr_grpo(rewards: list[float]) -> None:
    doubled = [2 * reward - 1 for reward in rewards]
    same = one_group(doubled, "grpo", std_eps=0.0)
    assert same == pytest.approx(one_group(rewards, "grpo", std_eps=0.0), abs=1e-14)
    by_hand = [2 * (reward - sum(rewards) / len(rewards)) for reward in rewards]
    assert one_group(doubled, "dr_grpo") == pytest.approx(by_hand, abs=1e-14)
    assert one_group(rewards, "dr_grpo") == pytest.approx([one / 2 for one in by_hand], abs=1e-14)


@given(st.lists(st.floats(-4, 4), min_size=2, max_size=9))
def test_rloo_is_dr_grpo_times_g_over_g_less_one(rewards: list[float]) -> None:
    factor = len(rewards) / (len(rewards) - 1)
    expected = [factor * one for one in one_group(rewards, "dr_grpo")]
    assert one_group(rewards, "rloo") == pytest.approx(expected, abs=1e-13)
