"""The policy's distribution: the one place that divides logits by the temperature and takes out banned tokens."""

import torch
from torch import Tensor


def policy_logits(logits: Tensor, *, temperature: float, allowed: int) -> Tensor:
    """Logits of the distribution that is sampled from and trained.

    Engine and trainer both call this, before log-probs and entropy, so that their log-probs are comparable.

    Args:
        logits: `[..., columns]`, any float type.
        temperature: > 0.
        allowed: the first `allowed` columns are tokens; the rest (ids beyond the tokenizer, padding rows of the
            vocabulary) are outside the softmax.

    Returns:
        `[..., columns]`, float32 (float64 of float64); −inf where banned.

    Raises:
        ValueError: temperature ≤ 0.
    """
    if temperature <= 0:
        raise ValueError(f"temperature must be > 0, got {temperature}")
    scaled = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    if allowed < logits.shape[-1]:
        scaled[..., allowed:] = float("-inf")
    return scaled
