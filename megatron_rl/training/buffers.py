"""How Megatron lays parameters and gradients out in memory, and which part of the optimizer's state a rank has.

A restatement in plain numbers of `_ParamAndGradBuffer` and `DistributedOptimizer` (0.16.1 and 0.19.2, which agree).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_rl.resharding.names import EMBEDDING, PROJECTION, QKV, Entry, Shape, parameters, stage_of
from megatron_rl.resharding.pieces import shard_shape
from megatron_rl.training.options import TrainerConfig

# Elements. Parameters begin at 128 bytes and buckets at 256, of bf16, as cuBLAS likes it.
_PARAMETER_STEP, _BUCKET_STEP = 64, 128


@dataclass(frozen=True, kw_only=True)
class Seat:
    """Where a rank sits in the layout. Tensor-parallel ranks all hold the same number of bytes."""

    stage: int = 0
    """Pipeline stage."""

    replica: int = 0
    """Among the data-parallel and context-parallel ranks, which hold the same parameters: dp_rank · cp + cp_rank."""

    replicas: int = 1
    """How many of them there are: DP · CP."""


@dataclass(frozen=True, kw_only=True)
class Held:
    """A parameter of a rank."""

    entry: Entry
    size: tuple[int, ...]
    """Of this rank's shard."""

    copied: bool
    """The embedding of a tied model, when the first and the last pipeline stage hold one each."""

    @property
    def elements(self) -> int:
        """Of this rank's shard."""
        return math.prod(self.size)


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """A run of parameters in the buffer, in elements; it is reduced as one and split evenly over the replicas."""

    span: range
    """With the padding behind it."""

    members: tuple[tuple[Held, range], ...]
    """Each parameter and where it lies, in the order of the buffer."""

    def share(self, seat: Seat) -> Iterator[tuple[Held, int]]:
        """The parameters in this replica's part of it, and how many of their elements."""
        width = len(self.span) // seat.replicas
        mine = self.span[seat.replica * width : (seat.replica + 1) * width]
        for held, place in self.members:
            elements = min(place.stop, mine.stop) - max(place.start, mine.start)
            if elements > 0:
                yield held, elements


def held_parameters(shape: Shape, trainer: TrainerConfig, stage: int) -> list[list[Held]]:
    """The parameters of each model chunk of a pipeline stage, in the order in which Megatron registers them."""
    stages, chunks = trainer.pipeline_parallel_size, trainer.pipeline_chunks
    copies = shape.tied and stages > 1
    found: list[list[Entry]] = [[] for _ in range(chunks)]
    for entry, layer in parameters(shape):
        if stage_of(entry, layer, shape, stages, chunks) == stage:
            found[_chunk_of(entry, layer, shape, stages, chunks)].append(entry)
    if copies and stage == stages - 1:
        found[-1].append(EMBEDDING)
    return [
        [
            Held(
                entry=entry,
                size=shard_shape(entry, shape, trainer.tensor_parallel_size),
                copied=copies and entry is EMBEDDING,
            )
            for entry in _as_registered(chunk)
        ]
        for chunk in found
    ]


def _chunk_of(entry: Entry, layer: int, shape: Shape, stages: int, chunks: int) -> int:
    if entry.per_layer:
        return layer // (shape.layers // (stages * chunks)) // stages
    return 0 if entry is EMBEDDING else chunks - 1


def _as_registered(forward: Sequence[Entry]) -> list[Entry]:
    """Forward order, but that Megatron's attention makes its output projection before that of its input."""
    entries: list[Entry] = []
    for entry in forward:
        if entry is QKV:
            input_projection = len(entries)
        entries.insert(input_projection if entry is PROJECTION else len(entries), entry)
    return entries


def lay_out(chunk: Sequence[Held], trainer: TrainerConfig, seat: Seat) -> list[Bucket]:
    """The buckets of a chunk's buffer: the last parameter first, as backward goes.

    A copied embedding has a bucket of its own, so that both stages split it alike. Without the distributed optimizer
    there is no padding, and no reason to ask for buckets.
    """
    limit = None
    if trainer.overlap_grad_reduce and seat.stage == 0:  # later stages have nothing to wait for
        limit = max(40_000_000, 1_000_000 * (seat.replicas // trainer.context_parallel_size))
    padded = trainer.distributed_optimizer
    buckets: list[Bucket] = []
    members: list[tuple[Held, range]] = []
    start = at = 0

    def close() -> None:
        nonlocal start, at, members
        at = _up(at, math.lcm(seat.replicas, _BUCKET_STEP)) if padded else at
        buckets.append(Bucket(span=range(start, at), members=tuple(members)))
        start, members = at, []

    for held in reversed(chunk):
        at = _up(at, _PARAMETER_STEP) if padded else at
        alone = held.copied and padded
        if alone and members:
            close()
        members.append((held, range(at, at + held.elements)))
        at += held.elements
        if alone or (limit is not None and at - start >= limit):
            close()
    if members:
        close()
    return buckets


def _up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
