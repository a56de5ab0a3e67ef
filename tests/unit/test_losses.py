"""The objectives, number by number: advantages, weights and the clipped loss together, with gradients by autograd.

The common batch: one group with rewards [1, 0, 0, 0], responses of 2, 4, 1 and 3 tokens, a budget of 10 tokens, and the
ratios below (old log-probs are 0, so a log-prob is the logarithm of the ratio).
"""

import math

import pytest
import torch
from torch import Tensor

from megatron_rl.algorithms.advantages import group_advantages
from megatron_rl.algorithms.losses import LOSSES, LossInputs, LossOutput, masked_mean, ppo_clip
from megatron_rl.algorithms.weights import Normalisation, loss_weights

RATIOS = [1.5, 0.7, 1.5, 0.7, 1.1, 0.9, 1.0, 1.25, 0.5, 2.0]
LENGTHS = [2, 4, 1, 3]
REWARDS = [1.0, 0.0, 0.0, 0.0]
# A second group: responses of 1, 2, 20 and 1 tokens.
RATIOS_2, LENGTHS_2, REWARDS_2 = [1.1, 0.9, 0.9, *[1.3] * 20, 1.0], [1, 2, 20, 1], [1.0, 1.0, 0.0, 1.0]
CLIP_HIGHER = {"clip_low": 0.2, "clip_high": 0.28}


