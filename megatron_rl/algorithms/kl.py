"""Estimators of the divergence from a reference policy, one number for each sampled token (Schulman, 2020)."""

from typing import Literal

import torch
from torch import Tensor

KlEstimator = Literal["k1", "k2", "k3"]


def kl_estimates(logprobs: Tensor, reference_logprobs: Tensor, *, estimator: KlEstimator) -> Tensor:
    """KL(policy ‖ reference) as estimated from each sampled token, in nats.

    With d = log π − log π_ref of the token: `k1` d, unbiased, of both signs, but its gradient is 0 on average, so it
    belongs into the reward; `k2` d²/2, biased, with the gradient of the KL itself; `k3` exp(−d) − 1 + d, unbiased and
    never negative, with the gradient of the KL the other way round (GRPO, DeepSeekMath eq. 4).

    Args:
        logprobs: of the sampled tokens, `[tokens]`; may carry a gradient.
        reference_logprobs: the same under the reference policy.
        estimator: which.

    Returns:
        `[tokens]`.

    Raises:
        ValueError: unknown estimator.
    """
    change = logprobs - reference_logprobs
    if estimator == "k1":
        return change
    if estimator == "k2":
        return change.square() / 2
    if estimator == "k3":
        return torch.expm1(-change) + change
    raise ValueError(f"unknown KL estimator {estimator!r}: k1, k2 or k3")
