"""Which GPU holds which part of the model: a trainer's layout, or that of all engines."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate

from megatron_rl.resharding.names import EMBEDDING, Entry, Shape, parameters, stage_of
from megatron_rl.resharding.pieces import Side


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A side's parallel sizes and the GPU of each of its places, which are counted as Megatron does: TP fastest, then
    CP, DP, PP."""

    side: Side
    """Whose names and fusions: `hf` also stands for the embedded engine, which holds whole HF tensors."""

    shape: Shape
    """Of the model; engines may have fewer ids in their vocabulary than the trainer."""

    tensor: int = 1
    context: int = 1
    data: int = 1
    """Copies of the model: of engines, how many there are."""

    pipeline: int = 1
    chunks: int = 1
    """Of layers on each stage, under the interleaved schedule."""

    stage_layers: tuple[int, ...] = ()
    """Layers of each chunk of each stage in forward order; empty: all the same number."""

    gpus: tuple[int, ...] = ()
    """The rank, counted over all nodes, of each place; empty: they are numbered alike."""

    _starts: tuple[int, ...] = field(init=False, repr=False, default=())

    def __post_init__(self) -> None:
        """Check that the sizes fit together.

        Raises:
            ValueError: they don't.
        """
        stages = self.pipeline * self.chunks
        if self.stage_layers and (len(self.stage_layers), sum(self.stage_layers)) != (stages, self.shape.layers):
            raise ValueError(f"layers {self.stage_layers} of {stages} stages are not the model's {self.shape.layers}")
        if not self.stage_layers and self.shape.layers % stages:
            raise ValueError(f"{stages} stages don't divide {self.shape.layers} layers")
        if self.gpus and len(self.gpus) != self.size:
            raise ValueError(f"{len(self.gpus)} GPUs for {self.size} places")
        object.__setattr__(self, "_starts", tuple(accumulate(self.stage_layers)))

    @property
    def size(self) -> int:
        """GPUs in all."""
        return self.tensor * self.context * self.data * self.pipeline

    def holders(self, stages: Iterable[int], tp_rank: int) -> Iterator[int]:
        """The GPUs that hold a TP rank's part of some stages: all copies over CP and DP."""
        copies = self.context * self.data
        for stage in stages:
            for copy in range(copies):
                place = tp_rank + self.tensor * (copy + copies * stage)
                yield self.gpus[place] if self.gpus else place

    def stages_of(self, entry: Entry, layer: int) -> tuple[int, ...]:
        """The pipeline stages that hold a parameter: one, or, for a tied embedding, the first and the last."""
        if entry == EMBEDDING and self.shape.tied and self.side == "megatron":
            return tuple(sorted({0, self.pipeline - 1}))
        if entry.per_layer and self.stage_layers:
            return (next(i for i, end in enumerate(self._starts) if layer < end) % self.pipeline,)
        return (stage_of(entry, layer, self.shape, self.pipeline, self.chunks),)

    def interleaved(self) -> list[tuple[Entry, int]]:
        """All parameters: the first ones of every stage, then the second ones, ..., so that all stages send at once."""
        seen = [0] * self.pipeline
        order = []
        for entry, layer in parameters(self.shape):
            stage = self.stages_of(entry, layer)[0]
            order.append((seen[stage], stage, entry, layer))
            seen[stage] += 1
        return [(entry, layer) for _, _, entry, layer in sorted(order, key=lambda one: one[:2])]
