"""Metrics as (sum, weight), so that they add up exactly over micro-batches, ranks and updates."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from torch import Tensor

from megatron_rl.training import cpu


class MeanMetrics:
    """Named weighted means that are still sums."""

    def __init__(self, pairs: Mapping[str, tuple[float, float]] | None = None) -> None:
        self.pairs: dict[str, tuple[float, float]] = dict(pairs or {})

    def add(self, name: str, total: float, weight: float = 1.0) -> None:
        """Add `total`, a sum over `weight` things."""
        old = self.pairs.get(name, (0.0, 0.0))
        self.pairs[name] = (old[0] + total, old[1] + weight)

    def merge(self, other: MeanMetrics | Mapping[str, tuple[float, float]]) -> None:
        """Add everything of another, or of plain (sum, weight) pairs."""
        for name, (total, weight) in (other.pairs if isinstance(other, MeanMetrics) else other).items():
            self.add(name, total, weight)

    def values(self) -> dict[str, float]:
        """Name to mean; a metric of nothing is left out."""
        return {name: total / weight for name, (total, weight) in self.pairs.items() if weight}

    @classmethod
    def reduced(cls, collected: Iterable[Mapping[str, tuple[Tensor, Tensor]]]) -> MeanMetrics:
        """Sum what the last pipeline stage collected, over micro-batches and data-parallel ranks. A collective.

        Args:
            collected: a mapping for each micro-batch, all with the same names; empty on other stages.

        Returns:
            The same on every rank.
        """
        totals: dict[str, Tensor] = {}
        for metrics in collected:
            for name, (total, weight) in metrics.items():
                pair = torch.stack((total.detach().double(), weight.detach().double().to(total.device)))
                totals[name] = totals[name] + pair if name in totals else pair
        message: list[dict[str, tuple[float, float]] | None] = [None]
        if mpu.is_pipeline_last_stage():
            table = torch.stack(list(totals.values()))
            dist.all_reduce(table, group=mpu.get_data_parallel_group(with_context_parallel=True))
            message = [dict(zip(totals, map(tuple, table.tolist()), strict=True))]
        if mpu.get_pipeline_model_parallel_world_size() > 1:
            source = mpu.get_pipeline_model_parallel_last_rank()
            dist.broadcast_object_list(
                message, src=source, group=mpu.get_pipeline_model_parallel_group(), device=cpu.device()
            )
        return cls(message[0])
