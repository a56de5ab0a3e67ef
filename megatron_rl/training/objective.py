"""The objective of one micro-batch: `sum_t w_t l_t`, with the loss that the config names and the terms around it."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from pydantic import PydanticSchemaGenerationError, TypeAdapter, ValidationError
from torch import Tensor

from megatron_rl.algorithms.corrections import correction_weights, mismatch_metrics
from megatron_rl.algorithms.kl import kl_estimates
from megatron_rl.algorithms.losses import LOSSES, LossInputs, LossOutput, Metrics, masked_mean
from megatron_rl.config import AlgorithmConfig
from megatron_rl.errors import UserError
from megatron_rl.functions import load_function, trying
from megatron_rl.types import MicroBatch

RESERVED = frozenset("batch train rollout eval seconds policy mismatch".split())
"""First parts of the names of metrics that are not a loss's."""

Loss = Callable[[LossInputs], LossOutput]


def load_loss(algorithm: AlgorithmConfig) -> Loss:
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
    values = dict(algorithm.loss_kwargs)
    for name, value in algorithm.loss_kwargs.items():
        try:
            values[name] = _type_of(function, name).validate_python(value)
        except ValidationError as error:
            fault = error.errors()[0]["msg"]
            raise UserError(f"algorithm.loss_kwargs.{name}: {fault}, got {value!r} ({algorithm.loss})") from None
    return cast(Loss, partial(function, **values))


def _type_of(function: Callable[..., object], parameter: str) -> TypeAdapter[Any]:
    """What a parameter is annotated with; anything, where that is no type that can be checked, or can't be found."""
    try:
        annotation = inspect.signature(function).parameters[parameter].annotation
        if isinstance(annotation, str):
            annotation = eval(annotation, inspect.unwrap(function).__globals__)  # as typing.get_type_hints does
        return TypeAdapter(Any if annotation is inspect.Parameter.empty else annotation)
    except (KeyError, NameError, AttributeError, TypeError, SyntaxError, PydanticSchemaGenerationError):
        return TypeAdapter(Any)


@dataclass(frozen=True, kw_only=True)
class Given:
    """Log-probabilities of a micro-batch's labels, `[1, tokens]`, that were computed before this optimizer step."""

    sampled: Tensor | None = None
    """By the trainer, with the weights that sampled; None: the current ones are those, or nobody computed them."""

    reference: Tensor | None = None
    """By the reference policy."""


