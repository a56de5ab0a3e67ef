"""Which implementation of layers, attention and Adam is in use: chosen here, from what is installed."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from functools import cache
from typing import Literal

from megatron_rl.errors import UserError
from megatron_rl.training import cpu
from megatron_rl.training.options import Adam, ImplementationConfig

_MODULES: dict[str, str] = {
    "transformer_engine": "transformer_engine.pytorch",
    "apex": "apex.optimizers",
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


def choose(options: ImplementationConfig) -> Implementation:
    """The fastest of what is installed, or what the options force.

    Raises:
        UserError: a forced one can't be used here; the message says why.
    """
    layers = options.layers
    if layers == "auto":
        layers = "local" if _fault("transformer_engine") else "transformer_engine"
    elif layers == "transformer_engine":
        _need("transformer_engine", "layers")
    local = layers == "local"
    for option in ("attention", "fp8"):
        if local and getattr(options, option) not in (None, "auto"):
            raise UserError(f"trainer.implementation.{option}: needs the layers of {_absence('transformer_engine')}")
    order: tuple[Adam, ...] = ("transformer_engine", "apex", "torch")  # Megatron's own
    if options.adam != "auto":
        _need(options.adam, "adam")
        order = (options.adam,)
    fused = options.fused_gradients
    if fused:
        _need("fused_gradients", "fused_gradients")
    logprobs = options.logprobs
    if logprobs == "auto":
        logprobs = "compiled" if cpu.has_cuda() else "eager"
    return Implementation(
        layers=layers,
        attention="SDPA" if local else options.attention,
        adam=next(kind for kind in order if not _fault(kind)),
        fused_gradients=not _fault("fused_gradients") if fused is None else fused,
        logprobs=logprobs,
        fp8=options.fp8,
    )


def _need(part: str, option: str) -> None:
    if _fault(part):
        raise UserError(f"trainer.implementation.{option}: {_absence(part)}")


def _absence(part: str) -> str:
    """What is missing, and why, for a message."""
    return f"{_MODULES[part].partition('.')[0]}, which can't be used here: {_fault(part) or 'set layers to it'}"


@cache
def _fault(part: str) -> str | None:
    """Why a part can't be used on this rank; None: it can."""
    if part not in _MODULES:
        return None
    if not cpu.has_cuda():
        return "there is no GPU"
    try:
        importlib.import_module(_MODULES[part])
    except (ImportError, OSError, RuntimeError) as error:  # absent, or built for another CUDA or torch
        return " ".join(str(error).split())
    return None
