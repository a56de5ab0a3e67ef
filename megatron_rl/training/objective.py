"""The objective of one micro-batch: `sum_t w_t l_t`, with the loss that the config names."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, cast, get_type_hints

import torch
from pydantic import TypeAdapter, ValidationError
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
        signature = inspect.signature(function)
        signature.bind(None, **algorithm.loss_kwargs)
    except (TypeError, ValueError) as error:
        raise UserError(f"algorithm.loss_kwargs: {algorithm.loss}: {error}") from None
    hints = get_type_hints(function) if inspect.isfunction(function) else {}
    for name, value in algorithm.loss_kwargs.items():
        try:
            TypeAdapter(hints.get(name, Any)).validate_python(value, strict=False)
        except ValidationError as error:
            fault = error.errors()[0]["msg"]
            raise UserError(f"algorithm.loss_kwargs.{name}: {fault}, got {value!r} ({algorithm.loss})") from None
    return cast(Callable[[LossInputs], LossOutput], partial(function, **algorithm.loss_kwargs))


def try_loss(loss: Callable[[LossInputs], LossOutput], device: torch.device) -> None:
    """Call the loss once on two short responses, so that a wrong one is known before anything is sampled.

    Raises:
        UserError: what it returned is no `LossOutput` of these tokens.
    """
    mask = torch.tensor([[True, True, False], [True, True, True]], device=device)
    ones = torch.ones(mask.shape, device=device)
    batch = MicroBatch(
        tokens=ones.long(), labels=ones.long(), mask=mask, weights=ones / 5, advantages=ones, rollout_logprobs=-ones
    )
    objective(loss, batch, (-ones).requires_grad_(), ones, None)


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
        UserError: the loss function returned something else than a `LossOutput` of these tokens.
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
    _check(out, len(current))
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
        raise UserError(f"algorithm.loss: it returned a metric {min(taken)!r}, which is the trainer's own")
    return total, metrics | out.metrics


def _check(out: object, tokens: int) -> None:
    """Refuse what breaks the contract of a loss, before it spoils a sum."""
    if not isinstance(out, LossOutput):
        raise UserError(f"algorithm.loss: it returned {type(out).__name__}, not a LossOutput")
    if not isinstance(out.losses, Tensor) or out.losses.shape != (tokens,):
        shape = tuple(out.losses.shape) if isinstance(out.losses, Tensor) else type(out.losses).__name__
        raise UserError(f"algorithm.loss: its losses are {shape}; one for each of {tokens} tokens is wanted")
    if not out.losses.requires_grad:
        raise UserError("algorithm.loss: its losses carry no gradient; they must come from inputs.logprobs")
    for name, pair in out.metrics.items():
        if not (isinstance(pair, tuple) and len(pair) == 2 and all(_is_scalar(part) for part in pair)):
            raise UserError(f"algorithm.loss: its metric {name!r} is not (sum, weight), two tensors of one element")


def _is_scalar(value: object) -> bool:
    return isinstance(value, Tensor) and value.dim() == 0


def _sum_over_rows(values: Tensor, *, mask: Tensor) -> Tensor:
    """`[tokens]` to `[tokens]`: every response is one row of the padded micro-batch."""
    sums = torch.where(mask, values.view(mask.shape), 0.0).sum(1, keepdim=True)
    return sums.expand(mask.shape).flatten()
