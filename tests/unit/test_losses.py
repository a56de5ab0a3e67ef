"""Per-token losses: values and gradients against independent formulas; test_loss_vectors.py has the worked vectors."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_rl.algorithms.losses import LOSSES, LossOutput, cispo, gspo, masked_mean, ppo_clip, reinforce
from tests.cases.step import Responses, Step, double, gradient, loss_inputs

# Two groups: ten tokens in responses of 2, 4, 1 and 3, and twenty-four in responses of 1, 2, 20 and 1.
COMMON: Responses = ([[1.5, 0.7], [1.5, 0.7, 1.1, 0.9], [1.0], [1.25, 0.5, 2.0]], [1.0, 0.0, 0.0, 0.0])
SECOND: Responses = ([[1.1], [0.9, 0.9], [1.3] * 20, [1.0]], [1.0, 1.0, 0.0, 1.0])
CLIP_HIGHER: dict[str, Any] = {"clip_low": 0.2, "clip_high": 0.28}


def on_policy(responses: Responses) -> Responses:
    ratios, rewards = responses
    return [[1.0] * len(of_one) for of_one in ratios], rewards


def metrics_of(out: LossOutput) -> dict[str, tuple[float, float]]:
    return {name: (total.item(), weight.item()) for name, (total, weight) in out.metrics.items()}


# ---- the clipped surrogate


def test_on_policy_the_loss_of_grpo_is_zero_and_its_gradient_is_not() -> None:
    loss, by_token = Step(on_policy(COMMON), on_policy(SECOND), mode="sequence_mean").loss_and_gradient()
    assert loss == pytest.approx(0, abs=1e-15)
    # −A / (8 len) with A = 3/2, −1/2 (three times), then 1/2, 1/2, −3/2, 1/2.
    expected = [-1.5 / 16] * 2 + [0.5 / 32] * 4 + [0.5 / 8] + [0.5 / 24] * 3
    expected += [-0.5 / 8] + [-0.5 / 16] * 2 + [1.5 / 160] * 20 + [-0.5 / 8]
    assert by_token.tolist() == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize(
    ("estimator", "mode"),
    [
        ("grpo", "sequence_mean"),
        ("grpo", "token_mean_group"),
        ("grpo", "token_mean_batch"),
        ("rloo", "constant"),
    ],
)
def test_every_split_into_micro_batches_has_the_same_loss_and_gradient(estimator: str, mode: str) -> None:
    step = Step(COMMON, SECOND, estimator=estimator, mode=mode, **CLIP_HIGHER)
    loss, gradients = step.loss_and_gradient()
    responses = torch.arange(8)
    for split in range(1, 2**7):  # every way to put eight responses in two bins
        total, together = 0.0, torch.zeros_like(gradients)
        for bin_ in (0, 1):
            tokens = torch.isin(step.response, responses[((split >> responses) & 1) == bin_])
            part, together[tokens] = step.loss_and_gradient(tokens)
            total += part
        assert total == pytest.approx(loss, abs=1e-13)
        assert torch.allclose(together, gradients, rtol=0, atol=1e-15)


def test_the_gradient_is_that_of_finite_differences() -> None:
    _, gradients = Step(COMMON, **CLIP_HIGHER).loss_and_gradient()
    for token in range(10):
        sides = []
        for nudge in (1e-6, -1e-6):
            moved = Step(COMMON, **CLIP_HIGHER)
            moved.ratios[token] *= math.exp(nudge)
            sides.append(moved.loss_and_gradient()[0])
        assert (sides[0] - sides[1]) / 2e-6 == pytest.approx(gradients[token].item(), abs=1e-8)


def test_metrics_are_sums_over_trained_tokens_with_their_number() -> None:
    mask = torch.tensor([True, True, True, True, False])
    # 2.0 with A > 0 and 0.5 with A < 0 are clipped; 2.0 with A < 0 is not.
    ratios = double([2.0, 0.5, 2.0, 1.0, 5.0])
    out = ppo_clip(loss_inputs(ratios.log(), double([1.0, -1.0, -1.0, 1.0, 1.0]), mask=mask))
    assert metrics_of(out) == {"loss/clip_fraction": (2.0, 4), "loss/ratio": (pytest.approx(5.5), 4)}
    assert not any(total.requires_grad for total, _ in out.metrics.values())


def test_a_ratio_that_the_dual_clip_decides_counts_as_clipped() -> None:
    inputs = loss_inputs(double([2.0, 4.0, 4.0]).log(), double([-1.0, -1.0, 0.5]))
    assert metrics_of(ppo_clip(inputs, dual_clip=3.0))["loss/clip_fraction"] == (2.0, 3)
    assert metrics_of(ppo_clip(inputs))["loss/clip_fraction"] == (1.0, 3)


@pytest.mark.parametrize("loss", [ppo_clip, gspo, cispo])
@pytest.mark.parametrize(
    ("clip", "message"),
    [
        ({"clip_low": -0.1}, r"clip_low must be in 0\.\.1, got -0\.1"),
        ({"clip_low": 1.5}, r"clip_low must be in 0\.\.1, got 1\.5"),
        ({"clip_high": -0.1}, r"clip_high must be at least 0, got -0\.1"),
    ],
)
def test_clips_that_do_not_hold_one_are_refused(loss: Any, clip: dict[str, float], message: str) -> None:
    inputs = loss_inputs(double([0.0]), double([1.0]))
    with pytest.raises(ValueError, match=message):
        loss(inputs, **clip)
    loss(inputs, clip_low=0.0, clip_high=0.0)
    loss(inputs, clip_low=1.0, clip_high=9.0)


@pytest.mark.parametrize("dual_clip", [1.0, 0.5, -3.0])
def test_a_dual_clip_of_one_or_less_is_refused(dual_clip: float) -> None:
    inputs = loss_inputs(double([0.0]), double([1.0]))
    with pytest.raises(ValueError, match=rf"dual_clip must be above 1, got {dual_clip}"):
        ppo_clip(inputs, dual_clip=dual_clip)


# ---- one ratio for a response (GSPO)

CHANGES = [[0.3, -0.1], [0.02, 0.04, -0.03, 0.01], [-0.2], [0.1, 0.1, 0.25], [-0.3, 0.1]]
"""Log-prob less old log-prob: mean changes 0.1, 0.01, −0.2, 0.15 and −0.1, so with a clip of 0.1/0.05 the responses are
clipped above, free, clipped below (A < 0), beyond the clip and free (A < 0), free (A > 0, below)."""
ADVANTAGES, OLD = [1.5, 0.5, -0.5, -0.75, 2.0], -1.25


def gspo_by_response(changes: list[Tensor], *, clip_low: float, clip_high: float) -> Tensor:
    """Zheng et al. (2025), eq. 5, as it is written: a mean over responses, differentiable through the mean change."""
    terms = []
    for change, advantage in zip(changes, ADVANTAGES, strict=True):
        ratio = (change.sum() / len(change)).exp()
        terms.append(torch.minimum(ratio * advantage, ratio.clamp(1 - clip_low, 1 + clip_high) * advantage))
    return -torch.stack(terms).mean()


def test_gspo_has_the_value_and_the_gradient_of_its_sequence_form() -> None:
    leaves = [double(of_one).requires_grad_() for of_one in CHANGES]
    expected = gspo_by_response(leaves, clip_low=0.1, clip_high=0.05)
    expected.backward()
    slopes = [slope for leaf in leaves for slope in (leaf.grad if leaf.grad is not None else leaf).tolist()]

    lengths = torch.tensor([len(of_one) for of_one in CHANGES])
    ids = torch.arange(5).repeat_interleave(lengths)
    logprobs = double([OLD + change for of_one in CHANGES for change in of_one])
    inputs = loss_inputs(logprobs, double(ADVANTAGES)[ids], response_ids=ids, old=torch.full_like(logprobs, OLD))
    out = gspo(inputs, clip_low=0.1, clip_high=0.05)
    total = (out.losses / (5 * lengths[ids])).sum()  # sequence_mean: equal weights in a response, 1/5 together
    assert total.item() == pytest.approx(expected.item(), abs=1e-14)
    assert gradient(inputs, total).tolist() == pytest.approx(slopes, abs=1e-14)
    assert slopes[0] == slopes[1] == slopes[6] == 0.0  # the clipped responses, whole
    assert 0.0 not in slopes[2:6] + slopes[7:]


def test_the_metrics_of_gspo_are_those_of_its_sequence_ratios() -> None:
    ids = torch.tensor([0, 0, 1])
    inputs = loss_inputs(double([2.0, 0.5, 3.0]).log(), double([1.0, 1.0, 1.0]), response_ids=ids)
    # Geometric means 1 and 3: by tokens there would be another ratio above the clip.
    assert metrics_of(gspo(inputs)) == {
        "loss/clip_fraction": (1.0, 3),
        "loss/ratio": (pytest.approx(1 + 1 + 3), 3),
    }


def test_gspo_averages_over_the_trained_tokens_of_a_response_only() -> None:
    mask, ids = torch.tensor([True, True, False, True]), torch.tensor([0, 0, 0, 1])
    logprobs = double([0.1, 0.3, 0.0, -0.5])
    inputs = loss_inputs(logprobs, double([1.0] * 4), response_ids=ids, mask=mask)
    losses = gspo(inputs, clip_low=1.0, clip_high=9.0).losses
    assert losses[mask].tolist() == pytest.approx([-math.exp(0.2)] * 2 + [-math.exp(-0.5)], abs=1e-14)


def test_gspo_clips_at_the_papers_bounds_unless_told() -> None:
    inputs = loss_inputs(
        double([1.0003, 1.0005, 0.9998, 0.9995]).log(), double([1, 1, -1, -1]), response_ids=torch.arange(4)
    )
    assert gspo(inputs).losses.tolist() == pytest.approx([-1.0003, -1.0004, 0.9998, 0.9997], abs=1e-12)


# ---- the clipped weight (CISPO) and none at all


@pytest.mark.parametrize(
    ("clip", "weights", "clipped"),
    [
        ({}, [0.1, 0.9, 1.0, 3.0, 5.0], 1),  # no lower bound, and at most 1 + 4
        ({"clip_low": 0.2, "clip_high": 0.28}, [0.8, 0.9, 1.0, 1.28, 1.28], 3),
    ],
)
@pytest.mark.parametrize("advantage", [1.5, -0.5])
def test_cispo_weighs_the_policy_gradient_and_lets_no_token_go(
    clip: dict[str, float], weights: list[float], clipped: int, advantage: float
) -> None:
    ratios = double([0.1, 0.9, 1.0, 3.0, 12.0])
    old = double([-0.5, -1.0, -1.5, -2.0, -2.5])
    inputs = loss_inputs(ratios.log() + old, torch.full((5,), advantage, dtype=torch.float64), old=old)
    out = cispo(inputs, **clip)
    by_hand = [
        -w * advantage * (math.log(r) + o) for w, r, o in zip(weights, ratios.tolist(), old.tolist(), strict=True)
    ]
    assert out.losses.tolist() == pytest.approx(by_hand, abs=1e-14)
    assert metrics_of(out) == {"loss/clip_fraction": (clipped, 5), "loss/ratio": (pytest.approx(17.0), 5)}
    assert gradient(inputs, out.losses.sum()).tolist() == pytest.approx([-w * advantage for w in weights], abs=1e-14)


def test_reinforce_is_the_policy_gradient_whatever_the_old_policy() -> None:
    inputs = loss_inputs(double([-0.5, -2.0, -1.0]), double([1.5, -0.5, 0.0]), old=double([-9.0, 0.0, -1.0]))
    out = reinforce(inputs)
    assert out.losses.tolist() == [0.75, -1.0, 0.0]
    assert out.metrics == {}
    assert gradient(inputs, out.losses.sum()).tolist() == [-1.5, 0.5, 0.0]


@pytest.mark.parametrize("loss", [ppo_clip, cispo, reinforce])
def test_on_policy_all_losses_have_the_same_gradient(loss: Any) -> None:
    advantages = double([1.5, -0.5, 0.25])
    inputs = loss_inputs(double([-0.5, -2.0, -1.0]), advantages, old=double([-0.5, -2.0, -1.0]))
    assert gradient(inputs, loss(inputs).losses.sum()).tolist() == (-advantages).tolist()


# ---- the contract


def test_a_masked_mean_of_nothing_is_a_sum_of_zero() -> None:
    total, weight = masked_mean(double([math.nan, math.inf]), torch.tensor([False, False]))
    assert (total.item(), weight.item()) == (0.0, 0)


def test_the_registry_names_the_losses_of_the_presets() -> None:
    named = {"ppo_clip": ppo_clip, "gspo": gspo, "cispo": cispo, "reinforce": reinforce}
    assert dict(LOSSES) == named


def test_a_loss_may_have_no_metrics_and_outputs_share_none() -> None:
    one, other = LossOutput(losses=double([1.0])), LossOutput(losses=double([1.0]))
    assert one.metrics == {}
    assert one.metrics is not other.metrics


@pytest.mark.parametrize("name", ["ppo_clip", "gspo", "cispo"])
@pytest.mark.parametrize("change", [-1000.0, -100.0, 100.0, 1000.0])
@pytest.mark.parametrize("advantage", [-1.0, 0.0, 1.0])
def test_a_hopeless_log_ratio_stays_finite(name: str, change: float, advantage: float) -> None:
    """exp of more than 88 is infinite in float32, and inf · 0 is NaN."""
    inputs = loss_inputs(torch.tensor([change, 0.0]), torch.tensor([advantage, advantage]))
    losses = LOSSES[name](inputs).losses
    assert losses.isfinite().all()
    assert gradient(inputs, losses.sum()).isfinite().all()
