"""Per-token policy losses and the contract by which users replace them.

A loss is a pure function `loss(inputs: LossInputs, **kwargs) -> LossOutput`. It returns a loss for each token and never
averages: the caller multiplies by the weights of `weights.py` and sums. Name one of the registry in the config, or
`package.module:function`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

Metrics = dict[str, tuple[Tensor, Tensor]]
"""Name to (sum, weight), both scalars: they add up exactly over micro-batches and ranks; the value is sum / weight."""


@dataclass(frozen=True, kw_only=True)
class LossInputs:
    """What a loss sees of one micro-batch. All tensors are `[tokens]` unless said otherwise."""

    logprobs: Tensor
    """Log-probabilities of the sampled tokens under the policy being trained; carries the gradient."""

    old_logprobs: Tensor
    """The same under the policy at the start of this rollout step (the ratio's denominator)."""

    rollout_logprobs: Tensor
    """The same as the engine reported them when it sampled."""

    reference_logprobs: Tensor | None = None
    """The same under the reference policy; None unless `algorithm.kl` asks for one."""

    advantages: Tensor
    """The advantage of the token's response."""

    mask: Tensor
    """bool: tokens that are trained. Log-probabilities of other tokens are 0; nothing of them reaches the result."""

    entropies: Tensor
    """Entropy of the policy's distribution at each token, in nats; carries a gradient if `algorithm.entropy_gradient`
    is set."""

    response_ids: Tensor
    """int64: which response of the micro-batch the token belongs to; −1 outside the mask."""

    group_ids: Tensor
    """int64: which group of the batch it belongs to; −1 outside the mask."""

    sequence_sum: Callable[[Tensor], Tensor]
    """`[tokens]` to `[tokens]`: at each token the sum over the trained tokens of its response, wherever context
    parallelism put them; 0 outside the mask. Gradients pass through it. The only way to other tokens of a response: a
    rank may hold a part of them. Ranks wait in it for one another, so call it equally often whatever the inputs are,
    also when no token is trained."""


@dataclass(frozen=True, kw_only=True)
class LossOutput:
    """What a loss returns."""

    losses: Tensor
    """`[tokens]`, differentiable; tokens outside the mask are ignored."""

    metrics: Metrics = field(default_factory=dict)
    """Extra metrics, as (sum, weight)."""


def ppo_clip(
    inputs: LossInputs, *, clip_low: float = 0.2, clip_high: float = 0.2, dual_clip: float | None = None
) -> LossOutput:
    """−min(ρA, clip(ρ, 1 − low, 1 + high) A), the clipped surrogate (PPO; asymmetric as in DAPO eq. 8).

    Args:
        inputs: the micro-batch.
        clip_low: how far below 1 the ratio still counts.
        clip_high: how far above.
        dual_clip: c > 1: for A < 0 the objective is at least c·A (Ye et al., 2020).

    Raises:
        ValueError: `clip_low` is not in 0..1, `clip_high` is negative or `dual_clip` is not above 1.
    """
    return _clipped(_ratio(inputs.logprobs - inputs.old_logprobs), inputs, clip_low, clip_high, dual_clip)


def gspo(inputs: LossInputs, *, clip_low: float = 3e-4, clip_high: float = 4e-4) -> LossOutput:
    """The clipped surrogate with one ratio for a response, the geometric mean of its tokens' (Zheng et al., 2025).

    In the token form of its eq. 13: the value of eq. 5, and with equal weights in a response its gradient too.

    Args:
        inputs: the micro-batch.
        clip_low: how far below 1 the ratio still counts.
        clip_high: how far above.

    Raises:
        ValueError: as `ppo_clip`.
    """
    change = (inputs.logprobs - inputs.old_logprobs).detach()
    lengths = inputs.sequence_sum(inputs.mask.to(change.dtype)).clamp(min=1)
    ratio = _ratio(inputs.sequence_sum(change) / lengths) * (inputs.logprobs - inputs.logprobs.detach()).exp()
    return _clipped(ratio, inputs, clip_low, clip_high, None)


def cispo(inputs: LossInputs, *, clip_low: float | None = None, clip_high: float = 4.0) -> LossOutput:
    """−sg[clip(ρ, 1 − low, 1 + high)] A log π: no token loses its gradient (CISPO, MiniMax-M1, 2025, eq. 4).

    Args:
        inputs: the micro-batch.
        clip_low: how far below 1 the weight may go; None: all the way to 0, as in the paper's runs.
        clip_high: how far above 1. The paper names no number; 4 keeps weights up to 5.

    Raises:
        ValueError: as `ppo_clip`.
    """
    _check_clip(0.0 if clip_low is None else clip_low, clip_high)
    ratio = _ratio((inputs.logprobs - inputs.old_logprobs).detach())
    weight = ratio.clamp(0.0 if clip_low is None else 1 - clip_low, 1 + clip_high)
    return LossOutput(
        losses=-weight * inputs.advantages * inputs.logprobs, metrics=_ratio_metrics(ratio, weight != ratio, inputs)
    )


def reinforce(inputs: LossInputs) -> LossOutput:
    """−A log π (Williams, 1992): the policy gradient itself, for one optimizer step per rollout step."""
    return LossOutput(losses=-inputs.advantages * inputs.logprobs)


def _ratio(change: Tensor) -> Tensor:
    """exp, of at most ±20 nats: beyond float32's exp(88) one hopeless token would be inf · 0 and end the run."""
    return change.clamp(-20, 20).exp()


def _clipped(
    ratio: Tensor, inputs: LossInputs, clip_low: float, clip_high: float, dual_clip: float | None
) -> LossOutput:
    _check_clip(clip_low, clip_high)
    if dual_clip is not None and dual_clip <= 1:
        raise ValueError(f"dual_clip must be above 1, got {dual_clip}")
    advantages = inputs.advantages
    free, clipped = ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    objective = torch.minimum(free, clipped)
    decides = clipped < free
    if dual_clip is not None:
        floor = dual_clip * advantages
        decides |= (advantages < 0) & (objective < floor)
        objective = torch.where(advantages < 0, torch.maximum(objective, floor), objective)
    return LossOutput(losses=-objective, metrics=_ratio_metrics(ratio, decides, inputs))


def _check_clip(clip_low: float, clip_high: float) -> None:
    if not 0 <= clip_low <= 1:
        raise ValueError(f"clip_low must be in 0..1, got {clip_low}")
    if clip_high < 0:
        raise ValueError(f"clip_high must be at least 0, got {clip_high}")


def _ratio_metrics(ratio: Tensor, clipped: Tensor, inputs: LossInputs) -> Metrics:
    return {
        "loss/clip_fraction": masked_mean(clipped.to(ratio.dtype), inputs.mask),
        "loss/ratio": masked_mean(ratio, inputs.mask),
    }


def masked_mean(values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """(sum over the mask, tokens in the mask) of `[tokens]` values, detached: a metric."""
    return torch.where(mask, values.detach(), 0.0).sum(), mask.sum()


LOSSES: Mapping[str, Callable[..., LossOutput]] = {
    "ppo_clip": ppo_clip,
    "gspo": gspo,
    "cispo": cispo,
    "reinforce": reinforce,
}
