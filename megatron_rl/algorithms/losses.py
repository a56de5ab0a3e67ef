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

    advantages: Tensor
    """The advantage of the token's response."""

    mask: Tensor
    """bool: tokens that are trained. Log-probabilities of other tokens are 0; nothing of them reaches the result."""

    response_ids: Tensor
    """int64: which response of the micro-batch the token belongs to; −1 outside the mask."""

    sequence_sum: Callable[[Tensor], Tensor]
    """`[tokens]` to `[tokens]`: at each token the sum over the trained tokens of its response, whole under CP."""


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
    """
    advantages = inputs.advantages
    ratio = (inputs.logprobs - inputs.old_logprobs).exp()
    free, clipped = ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    objective = torch.minimum(free, clipped)
    if dual_clip is not None:
        objective = torch.where(advantages < 0, torch.maximum(objective, dual_clip * advantages), objective)
    mask = inputs.mask
    return LossOutput(
        losses=-objective,
        metrics={
            "loss/clip_fraction": masked_mean((clipped < free).to(ratio.dtype), mask),
            "loss/ratio": masked_mean(ratio, mask),
        },
    )


def masked_mean(values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """(sum over the mask, tokens in the mask) of `[tokens]` values, detached: a metric."""
    return torch.where(mask, values.detach(), 0.0).sum(), mask.sum()


LOSSES: Mapping[str, Callable[..., LossOutput]] = {"ppo_clip": ppo_clip}
