"""Which implementation of layers, attention and Adam is in use: chosen here, from what is installed."""

from __future__ import annotations

import importlib
import shutil
from dataclasses import dataclass
from functools import cache
from typing import Literal

from megatron_rl.errors import UserError
from megatron_rl.training import cpu
from megatron_rl.training.options import Adam, TrainerConfig

_MODULES: dict[str, str] = {
    "transformer_engine": "transformer_engine.pytorch",
    "apex": "apex.optimizers",
    "compiled": "triton",
    "fused_gradients": "fused_weight_gradient_mlp_cuda",  # built with Apex; Megatron's own layers call it
}


@dataclass(frozen=True, kw_only=True)
class Implementation:
    """What a rank computes with."""

    layers: Literal["local", "transformer_engine"]
    attention: str
    """With Transformer Engine what it may use; torch's scaled_dot_product_attention otherwise."""

    adam: Adam
    fused_gradients: bool
    """Weight gradients are added to the fp32 main gradients by the matrix product that makes them."""

    logprobs: Literal["eager", "compiled"]
    fp8: str | None

    def __str__(self) -> str:
        """One line for the log."""
        names = {"transformer_engine": "Transformer Engine", "apex": "Apex", "local": "local", "torch": "torch"}
        return (
            f"{names[self.layers]} layers, {self.attention} attention, {names[self.adam]} Adam, log-probs "
            f"{self.logprobs}, gradient accumulation {'fused' if self.fused_gradients else 'not fused'}"
            + (f", FP8 {self.fp8}" if self.fp8 else "")
        )


def choose(trainer: TrainerConfig) -> Implementation:
    """The fastest of what is installed, or what the options force.

    Raises:
        UserError: a forced one can't be used here; the message says why.
    """
    options = trainer.implementation
    fault = _te_fault(trainer)
    layers = options.layers
    if layers == "auto":
        layers = "local" if fault else "transformer_engine"
    if layers == "local":
        fault = fault or "set trainer.implementation.layers to it"
    needed = {"layers": options.layers == "transformer_engine", "attention": options.attention != "auto"}
    for option, forced in (needed | {"fp8": options.fp8 is not None}).items():
        if forced and fault:
            raise UserError(f"trainer.implementation.{option}: needs the layers of transformer_engine: {fault}")
    order: tuple[Adam, ...] = ("transformer_engine", "apex", "torch")  # Megatron's own
    if options.adam != "auto":
        _need(options.adam, "adam")
        order = (options.adam,)
    if options.fused_gradients:
        _need("fused_gradients", "fused_gradients")
    fused = options.fused_gradients is not False and not _fault("fused_gradients")
    logprobs = options.logprobs
    if logprobs == "auto":
        logprobs = "eager" if _fault("compiled") else "compiled"
    return Implementation(
        layers=layers,
        attention="SDPA" if layers == "local" else options.attention,
        adam=next(kind for kind in order if not _fault(kind)),
        fused_gradients=fused,
        logprobs=logprobs,
        fp8=options.fp8,
    )


def _te_fault(trainer: TrainerConfig) -> str | None:
    """Why Transformer Engine's layers can't be used; None: they can."""
    if trainer.dtype != "bfloat16":
        return "its attention over packed sequences takes trainer.dtype=bfloat16 only"
    return _fault("transformer_engine")


def _need(part: str, option: str) -> None:
    fault = _fault(part)
    if fault:
        name = _MODULES[part].partition(".")[0]
        raise UserError(f"trainer.implementation.{option}: {name} can't be used here: {fault}")


@cache
def _fault(part: str) -> str | None:
    """Why a part can't be used on this rank; None: it can."""
    if part not in _MODULES:
        return None
    if not cpu.has_cuda():
        return "there is no GPU"
    try:
        importlib.import_module(_MODULES[part])
    except (ImportError, OSError, RuntimeError, AssertionError) as error:  # absent, or built for another CUDA or torch
        return " ".join(str(error).split()) or type(error).__name__
    if part == "compiled" and not any(map(shutil.which, ("cc", "gcc", "clang"))):
        return "Triton needs a C compiler"
    return None
