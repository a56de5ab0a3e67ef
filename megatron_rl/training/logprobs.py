"""Log-probabilities and entropies of tokens when the vocabulary is split over tensor-parallel ranks.

At 20,480 tokens and 152,064 ids the logits alone are 12 GB in fp32, and a softmax makes several copies. The trainer
never has them: `projected_logprobs` projects hidden states a chunk of tokens at a time, and again in backward, which
costs one projection more (four instead of three).
"""

from collections.abc import Iterator
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
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probability of each label, the entropy of the distribution that it was drawn from, and whether it is on top.

    Args:
        logits: this TP rank's columns, `[..., padded vocabulary / tp]`.
        labels: `[...]`, global token ids.
        temperature: of sampling.
        vocabulary: ids from here on are banned: outside the softmax.
        group: the tensor-parallel group.
        entropy_gradient: whether gradients flow through the entropies too.

    Returns:
        (log-probabilities, entropies in nats, bool: no token is likelier), `[...]`, float32 (float64 of float64).
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
    ) -> tuple[Tensor, Tensor, Tensor]:
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
        likeliest = target == 0  # shifted by the highest
        ctx.mark_non_differentiable(likeliest, *(() if entropy_gradient else (entropies,)))
        return target - total.log(), entropies, likeliest

    @staticmethod
    def backward(ctx: Any, grad: Tensor, entropy_grad: Tensor, _: Tensor) -> tuple[Tensor, None, None, None]:
        probabilities, local, mine, entropies = ctx.saved_tensors
        out = probabilities * -grad.unsqueeze(-1)
        out.scatter_add_(-1, local, torch.where(mine, grad, 0.0).unsqueeze(-1))
        if ctx.entropy_gradient:  # dH/dz_j = −p_j (log p_j + H); 0 where p_j is
            surprise = torch.where(probabilities > 0, probabilities.log(), 0.0) + entropies.unsqueeze(-1)
            out -= entropy_grad.unsqueeze(-1) * probabilities * surprise
        return out, None, None, None


def projected_logprobs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    chunk: int,
    temperature: float,
    vocabulary: int,
    group: dist.ProcessGroup,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """`token_logprobs(hidden @ weightᵀ, labels)` with the logits of no more than `chunk` tokens at a time.

    Args:
        hidden: the same on every TP rank, `[tokens, hidden]`; its gradient is this rank's part of a sum over TP.
        weight: this TP rank's rows of the output layer, `[padded vocabulary / tp, hidden]`.
        labels: `[tokens]`, global token ids.
        chunk: tokens whose logits exist at once.
        temperature: as the rest, see `token_logprobs`.

    Returns:
        See `token_logprobs`; `[tokens]`.
    """
    options = {
        "temperature": temperature,
        "vocabulary": vocabulary,
        "group": group,
        "entropy_gradient": entropy_gradient,
    }
    return _ProjectedLogprobs.apply(hidden, weight, labels, chunk, options)


class _ProjectedLogprobs(torch.autograd.Function):
    """Keeps hidden states and weight, and nothing of the logits."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, chunk: int, options: dict[str, Any]
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(hidden, weight, labels)
        ctx.chunk, ctx.options = chunk, options
        parts = [
            token_logprobs(hidden[tokens] @ weight.t(), labels[tokens], **options)
            for tokens in _chunks(len(hidden), chunk)
        ]
        logprobs, entropies, likeliest = (torch.cat(columns) for columns in zip(*parts, strict=True))
        ctx.mark_non_differentiable(likeliest, *(() if options["entropy_gradient"] else (entropies,)))
        return logprobs, entropies, likeliest

    @staticmethod
    def backward(ctx: Any, grad: Tensor, entropy_grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, labels = ctx.saved_tensors
        used = 2 if ctx.options["entropy_gradient"] else 1
        to_hidden = torch.empty_like(hidden)
        wide = torch.promote_types(weight.dtype, torch.float32)  # many chunks add up
        to_weight = torch.zeros_like(weight, dtype=wide)
        for tokens in _chunks(len(hidden), ctx.chunk):
            logits = (hidden[tokens] @ weight.t()).requires_grad_()
            with torch.enable_grad():
                found = token_logprobs(logits, labels[tokens], **ctx.options)
            (to_logits,) = torch.autograd.grad(found[:used], logits, (grad[tokens], entropy_grad[tokens])[:used])
            del logits, found
            to_hidden[tokens] = to_logits @ weight
            to_weight += to_logits.t() @ hidden[tokens]
        return to_hidden, to_weight.to(weight.dtype), None, None, None


def _chunks(count: int, size: int) -> Iterator[slice]:
    return (slice(first, min(first + size, count)) for first in range(0, count, size))
