"""The contract of a loss, tried on small inputs without a model: `megatron-rl check-loss my_project.losses:my_loss`."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from threading import Barrier, BrokenBarrierError
from typing import Literal, NamedTuple

import torch
import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch import Tensor

from megatron_rl.algorithms.losses import LossInputs, LossOutput
from megatron_rl.check_loss_inputs import EXAMPLES, Example
from megatron_rl.config import AlgorithmConfig
from megatron_rl.errors import UserError
from megatron_rl.training import objective
from megatron_rl.training.objective import Loss, Objective, check_output, load_loss

TOLERANCE = 1e-6
"""How far equal things may be apart, relative to all of them: inputs are float64, a loss may compute in float32."""
NUDGE, NEAR = 1e-3, 0.02
"""Of finite differences: the step, and how far slopes may be apart, relatively; what a `detach` does is larger."""
OURS = (__file__, objective.__file__)
PATIENCE_S = 2.0
"""How long one of two ranks waits for the other."""

PRECONDITIONS = 4
"""If one of the first checks fails, the others would fail for the same reason and are left out."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What one check found."""

    check: str
    verdict: Literal["ok", "note", "FAIL"]
    text: str = ""

    def __str__(self) -> str:
        return f"{self.verdict:<4} {self.check}" + (f": {self.text}" if self.text else "")


class _Fault(Exception):
    """A check failed: how, on which input, where."""


def check_loss(loss: Loss) -> list[Finding]:
    """Try the contract of `algorithms/losses.py` on a loss; bind its keyword arguments with `functools.partial`.

    Returns:
        A finding for each check, in order, up to the first of the preconditions that fails.
    """
    findings: list[Finding] = []
    for name, check in CHECKS.items():
        try:
            note = check(loss)
            findings.append(Finding(check=name, verdict="note" if note else "ok", text=note or ""))
        except _Fault as fault:
            findings.append(Finding(check=name, verdict="FAIL", text=str(fault)))
            if len(findings) <= PRECONDITIONS:
                break
    return findings


def load_checked(name: str, arguments: Sequence[str]) -> Loss:
    """The loss that a recipe would name so, with `key=value` arguments as its `loss_kwargs`.

    Raises:
        UserError: no such function, or arguments that don't fit it.
    """
    for text in arguments:
        if "=" not in text or text.startswith("="):
            raise UserError(f"argument {text!r}: write key=value")
    try:
        kwargs = OmegaConf.to_container(OmegaConf.from_dotlist(list(arguments)), resolve=True)
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise UserError(f"arguments {' '.join(arguments)!r}: {' '.join(str(error).split())}") from None
    return load_loss(AlgorithmConfig.model_validate({"loss": name, "loss_kwargs": kwargs}))


# ---- the checks: each raises _Fault, or returns a note or None


def _shapes(loss: Loss) -> str | None:
    for example in EXAMPLES:
        _call(loss, example, example.lay(example.parts(1)[0])[0])
    return None


def _depends(loss: Loss) -> str | None:
    if not any(_evaluate(loss, example).gradient.any() for example in EXAMPLES):
        raise _Fault("the gradient is 0 at every token of every input")
    return None


def _pure(loss: Loss) -> str | None:
    for example in EXAMPLES:
        (inputs, _), (before, _), seen = *(example.lay(example.parts(1)[0]) for _ in range(2)), []
        for _ in range(2):
            out = _call(loss, example, inputs)
            metrics = {name: [part.item() for part in pair] for name, pair in out.metrics.items()}
            seen.append(repr((out.losses[inputs.mask].tolist(), metrics)))  # as text, in which nan is nan
        for name, value in vars(inputs).items():
            if isinstance(value, Tensor) and not torch.equal(value, getattr(before, name)):
                raise _Fault(f"it changed inputs.{name} for {example}")
        if seen[0] != seen[1]:
            raise _Fault(f"it returned something else for {example}: is there chance in it, or memory?")
    return None


def _taken(loss: Loss) -> str | None:
    algorithm = AlgorithmConfig.model_validate({"loss": "it", "kl": {"coef": 1.0}})
    try:
        Objective(loss=loss, algorithm=algorithm).try_out(torch.device("cpu"))
    except Exception as error:
        raise _Fault(_describe(error)) from None
    return None


def _finite(loss: Loss) -> str | None:
    for example in EXAMPLES:
        found = _evaluate(loss, replace(example, columns={name: of.float() for name, of in example.columns.items()}))
        for what, values in (("losses are", found.losses), ("the gradient is", found.gradient)):
            for token in (~values.isfinite()).nonzero().flatten().tolist():
                raise _Fault(f"{what} {values[token]:g} for {example} {example.at(token)}")
        for name, pair in found.metrics.items():
            if not pair.isfinite().all():
                raise _Fault(f"metric {name!r} is {tuple(pair.tolist())} for {example}")
    return None


