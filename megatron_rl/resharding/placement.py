"""Which GPUs an engine takes: it decides how much of its part of the model is on them already."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from megatron_rl.resharding.layout import Layout
from megatron_rl.resharding.pieces import Side
from megatron_rl.resharding.plan import plan
from megatron_rl.rollout.groups import EngineGroup

Placement = Literal["consecutive", "aligned"]


def engine_gpus(tensor: int, gpus: int, *, step: int = 1, first: int = 0) -> tuple[int, ...]:
    """The GPUs of engines of `tensor` GPUs each, engine after engine (see `EngineGroup`).

    Args:
        tensor: GPUs of an engine.
        gpus: in all; a multiple of `tensor * step`.
        step: from each GPU of an engine to its next.
        first: GPUs before it belong to no engine.
    """
    return tuple(EngineGroup(rank=first, size=tensor, world=first + gpus, first=first, step=step).all_ranks())


def aligned_step(source: Layout, tensor: int, *, gpus_per_node: int) -> int:
    """The step of the engines' GPUs with which the most of their bytes are on their GPUs already; of equals the
    smallest.

    Args:
        source: the trainer, on the same GPUs.
        tensor: GPUs of an engine.
        gpus_per_node: an engine never lies across nodes.
    """
    stages = source.pipeline * source.chunks
    # Layers are all alike: one on each stage tells how the steps compare.
    small = replace(source, shape=replace(source.shape, layers=stages), stage_layers=())
    node = min(gpus_per_node, source.size)
    steps = [step for step in range(1, node // tensor + 1) if node % (tensor * step) == 0]

    def local(step: int) -> int:
        target = engines_on(small, tensor, step=step)
        planned = plan(small, target, gpus_per_node=gpus_per_node)
        return int(planned.total(planned.receiver, planned.local).sum())

    return max(steps, key=lambda step: (local(step), -step))


def engines_on(source: Layout, tensor: int, *, step: int, vocab: int | None = None, side: Side = "sglang") -> Layout:
    """The layout of engines on the trainer's GPUs.

    Args:
        source: the trainer.
        tensor: GPUs of an engine.
        step: of an engine's GPUs.
        vocab: ids that an engine can sample; None: all.
        side: whose parameters they have.
    """
    shape = source.shape if vocab is None else replace(source.shape, vocab=vocab)
    gpus = engine_gpus(tensor, source.size, step=step)
    return Layout(side=side, shape=shape, tensor=tensor, data=source.size // tensor, gpus=gpus)
