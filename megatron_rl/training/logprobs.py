"""Log-probabilities and entropies of tokens when the vocabulary is split over tensor-parallel ranks.

At 20,480 tokens and 152,064 ids the logits alone are 12 GB in fp32, and a softmax makes several copies. The trainer
never has them: `projected_logprobs` projects hidden states a chunk of tokens at a time, and again in backward, which
costs one projection more (four instead of three). Forward keeps three numbers a token, so backward needs neither
reductions over the vocabulary nor collectives.
"""

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist

# torch.compile imports it too. Its default arguments keep the process group that is there by then, whose threads then
# outlive it: now and then they end a finished process with SIGABRT. So it comes before there is one.
import torch.distributed.nn.functional
from torch import Tensor

from megatron_rl.algorithms.policy import policy_logits, through_policy_logits

BLOCK = 10_000_000
"""Logits that are computed with at once, if nothing fuses it: what is in between takes 40 MB in fp32."""

ROWS = 8192
"""Rows of the weight that a chunk's gradient is made for at once, if it is not in the type of the sum."""


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
    compiled: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probability of each label, the entropy of the distribution that it was drawn from, and whether it is on top.

    Args:
        hidden: the same on every TP rank, `[tokens, hidden]`; its gradient is this rank's part of a sum over TP.
        weight: this TP rank's rows of the output layer, `[padded vocabulary / tp, hidden]`.
        labels: `[tokens]`, global token ids below `vocabulary`.
        chunk: tokens whose logits exist at once.
        temperature: of sampling.
        vocabulary: ids from here on are banned: outside the softmax. Their rows of `weight` are not even read.
        group: the tensor-parallel group.
        entropy_gradient: whether gradients flow through the entropies too.
        compiled: whether torch.compile fuses what is done to each logit (needs a compiler; worth it on a GPU).

    Returns:
        (log-probabilities, entropies in nats, bool: no token is likelier), `[tokens]`, float32 (float64 of float64).
    """
    first = group.rank() * len(weight)
    allowed = min(max(vocabulary - first, 0), len(weight))
    options = {"chunk": chunk, "temperature": temperature, "allowed": allowed, "compiled": compiled}
    return _ProjectedLogprobs.apply(hidden, weight, labels - first, group, entropy_gradient, options)


class _ProjectedLogprobs(torch.autograd.Function):
    """Keeps hidden states, weight and three numbers a token, and nothing of the logits."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        columns: Tensor,
        group: dist.ProcessGroup,
        entropy_gradient: bool,
        options: dict[str, Any],
    ) -> tuple[Tensor, ...]:
        statistics = _functions(options["compiled"])[0]
        wide = torch.promote_types(weight.dtype, torch.float32)
        found = hidden.new_zeros(4, len(hidden), dtype=wide)
        found[0] = torch.finfo(wide).min  # what a rank without allowed columns adds to the others': nothing
        for tokens, logits in _chunks(hidden, weight, options):
            statistics(found[:, tokens], options["temperature"], logits, columns[tokens])
        peak, total, mean, target = _over_ranks(found, (columns >= 0) & (columns < options["allowed"]), group)
        entropies = total.log() - mean / total
        ctx.save_for_backward(hidden, weight, columns, peak, total, entropies)
        ctx.entropy_gradient, ctx.options = entropy_gradient, options
        likeliest = target == 0  # less the highest
        ctx.mark_non_differentiable(likeliest, *(() if entropy_gradient else (entropies,)))
        return target - total.log(), entropies, likeliest

    @staticmethod
    def backward(ctx: Any, grad: Tensor, entropy_grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, columns, peak, total, entropies = ctx.saved_tensors
        allowed, temperature = ctx.options["allowed"], ctx.options["temperature"]
        gradient = _functions(ctx.options["compiled"])[1]
        # With p the softmax of policy logits z: dlogp_y/dz = 1_y − p and dH/dz = −p (log p + H).
        grad = through_policy_logits(grad, temperature=temperature)
        factors = [-grad / total]
        if ctx.entropy_gradient:
            slope = through_policy_logits(-entropy_grad, temperature=temperature) / total
            factors = [factors[0] + slope * (entropies - total.log()), slope]
        to_label = torch.where((columns >= 0) & (columns < allowed), grad, 0.0)
        at_label = torch.empty_like(total)

        to_hidden = torch.zeros_like(hidden)
        # Many chunks add up: in bfloat16 the last ones would be lost.
        to_weight = torch.zeros_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32))
        for tokens, logits in _chunks(hidden, weight, ctx.options):
            label = columns[tokens].clamp(0, allowed - 1)
            of_tokens = (each[tokens] for each in factors)
            gradient(at_label[tokens], temperature, logits, label, peak[tokens], *of_tokens)
            # Summed before it is rounded: 1 − p is small where the policy is certain.
            rounded = (at_label[tokens] + to_label[tokens]).to(logits.dtype)
            to_logits = logits.scatter_(-1, label.unsqueeze(-1), rounded.unsqueeze(-1))
            torch.mm(to_logits, weight[:allowed], out=to_hidden[tokens])
            _add_product(to_weight[:allowed], to_logits.t(), hidden[tokens])
        return to_hidden, to_weight.to(weight.dtype), None, None, None, None