@dataclass(frozen=True, kw_only=True)
class Objective:
    """`sum_t w_t (c_t l_t + kl − entropy bonus)`: the loss l with its correction c, and the two terms beside it."""

    loss: Loss
    algorithm: AlgorithmConfig
    over_context: Callable[[Tensor], Tensor] = lambda sums: sums
    """Adds up over context-parallel ranks, with gradient."""

    def __call__(
        self, batch: MicroBatch, logprobs: Tensor, entropies: Tensor, given: Given, *, first: bool = True
    ) -> tuple[Tensor, Metrics]:
        """The objective of a micro-batch, and its metrics as (sum, weight).

        Args:
            batch: the micro-batch, tensors `[1, tokens]`.
            logprobs: of the labels under the current policy, `[1, tokens]`, with gradient.
            entropies: of the distributions they were drawn from, `[1, tokens]`.
            given: what was computed before.
            first: whether the weights are still those that sampled; then trainer and engine should agree.

        Raises:
            UserError: the loss function returned something else than a `LossOutput` of these tokens.
        """
        inputs, sampled = self._inputs(batch, logprobs, entropies, given, first)
        mask, algorithm = inputs.mask, self.algorithm
        out = self.loss(inputs)
        check_output(out, len(mask))
        losses = out.losses
        metrics: Metrics = {
            "policy/entropy": masked_mean(inputs.entropies, mask),
            "policy/logprob": masked_mean(inputs.logprobs, mask),
        }
        if sampled is not None:
            pair = (sampled, inputs.rollout_logprobs, mask, inputs.sequence_sum)
            cap = algorithm.correction.cap if algorithm.correction else 2.0
            metrics |= mismatch_metrics(*pair, cap=cap)
            if algorithm.correction:
                correction = correction_weights(*pair, **algorithm.correction.model_dump())
                metrics["mismatch/correction"] = masked_mean(correction, mask)
                losses = losses * correction
        if inputs.reference_logprobs is not None:
            kl = kl_estimates(inputs.logprobs, inputs.reference_logprobs, estimator=algorithm.kl.estimator)
            metrics["policy/kl"] = masked_mean(kl, mask)
            if algorithm.kl.place == "loss":
                losses = losses + algorithm.kl.coef * kl
        if algorithm.entropy_coef:
            losses = losses - algorithm.entropy_coef * inputs.entropies
        total = (torch.where(mask, losses, 0.0) * batch.weights.flatten()).sum()
        metrics["loss/objective"] = (total.detach().clone(), torch.ones(()))
        for name in out.metrics:
            if name in metrics or name.partition("/")[0] in RESERVED or name.startswith("share_"):
                raise UserError(f"algorithm.loss: it returned a metric {name!r}, whose name is taken; loss/... is free")
        return total, metrics | out.metrics

    def _inputs(
        self, batch: MicroBatch, logprobs: Tensor, entropies: Tensor, given: Given, first: bool
    ) -> tuple[LossInputs, Tensor | None]:
        """What the loss sees, and the trainer's log-probs with the weights that sampled, if they are known."""
        mask = batch.mask.flatten()

        # Here, not in the losses: whatever stands outside the mask, even NaN, reaches neither a loss nor a gradient.
        def inside(values: Tensor) -> Tensor:
            return torch.where(mask, values.flatten(), 0.0)

        current, rollout = inside(logprobs), inside(batch.rollout_logprobs)
        sampled = inside(given.sampled) if given.sampled is not None else current.detach() if first else None
        if self.algorithm.old_logprobs == "rollout":
            old = rollout
        elif sampled is None:
            raise RuntimeError("old log-probs of a later optimizer step were not computed")
        else:
            old = sampled
        return LossInputs(
            logprobs=current,
            old_logprobs=old,
            rollout_logprobs=rollout,
            reference_logprobs=None if given.reference is None else inside(given.reference),
            advantages=batch.advantages.flatten(),
            mask=mask,
            entropies=inside(entropies),
            response_ids=batch.response_ids.flatten(),
            group_ids=batch.group_ids.flatten(),
            sequence_sum=partial(
                sum_over_responses,
                ids=batch.response_ids.flatten(),
                responses=batch.responses,
                over_context=self.over_context,
            ),
        ), sampled

    def try_out(self, device: torch.device) -> None:
        """Call the loss once on two short responses, so that a wrong one is known before anything is sampled.

        Raises:
            UserError: it raised something, or what it returned is no `LossOutput` of these tokens.
        """
        mask = torch.tensor([[True, True, False], [True, True, True]], device=device)
        ones = torch.ones(mask.shape, device=device)
        ids = torch.where(mask, torch.tensor([[0], [1]], device=device), -1)
        batch = MicroBatch(
            tokens=ones.long(),
            labels=ones.long(),
            mask=mask,
            weights=ones / 5,
            advantages=ones,
            rollout_logprobs=-ones,
            response_ids=ids,
            group_ids=ids,
            responses=2,
            numbers=(0, 1),
            positions=ones.long(),
            lengths=(3, 3),
            starts=torch.tensor([0, 3, 6]),
        )
        kl = self.algorithm.kl
        reference = -ones if kl.wanted and kl.place != "reward" else None
        entropies = ones.clone().requires_grad_(self.entropy_gradient)
        with trying(f"algorithm.loss: {self.algorithm.loss}"):
            self(batch, (-ones).requires_grad_(), entropies, Given(reference=reference))

    @property
    def entropy_gradient(self) -> bool:
        """Whether entropies have to carry a gradient."""
        return self.algorithm.entropy_gradient or self.algorithm.entropy_coef != 0


def check_output(out: object, tokens: int) -> None:
    """Refuse what breaks the contract of a loss, before it spoils a sum."""
    if not isinstance(out, LossOutput):
        raise UserError(f"algorithm.loss: it returned {type(out).__name__}, not a LossOutput")
    if not isinstance(out.losses, Tensor) or out.losses.shape != (tokens,):
        shape = tuple(out.losses.shape) if isinstance(out.losses, Tensor) else type(out.losses).__name__
        raise UserError(f"algorithm.loss: its losses are {shape}; one for each of {tokens} tokens is wanted")
    if not out.losses.requires_grad:
        raise UserError("algorithm.loss: its losses carry no gradient; they must come from inputs.logprobs")
    if not isinstance(out.metrics, Mapping):
        raise UserError(f"algorithm.loss: its metrics are {type(out.metrics).__name__}, not a mapping")
    for name, pair in out.metrics.items():
        if not (isinstance(pair, tuple) and len(pair) == 2 and all(_is_scalar(part) for part in pair)):
            raise UserError(f"algorithm.loss: its metric {name!r} is not (sum, weight), two tensors of one element")


def _is_scalar(value: object) -> bool:
    return isinstance(value, Tensor) and value.dim() == 0


def sum_over_responses(
    values: Tensor, *, ids: Tensor, responses: int, over_context: Callable[[Tensor], Tensor] = lambda sums: sums
) -> Tensor:
    """`[tokens]` to `[tokens]`: at each token the sum over its response; 0 at tokens of none (id −1)."""
    inside = torch.where(ids >= 0, values, 0.0)
    sums = over_context(inside.new_zeros(responses + 1).index_add(0, ids + 1, inside))
    return sums[ids + 1]
