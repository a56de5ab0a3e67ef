"""The objective of one micro-batch: `sum_t w_t l_t`, with the loss that the config names."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import cast

import torch
from torch import Tensor

from megatron_rl.algorithms.losses import LOSSES, LossInputs, LossOutput, Metrics, masked_mean
from megatron_rl.config import AlgorithmConfig
from megatron_rl.errors import UserError
from megatron_rl.functions import load_function
from megatron_rl.types import MicroBatch


def load_loss(algorithm: AlgorithmConfig) -> Callable[[LossInputs], LossOutput]:
    """The loss function with its keyword arguments bound.

    Raises:
        UserError: there is no such function, or it doesn't take these arguments.
    """
    function = LOSSES.get(algorithm.loss) or load_function(algorithm.loss, "algorithm.loss")
    try:
        inspect.signature(function).bind(None, **algorithm.loss_kwargs)
    except TypeError as error:
        raise UserError(f"algorithm.loss_kwargs: {algorithm.loss}: {error}") from None
    return cast(Callable[[LossInputs], LossOutput], partial(function, **algorithm.loss_kwargs))


def objective(
    loss: Callable[[LossInputs], LossOutput],
    batch: MicroBatch,
    logprobs: Tensor,
    entropies: Tensor,
    old_logprobs: Tensor | None,
    *,
    first: bool = True,
) -> tuple[Tensor, Metrics]:
    """The weighted sum of a micro-batch's token losses, and its metrics as (sum, weight).

    Args:
        loss: per-token loss.
        batch: the micro-batch, tensors `[batch, seq]`.
        logprobs: of the labels under the current policy, `[batch, seq]`, with gradient.
        entropies: of the distributions they were drawn from, `[batch, seq]`.
        old_logprobs: denominator of the ratio, `[batch, seq]`; None: the current ones.
        first: whether the weights are still those that sampled; then trainer and engine should agree.

    Raises:
        ValueError: the loss function returned losses of another shape, or a metric of a name that is taken.
    """
    mask = batch.mask.flatten()
    # Here, not in the losses: whatever stands outside the mask, even NaN, then reaches neither a loss nor a gradient.
    current, rollout = (torch.where(mask, x.flatten(), 0.0) for x in (logprobs, batch.rollout_logprobs))
    old = current.detach() if old_logprobs is None else torch.where(mask, old_logprobs.flatten(), 0.0)
    rows = torch.arange(len(batch.mask), device=mask.device).repeat_interleave(batch.mask.shape[1])
    out = loss(
        LossInputs(
            logprobs=current,
            old_logprobs=old,
            rollout_logprobs=rollout,
            advantages=batch.advantages.flatten(),
            mask=mask,
            response_ids=torch.where(mask, rows, -1),
            sequence_sum=partial(_sum_over_rows, mask=batch.mask),
        )
    )
    if out.losses.shape != current.shape:
        raise ValueError(f"the loss returned {tuple(out.losses.shape)} losses for {tuple(current.shape)} tokens")
    total = (torch.where(mask, out.losses, 0.0) * batch.weights.flatten()).sum()
    metrics: Metrics = {
        "policy/entropy": masked_mean(entropies.flatten(), mask),
        "policy/logprob": masked_mean(current, mask),
        "loss/objective": (total.detach().clone(), torch.ones(())),
    }
    if first:
        metrics["mismatch/logprob_abs"] = masked_mean((current - rollout).abs(), mask)
    taken = metrics.keys() & out.metrics.keys()
    if taken:
        raise ValueError(f"the loss returned a metric {min(taken)!r}, which is the trainer's own")
    return total, metrics | out.metrics


def _sum_over_rows(values: Tensor, *, mask: Tensor) -> Tensor:
    """`[tokens]` to `[tokens]`: every response is one row of the padded micro-batch."""
    sums = torch.where(mask, values.view(mask.shape), 0.0).sum(1, keepdim=True)
    return sums.expand(mask.shape).flatten()