def _mask(loss: Loss) -> str | None:
    note = None
    for example in EXAMPLES:
        found = _evaluate(loss, example)
        reached = found.stray[found.stray != 0]
        if reached.isfinite().any():
            raise _Fault(f"the gradient is {reached[0]:.4g} at a token outside the mask for {example}")
        if len(reached):
            hint = "the trainer cuts it off, but a sum would spread it: take torch.where(mask, ..., 0.0)"
            note = f"the gradient is {reached[0]:g} at a token outside the mask for {example}; {hint}"
        other = _evaluate(loss, example, outside=-3.0)
        _compare(example, other, found, "with other log-probs, advantages and entropies outside the mask")
    return note


def _slopes(loss: Loss) -> str | None:
    for example in EXAMPLES[:2]:  # on-policy and off-policy
        gradient, here, apart = _evaluate(loss, example).gradient.tolist(), _objective(loss, example), []
        for token, found in enumerate(gradient):
            left = (here - _objective(loss, example, token, -NUDGE)) / NUDGE
            right = (_objective(loss, example, token, NUDGE) - here) / NUDGE
            near = NEAR * max(abs(left), abs(right), abs(found), 1e-6)
            if abs(left - right) <= near < abs((left + right) / 2 - found):  # left is not right where clipping begins
                apart.append(f"{example.at(token)} it is {found:.4g}, not {(left + right) / 2:.4g}")
        if apart:
            return (
                "the gradient is not the derivative of the value: fine if a stop-gradient (detach) is meant. "
                f"For {example} {apart[0]}; so at {len(apart)} of {len(gradient)} tokens"
            )
    return None


def _split(loss: Loss) -> str | None:
    for example, parts in product(EXAMPLES, (2, 3)):
        what = f"in {parts} micro-batches instead of one; what others are in it, and how many, must not matter"
        _compare(example, _evaluate(loss, example, example.parts(parts)), _evaluate(loss, example), what)
    return None


def _context(loss: Loss) -> str | None:
    for example in EXAMPLES:
        what = (
            "with every other token on another context-parallel rank; only inputs.sequence_sum sees all of a response"
        )
        _compare(example, _on_two_ranks(loss, example), _evaluate(loss, example), what)
    return None


def _order(loss: Loss) -> str | None:
    for example in EXAMPLES:
        backwards = _evaluate(loss, example, [example.parts(1)[0][::-1]])
        _compare(example, backwards, _evaluate(loss, example), "with the responses in another order")
    return None


def _metrics(loss: Loss) -> str | None:
    for example in EXAMPLES:
        whole, split = _evaluate(loss, example).metrics, _evaluate(loss, example, example.parts(3)).metrics
        for name in sorted(whole.keys() | split.keys()):
            one, three = (metrics.get(name, torch.zeros(2).double()) for metrics in (whole, split))
            if not torch.allclose(one, three, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True):
                pairs = f"{tuple(one.tolist())} in one micro-batch and {tuple(three.tolist())} added up over three"
                hint = "return (sum over tokens, number of tokens), as masked_mean does"
                raise _Fault(f"{name!r} is {pairs} for {example}: {hint}")
    return None


def _without_reference(loss: Loss) -> str | None:
    for example in EXAMPLES:
        columns = {name: of for name, of in example.columns.items() if name != "reference_logprobs"}
        try:
            _evaluate(loss, replace(example, columns=columns))
        except _Fault as fault:
            if isinstance(fault.__cause__, ValueError) and "algorithm.kl" in str(fault.__cause__):
                return f"it needs them and says so: {fault.__cause__}"
            raise _Fault(
                f"{fault}. inputs.reference_logprobs is None unless algorithm.kl asks for them (place=measure); a "
                "loss that needs them raises a ValueError that names algorithm.kl"
            ) from None
    return None


CHECKS: Mapping[str, Callable[[Loss], str | None]] = {
    "one loss for each token, metrics are (sum, weight)": _shapes,
    "depends on the log-probs": _depends,
    "the same when called again, inputs unchanged": _pure,
    "the trainer takes it": _taken,
    "finite": _finite,
    "tokens outside the mask do not matter": _mask,
    "gradient is that of finite differences": _slopes,
    "the same in several micro-batches": _split,
    "the same on context-parallel ranks": _context,
    "the same in another order": _order,
    "metrics add up over micro-batches": _metrics,
    "works without reference log-probs": _without_reference,
}


# ---- calling a loss


class _Outcome(NamedTuple):
    """What a loss made of the trained tokens of an example, `[trained tokens]`."""

    losses: Tensor
    gradient: Tensor  # of the weighted sum, by logprobs
    stray: Tensor  # the same at tokens outside the mask
    metrics: Mapping[str, Tensor]  # [2]: sums and weights, added up


