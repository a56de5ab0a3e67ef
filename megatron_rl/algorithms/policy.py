"""The policy's distribution: the one place that divides logits by the temperature and takes out banned tokens."""

import torch
from torch import Tensor


def policy_logits(logits: Tensor, *, temperature: float, allowed: int, overwrite: bool = False) -> Tensor:
    """Logits of the distribution that is sampled from and trained.

    Engine and trainer both call this, before log-probs and entropy, so that their log-probs are comparable.

    Args:
        logits: `[..., columns]`, any float type.
        temperature: > 0.
        allowed: the first `allowed` columns are tokens; the rest (ids beyond the tokenizer, padding rows of the
            vocabulary) are outside the softmax.
        overwrite: whether the memory of `logits` may be used for the result.

    Returns:
        `[..., columns]`, float32 (float64 of float64); −inf where banned.

    Raises:
        ValueError: temperature ≤ 0.
    """
    if temperature <= 0:
        raise ValueError(f"temperature must be > 0, got {temperature}")
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    scaled = wide.div_(temperature) if overwrite else wide / temperature
    if allowed < logits.shape[-1]:
        scaled[..., allowed:] = float("-inf")
    return scaled


def through_policy_logits(gradient: Tensor, *, temperature: float) -> Tensor:
    """The chain rule through `policy_logits`, for allowed columns: from a gradient by its result to one by `logits`."""
    return gradient / temperature