def _chunks(hidden: Tensor, weight: Tensor, options: dict[str, Any]) -> Iterator[tuple[slice, Tensor]]:
    """Logits of the allowed columns, `[chunk, allowed]`, to be overwritten; none where no column is allowed.

    They share one buffer: on a CPU each new one would be paid for page by page.
    """
    size, allowed = options["chunk"], options["allowed"]
    buffer = hidden.new_empty(min(size, len(hidden)), allowed)
    for first in range(0, len(hidden) if allowed else 0, size):
        tokens = slice(first, min(first + size, len(hidden)))
        yield tokens, torch.mm(hidden[tokens], weight[:allowed].t(), out=buffer[: tokens.stop - first])


def _statistics(temperature: float, logits: Tensor, columns: Tensor) -> Tensor:
    """What is known of each token from the columns of one rank.

    Args:
        temperature: of sampling.
        logits: `[tokens, columns]`; overwritten.
        columns: of the labels, `[tokens]`; any number where it is another rank's.

    Returns:
        `[4, tokens]`: the highest policy logit; with x = policy logits less the highest, sum exp(x) and sum x exp(x);
        the label's policy logit.
    """
    scaled = policy_logits(logits, temperature=temperature, allowed=logits.shape[-1], overwrite=True)
    peak = scaled.amax(-1)
    target = scaled.gather(-1, columns.clamp(0, logits.shape[-1] - 1).unsqueeze(-1)).squeeze(-1)
    shifted = scaled.sub_(peak.unsqueeze(-1))
    weights = shifted.exp()
    return torch.stack((peak, weights.sum(-1), weights.mul_(shifted).sum(-1), target))


def _over_ranks(found: Tensor, mine: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Statistics over all columns from those of each rank's, `[4, tokens]`; the label's logit less the highest.

    `mine`: whether the label is one of this rank's columns, `[tokens]`.
    """
    peak, total, mean, target = found
    highest = peak.clone()
    dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
    lower = peak - highest
    scale = lower.exp()
    sums = torch.stack((scale * total, scale * (mean + lower * total), torch.where(mine, target - highest, 0.0)))
    dist.all_reduce(sums, group=group)
    total, mean, target = sums
    return highest, total, mean, target


def _gradient(
    temperature: float, logits: Tensor, label: Tensor, peak: Tensor, offset: Tensor, slope: Tensor | None = None
) -> Tensor:
    """Overwrites logits with exp(x) (offset + slope x), where x = policy logits less the highest.

    Args:
        temperature: of sampling.
        logits: `[tokens, columns]`.
        label: a column of each token, `[tokens]`.
        peak: the highest policy logit, `[tokens]`.
        offset, slope: `[tokens]`; without slope 0.

    Returns:
        What was written at `label`, before it was rounded to the type of the logits, `[tokens]`.
    """

    def result(shifted: Tensor) -> Tensor:
        if slope is None:
            return shifted.exp_().mul_(offset.unsqueeze(-1))
        weights = shifted.exp()
        return shifted.mul_(slope.unsqueeze(-1)).add_(offset.unsqueeze(-1)).mul_(weights)

    scaled = policy_logits(logits, temperature=temperature, allowed=logits.shape[-1], overwrite=True)
    shifted = scaled.sub_(peak.unsqueeze(-1))
    at_label = result(shifted.gather(-1, label.unsqueeze(-1)))  # taken out of the result, that would not be fused away
    logits.copy_(result(shifted))
    return at_label.squeeze(-1)


@cache
def _functions(compiled: bool) -> tuple[Callable[..., None], Callable[..., None]]:
    """`_statistics` and `_gradient`, which write what they return into a tensor that is given first."""
    if compiled:
        return partial(_of_any_length, torch.compile(_statistics)), partial(_of_any_length, torch.compile(_gradient))
    return partial(_in_blocks, _statistics), partial(_in_blocks, _gradient)


def _of_any_length(function: Callable[..., Tensor], into: Tensor, temperature: float, *tensors: Tensor) -> None:
    """`function`, compiled once for chunks of two tokens and more: the last one of a micro-batch is of any length.

    All else stays constant in what is compiled; with `torch.compile(dynamic=True)` it would not.
    """
    for tensor in tensors:
        torch._dynamo.maybe_mark_dynamic(tensor, 0)
    into.copy_(function(temperature, *tensors))


def _in_blocks(function: Callable[..., Tensor], into: Tensor, temperature: float, *tensors: Tensor) -> None:
    """`function` a few tokens at a time.

    No block's result is kept: small tensors that stay, between large ones that come and go, leave holes in the heap.
    """
    size = max(1, BLOCK // tensors[0].shape[-1])
    blocks = zip(into.split(size, -1), *(tensor.split(size) for tensor in tensors), strict=True)
    for part, *block in blocks:
        part.copy_(function(temperature, *block))


def _add_product(into: Tensor, left: Tensor, right: Tensor) -> None:
    """`into += left @ right`, without a copy of `into`, or of more than `ROWS` rows where types differ."""
    if into.dtype == left.dtype:
        into.addmm_(left, right)
        return
    for rows, factor in zip(into.split(ROWS), left.split(ROWS), strict=True):
        rows += factor @ right