def _evaluate(
    loss: Loss, example: Example, parts: Sequence[Sequence[int]] | None = None, outside: float = 0.0
) -> _Outcome:
    """Micro-batches of the responses `parts` (one of all), added up."""
    losses, gradient = torch.zeros_like(example.weights), torch.zeros_like(example.weights)
    stray, metrics = [torch.zeros(0)], dict[str, Tensor]()
    for chosen in parts or example.parts(1):
        inputs, numbers = example.lay(chosen, outside)
        out, trained = _call(loss, example, inputs), numbers[inputs.mask]
        total = (torch.where(inputs.mask, out.losses, 0.0)[inputs.mask] * example.weights[trained]).sum()
        try:
            (by,) = torch.autograd.grad(total, inputs.logprobs, allow_unused=True, materialize_grads=True)
        except RuntimeError as error:
            raise _Fault(f"no gradient for {example}: {error}") from error
        losses[trained], gradient[trained] = out.losses.detach()[inputs.mask].double(), by[inputs.mask].double()
        stray.append(by[~inputs.mask])
        for name, pair in out.metrics.items():
            metrics[name] = metrics.get(name, 0.0) + torch.stack([part.detach().double() for part in pair])
    return _Outcome(losses, gradient, torch.cat(stray), metrics)


def _on_two_ranks(loss: Loss, example: Example) -> _Outcome:
    """Each response's tokens in turn on two ranks, threads here, that wait for one another in `sequence_sum`."""
    inputs, numbers = example.lay(example.parts(1)[0])
    barrier, sums = Barrier(2, timeout=PATIENCE_S), [torch.zeros(0)] * 2

    def rank(number: int) -> tuple[LossInputs, LossOutput]:
        part = {name: of[number::2] for name, of in vars(inputs).items() if isinstance(of, Tensor)}
        part["logprobs"] = part["logprobs"].detach().clone().requires_grad_()
        ids = part["response_ids"]

        def summed(values: Tensor) -> Tensor:
            held = torch.where(ids >= 0, values, 0.0)
            sums[number] = held.new_zeros(len(example.lengths) + 1).index_add(0, ids + 1, held)
            barrier.wait()
            total = sums[0] + sums[1]
            barrier.wait()
            return total[ids + 1]

        mine = replace(inputs, **part, sequence_sum=summed)
        return mine, _call(loss, example, mine)

    with ThreadPoolExecutor(2) as pool, _default_dtype(inputs.logprobs.dtype):  # of the process, not of a thread
        try:
            parts = list(pool.map(rank, range(2)))
        except _Fault as fault:
            if isinstance(fault.__cause__, BrokenBarrierError):
                text = "it calls inputs.sequence_sum on one context-parallel rank more often than on another"
                raise _Fault(f"{text}, which would wait for ever, for {example}") from None
            raise
    losses, gradient = torch.zeros_like(example.weights), torch.zeros_like(example.weights)
    weights = torch.cat((example.weights, torch.zeros(1)))[numbers]
    columns = [torch.where(of.mask, out.losses, 0.0) * weights[n::2] for n, (of, out) in enumerate(parts)]
    total = torch.cat(columns).sum()
    by = torch.autograd.grad(total, [of.logprobs for of, _ in parts], allow_unused=True, materialize_grads=True)
    for n, (of, out) in enumerate(parts):
        trained = numbers[n::2][of.mask]
        losses[trained], gradient[trained] = out.losses.detach()[of.mask].double(), by[n][of.mask].double()
    return _Outcome(losses, gradient, torch.zeros(0), {})


def _objective(loss: Loss, example: Example, token: int = 0, nudge: float = 0.0) -> float:
    """The weighted sum, with another log-prob of one token."""
    logprobs = example.columns["logprobs"].clone()
    logprobs[token] += nudge
    moved = replace(example, columns={**example.columns, "logprobs": logprobs})
    return float((_evaluate(loss, moved).losses * example.weights).sum())


def _compare(example: Example, found: _Outcome, expected: _Outcome, what: str) -> None:
    """Raise _Fault at the first token whose loss or gradient is not the expected one."""
    for name in ("loss", "gradient"):
        one, other = (of.losses if name == "loss" else of.gradient for of in (found, expected))
        same = (one - other).abs() <= TOLERANCE * other[other.isfinite()].abs().sum() + 1e-12
        for token in (~same & (one.isfinite() | other.isfinite())).nonzero().flatten().tolist():
            values = f"{name} is {one[token]:.6g} instead of {other[token]:.6g}"
            raise _Fault(f"{values} for {example} {example.at(token)}, {what}")


def _call(loss: Loss, example: Example, inputs: LossInputs) -> LossOutput:
    try:
        with _default_dtype(inputs.logprobs.dtype):
            out = loss(inputs)
        check_output(out, len(inputs.mask))
    except (Exception, SystemExit) as error:
        raise _Fault(f"{_describe(error)}, for {example}") from error
    return out


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Of tensors that the loss makes."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _describe(error: BaseException) -> str:
    """Type, message, and the last line of the user's file: not ours, and not what that line called."""
    if isinstance(error, UserError):
        return str(error).removeprefix("algorithm.loss: ")
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename not in OURS]
    lines = [f" ({one.filename}:{one.lineno}: {one.line})" for one in frames if one.filename == frames[0].filename]
    return f"{type(error).__name__}: {error}" + (lines[-1] if lines else "")