def double(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def loss_inputs(ratios: Tensor, advantages: Tensor, mask: Tensor | None = None) -> LossInputs:
    """Tokens with these ratios to old log-probs of 0; the log-probs are a leaf that collects the gradient."""
    logprobs = ratios.log().requires_grad_()
    zeros = torch.zeros_like(ratios)
    return LossInputs(
        logprobs=logprobs,
        old_logprobs=zeros,
        rollout_logprobs=zeros,
        advantages=advantages,
        mask=torch.ones_like(ratios, dtype=torch.bool) if mask is None else mask,
        response_ids=torch.zeros(len(ratios), dtype=torch.int64),
        sequence_sum=lambda values: values,
    )


class Step:
    """An optimizer step over whole groups: `sum_t w_t l_t` and its gradient for any part of its tokens."""

    def __init__(
        self,
        groups: list[tuple[list[float], list[int], list[float]]],
        *,
        estimator: str = "grpo",
        mode: Normalisation = "token_mean_group",
        ddof: int = 1,
        trained: list[int] | None = None,
        clip: dict[str, float] | None = None,
    ) -> None:
        lengths = torch.tensor([length for _, of_group, _ in groups for length in of_group])
        ids = torch.tensor([number for number, (_, of_group, _) in enumerate(groups) for _ in of_group])
        rewards = double([reward for _, _, of_group in groups for reward in of_group])
        self.ratios = double([ratio for of_group, _, _ in groups for ratio in of_group])
        advantages = group_advantages(rewards, ids, estimator=estimator, std_ddof=ddof, std_eps=0.0)
        in_objective = lengths if trained is None else torch.tensor(trained)
        weights = loss_weights(in_objective, ids, mode=mode, budget=10)
        self.response = torch.arange(len(lengths)).repeat_interleave(lengths)
        self.advantages, self.weights = advantages[self.response], weights[self.response]
        self.clip = clip or {}

    def loss_and_gradient(self, tokens: Tensor | slice = slice(None)) -> tuple[float, Tensor]:
        inputs = loss_inputs(self.ratios[tokens], self.advantages[tokens])
        total = (ppo_clip(inputs, **self.clip).losses * self.weights[tokens]).sum()
        total.backward()
        assert inputs.logprobs.grad is not None
        return total.item(), inputs.logprobs.grad


COMMON = (RATIOS, LENGTHS, REWARDS)
SECOND = (RATIOS_2, LENGTHS_2, REWARDS_2)
ON_POLICY = ([1.0] * 10, LENGTHS, REWARDS)


@pytest.mark.parametrize(
    ("estimator", "mode", "clip", "loss", "gradient"),
    [
        (
            "grpo", "sequence_mean", {}, 0.071875,
            [0, -0.13125, 0.046875, 0, 0.034375, 0.028125, 0.125, 0.05208333333333333, 0, 0.08333333333333333],
        ),
        (
            "dr_grpo", "constant", {}, 0.0228125,
            [0, -0.013125, 0.009375, 0, 0.006875, 0.005625, 0.00625, 0.0078125, 0, 0.0125],
        ),
        (
            "grpo", "token_mean_group", CLIP_HIGHER, 0.1705,
            [0, -0.105, 0.075, 0, 0.055, 0.045, 0.05, 0.0625, 0, 0.1],
        ),
        (
            "grpo", "token_mean_batch", CLIP_HIGHER, 0.1705,
            [0, -0.105, 0.075, 0, 0.055, 0.045, 0.05, 0.0625, 0, 0.1],
        ),
        (
            "rloo", "constant", {}, 0.0304166666666666667,
            [0, -0.0175, 0.0125, 0, 0.009166666666666668, 0.0075, 0.008333333333333333, 0.010416666666666666, 0,
             0.016666666666666666],
        ),
    ],
    ids=["grpo", "dr_grpo", "dapo", "dapo_batch", "rloo"],
)  # fmt: skip
def test_the_common_batch(
    estimator: str, mode: Normalisation, clip: dict[str, float], loss: float, gradient: list[float]
) -> None:
    found, by_token = Step([COMMON], estimator=estimator, mode=mode, clip=clip).loss_and_gradient()
    assert found == pytest.approx(loss, abs=1e-14)
    assert by_token.tolist() == pytest.approx(gradient, abs=1e-14)


@pytest.mark.parametrize(
    ("estimator", "mode", "loss", "gradient"),
    [
        ("grpo", "sequence_mean", 0.0, [-0.1875] * 2 + [0.03125] * 4 + [0.125] + [1 / 24] * 3),
        ("dr_grpo", "constant", 0.0125, [-0.01875] * 2 + [0.00625] * 8),
        ("grpo", "token_mean_group", 0.1, [-0.15] * 2 + [0.05] * 8),
    ],
)
def test_on_policy_there_is_a_gradient_whatever_the_loss(
    estimator: str, mode: Normalisation, loss: float, gradient: list[float]
) -> None:
    found, by_token = Step([ON_POLICY], estimator=estimator, mode=mode, clip=CLIP_HIGHER).loss_and_gradient()
    assert found == pytest.approx(loss, abs=1e-15)
    assert by_token.tolist() == pytest.approx(gradient, abs=1e-15)


def test_grpo_with_the_population_deviation() -> None:
    loss, _ = Step([COMMON], mode="sequence_mean", ddof=0).loss_and_gradient()
    assert loss == pytest.approx(0.08299410119600878, abs=1e-14)


@pytest.mark.parametrize(
    ("mode", "loss", "weights"),
    [
        ("token_mean_group", 0.857125, {0.05, 0.020833333333333332}),
        ("token_mean_batch", 1.1398529411764708, {0.029411764705882353}),
    ],
)
def test_two_groups_of_ten_and_twenty_four_tokens(mode: Normalisation, loss: float, weights: set[float]) -> None:
    step = Step([COMMON, SECOND], mode=mode, clip=CLIP_HIGHER)
    assert step.loss_and_gradient()[0] == pytest.approx(loss, abs=1e-13)
    assert set(step.weights.tolist()) == weights


@pytest.mark.parametrize(
    ("estimator", "mode"),
    [
        ("grpo", "sequence_mean"),
        ("grpo", "token_mean_group"),
        ("grpo", "token_mean_batch"),
        ("rloo", "constant"),
    ],
)
def test_every_split_into_micro_batches_has_the_same_loss_and_gradient(estimator: str, mode: Normalisation) -> None:
    step = Step([COMMON, SECOND], estimator=estimator, mode=mode, clip=CLIP_HIGHER)
    loss, gradient = step.loss_and_gradient()
    responses = torch.arange(8)
    for split in range(1, 2**7):  # every way to put eight responses in two bins
        total, together = 0.0, torch.zeros_like(gradient)
        for bin_ in (0, 1):
            tokens = torch.isin(step.response, responses[((split >> responses) & 1) == bin_])
            part, together[tokens] = step.loss_and_gradient(tokens)
            total += part
        assert total == pytest.approx(loss, abs=1e-13)
        assert torch.allclose(together, gradient, rtol=0, atol=1e-15)


def test_two_micro_batches_of_six_and_four_tokens_add_up_and_are_not_averaged() -> None:
    step = Step([COMMON], clip=CLIP_HIGHER)
    first, second = (step.loss_and_gradient(tokens)[0] for tokens in (slice(0, 6), slice(6, 10)))
    assert (first, second) == pytest.approx((-0.082, 0.2525), abs=1e-14)
    assert first + second == pytest.approx(0.1705, abs=1e-14)  # the mean of micro-batch means is 0.2472917


@pytest.mark.parametrize(
    ("mode", "loss"), [("token_mean_group", -0.07416666666666664), ("sequence_mean", -0.0833333333333333)]
)
def test_a_masked_response_leaves_the_denominators_and_stays_in_the_statistics(
    mode: Normalisation, loss: float
) -> None:
    clip = CLIP_HIGHER if mode == "token_mean_group" else None
    found, gradient = Step([COMMON], mode=mode, trained=[2, 0, 1, 3], clip=clip).loss_and_gradient()
    assert found == pytest.approx(loss, abs=1e-14)
    assert gradient[2:6].tolist() == [0.0] * 4


CLIP_RATIOS = [0.5, 0.75, 0.9, 1.0, 1.1, 1.25, 1.3, 2.0, 3.5, 12.0]


@pytest.mark.parametrize(
    ("advantage", "kwargs", "objectives", "alive"),
    [
        # `alive`: where the gradient is ratio · advantage; it is 0 elsewhere.
        (1.0, {}, [0.5, 0.75, 0.9, 1.0, 1.1, 1.2, 1.2, 1.2, 1.2, 1.2], range(5)),
        (1.0, CLIP_HIGHER, [0.5, 0.75, 0.9, 1.0, 1.1, 1.25, 1.28, 1.28, 1.28, 1.28], range(6)),
        (1.0, {**CLIP_HIGHER, "dual_clip": 3.0}, [0.5, 0.75, 0.9, 1.0, 1.1, 1.25, 1.28, 1.28, 1.28, 1.28], range(6)),
        (-1.0, {}, [-0.8, -0.8, -0.9, -1.0, -1.1, -1.25, -1.3, -2.0, -3.5, -12.0], range(2, 10)),
        (-1.0, CLIP_HIGHER, [-0.8, -0.8, -0.9, -1.0, -1.1, -1.25, -1.3, -2.0, -3.5, -12.0], range(2, 10)),
        (
            -1.0, {**CLIP_HIGHER, "dual_clip": 3.0},
            [-0.8, -0.8, -0.9, -1.0, -1.1, -1.25, -1.3, -2.0, -3.0, -3.0], range(2, 8),
        ),
        (
            -1.0, {**CLIP_HIGHER, "dual_clip": 10.0},
            [-0.8, -0.8, -0.9, -1.0, -1.1, -1.25, -1.3, -2.0, -3.5, -10.0], range(2, 9),
        ),
    ],
)  # fmt: skip
def test_the_clip_table(advantage: float, kwargs: dict[str, float], objectives: list[float], alive: range) -> None:
    ratios = double(CLIP_RATIOS)
    inputs = loss_inputs(ratios, torch.full_like(ratios, advantage))
    losses = ppo_clip(inputs, **kwargs).losses
    losses.sum().backward()
    assert losses.tolist() == pytest.approx([-objective for objective in objectives], abs=1e-14)
    slopes = [-advantage * ratio if i in alive else 0.0 for i, ratio in enumerate(CLIP_RATIOS)]
    assert inputs.logprobs.grad is not None
    assert inputs.logprobs.grad.tolist() == pytest.approx(slopes, abs=1e-14)


def test_the_gradient_is_that_of_finite_differences() -> None:
    step = Step([COMMON], clip=CLIP_HIGHER)
    _, gradient = step.loss_and_gradient()
    for token in range(10):
        sides = []
        for nudge in (1e-6, -1e-6):
            moved = Step([COMMON], clip=CLIP_HIGHER)
            moved.ratios[token] *= math.exp(nudge)
            sides.append(moved.loss_and_gradient()[0])
        assert (sides[0] - sides[1]) / 2e-6 == pytest.approx(gradient[token].item(), abs=1e-8)


def test_metrics_are_sums_over_trained_tokens_with_their_number() -> None:
    mask = torch.tensor([True, True, True, True, False])
    # 2.0 with A > 0 and 0.5 with A < 0 are clipped; 2.0 with A < 0 is not.
    inputs = loss_inputs(double([2.0, 0.5, 2.0, 1.0, 5.0]), double([1.0, -1.0, -1.0, 1.0, 1.0]), mask)
    metrics = {name: (total.item(), weight.item()) for name, (total, weight) in ppo_clip(inputs).metrics.items()}
    assert metrics == {"loss/clip_fraction": (2.0, 4), "loss/ratio": (pytest.approx(5.5), 4)}
    assert not any(total.requires_grad for total, _ in ppo_clip(inputs).metrics.values())


def test_a_masked_mean_of_nothing_is_a_sum_of_zero() -> None:
    total, weight = masked_mean(double([math.nan, math.inf]), torch.tensor([False, False]))
    assert (total.item(), weight.item()) == (0.0, 0)


def test_the_registry_names_the_loss_of_the_presets() -> None:
    assert LOSSES["ppo_clip"] is ppo_clip


def test_a_loss_may_have_no_metrics_and_outputs_share_none() -> None:
    one, other = LossOutput(losses=double([1.0])), LossOutput(losses=double([1.0]))
    assert one.metrics == {}
    assert one.metrics is not other.metrics
