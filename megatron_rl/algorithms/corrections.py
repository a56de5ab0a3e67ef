"""The engine samples with other kernels than the trainer computes with: importance weights between the two.

The policy gradient is an expectation over what the engine really sampled from. Weighting a token by trainer probability
over engine probability makes it so again; a bound on that weight trades variance for bias.
"""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from megatron_rl.algorithms.losses import Metrics, masked_mean

_MOST = 30.0
"""Nats: one hopeless token must not make the mean over a step infinite (exp(2 · 30) still fits into float32)."""

Level = Literal["token", "sequence"]
Mode = Literal["truncate", "mask"]


def correction_weights(
    trainer_logprobs: Tensor,
    rollout_logprobs: Tensor,
    mask: Tensor,
    sequence_sum: Callable[[Tensor], Tensor],
    *,
    level: Level = "token",
    mode: Mode = "truncate",
    cap: float = 2.0,
    floor: float = 0.0,
) -> Tensor:
    """What each token's policy loss is multiplied by.

    Args:
        trainer_logprobs: of the sampled tokens, computed by the trainer with the weights that sampled, `[tokens]`.
        rollout_logprobs: the same as the engine reported them.
        mask: bool `[tokens]`, trained tokens.
        sequence_sum: see `LossInputs`.
        level: `token` weighs each token by its own ratio; `sequence` by the product over its response.
        mode: `truncate` min(ratio, cap) (TIS, Yao et al., 2025); `mask` leaves a token, or a whole response, out where
            the ratio is above `cap` or below `floor` (MIS, IcePop).
        cap: largest ratio that counts in full.
        floor: smallest; for `mask` only.

    Returns:
        `[tokens]`, detached; 1 outside the mask.

    Raises:
        ValueError: unknown level or mode, or bounds that don't hold 1 between them.
    """
    if level not in ("token", "sequence") or mode not in ("truncate", "mask"):
        raise ValueError(f"unknown correction {level!r}, {mode!r}: token or sequence, truncate or mask")
    if not 0 <= floor <= 1 <= cap:
        raise ValueError(f"the bounds of a correction hold 1 between them: floor <= 1 <= cap, got {floor} and {cap}")
    change = torch.where(mask, (trainer_logprobs - rollout_logprobs).detach(), 0.0)
    if level == "sequence":
        change = torch.where(mask, sequence_sum(change), 0.0)
    ratio = change.clamp(-_MOST, _MOST).exp()
    if mode == "truncate":
        return ratio.clamp(max=cap)
    return torch.where((ratio >= floor) & (ratio <= cap), ratio, 0.0)


def mismatch_metrics(
    trainer_logprobs: Tensor,
    rollout_logprobs: Tensor,
    mask: Tensor,
    sequence_sum: Callable[[Tensor], Tensor],
    *,
    cap: float = 2.0,
) -> Metrics:
    """How far trainer and engine are apart on the tokens that the engine sampled; arguments as `correction_weights`.

    Returns:
        `mismatch/logprob_abs`; `mismatch/kl`, KL(engine ‖ trainer) by k3; `mismatch/ratio` and `mismatch/ratio_square`,
        both 1 where they agree (their quotient mean²/mean square is the effective share of samples);
        `mismatch/above_cap` and `mismatch/sequence_above_cap`, the shares of tokens above the cap by their own ratio
        and by their response's.
    """
    change = torch.where(mask, (trainer_logprobs - rollout_logprobs).detach(), 0.0)
    of_sequence = torch.where(mask, sequence_sum(change), 0.0).clamp(-_MOST, _MOST).exp()
    bounded = change.clamp(-_MOST, _MOST)
    ratio = bounded.exp()
    return {
        "mismatch/logprob_abs": masked_mean(change.abs(), mask),
        "mismatch/kl": masked_mean(torch.expm1(bounded) - bounded, mask),
        "mismatch/ratio": masked_mean(ratio, mask),
        "mismatch/ratio_square": masked_mean(ratio.square(), mask),
        "mismatch/above_cap": masked_mean((ratio > cap).to(ratio.dtype), mask),
        "mismatch/sequence_above_cap": masked_mean((of_sequence > cap).to(ratio.dtype), mask),
    }
