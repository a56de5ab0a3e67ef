"""Log-probabilities and entropies of tokens when the vocabulary is split over tensor-parallel ranks."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.algorithms.policy import policy_logits


def token_logprobs(
    logits: Tensor,
    labels: Tensor,
    *,
    temperature: float,
    vocabulary: int,
    group: dist.ProcessGroup,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each label, and the entropy of the distribution that it was drawn from.

    Args:
        logits: this TP rank's columns, `[..., padded vocabulary / tp]`.
        labels: `[...]`, global token ids.
        temperature: of sampling.
        vocabulary: ids from here on are banned: outside the softmax.
        group: the tensor-parallel group.
        entropy_gradient: whether gradients flow through the entropies too.

    Returns:
        (log-probabilities, entropies in nats), `[...]`, float32 (float64 of float64).
    """
    first = group.rank() * logits.shape[-1]
    allowed = min(max(vocabulary - first, 0), logits.shape[-1])
    scaled = policy_logits(logits, temperature=temperature, allowed=allowed)
    return _TokenLogprobs.apply(scaled, labels - first, group, entropy_gradient)


class _TokenLogprobs(torch.autograd.Function):
    """log softmax at one column, whose columns lie on several ranks; keeps the probabilities for backward."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, columns: Tensor, group: dist.ProcessGroup, entropy_gradient: bool
    ) -> tuple[Tensor, Tensor]:
        peak = logits.amax(-1)
        dist.all_reduce(peak, dist.ReduceOp.MAX, group=group)
        shifted = logits - peak.unsqueeze(-1)
        mine = (columns >= 0) & (columns < logits.shape[-1])
        local = columns.clamp(0, logits.shape[-1] - 1).unsqueeze(-1)
        weights = shifted.exp()
        total = weights.sum(-1)
        target = torch.where(mine, shifted.gather(-1, local).squeeze(-1), 0.0)
        # A banned column has weight 0 and shifted −inf; it adds nothing to the mean.
        mean = (weights * torch.where(weights > 0, shifted, 0.0)).sum(-1)
        sums = torch.stack((total, target, mean))
        dist.all_reduce(sums, group=group)
        total, target, mean = sums
        entropies = total.log() - mean / total
        ctx.save_for_backward(weights.div_(total.unsqueeze(-1)), local, mine, entropies)
        ctx.entropy_gradient = entropy_gradient
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropies)
        return target - total.log(), entropies

    @staticmethod
    def backward(ctx: Any, grad: Tensor, entropy_grad: Tensor) -> tuple[Tensor, None, None, None]:
        probabilities, local, mine, entropies = ctx.saved_tensors
        out = probabilities * -grad.unsqueeze(-1)
        out.scatter_add_(-1, local, torch.where(mine, grad, 0.0).unsqueeze(-1))
        if ctx.entropy_gradient:  # dH/dz_j = −p_j (log p_j + H); 0 where p_j is
            surprise = torch.where(probabilities > 0, probabilities.log(), 0.0) + entropies.unsqueeze(-1)
            out -= entropy_grad.unsqueeze(-1) * probabilities * surprise
        return out, None, None, None
