"""Log-probs of logits that a test writes down."""

from typing import Any

import torch
from torch import Tensor

from megatron_rl.training.logprobs import projected_logprobs


def logprobs_of_logits(logits: Tensor, labels: Tensor, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    """`projected_logprobs` with the logits, `[..., columns]`, as hidden states and the identity as weight; `[...]`."""
    weight = torch.eye(logits.shape[-1], dtype=logits.dtype)
    found = projected_logprobs(logits.flatten(0, -2), weight, labels.flatten(), chunk=labels.numel(), **options)
    logprobs, entropies, likeliest = (values.view(labels.shape) for values in found)
    return logprobs, entropies, likeliest
