"""Metrics of micro-batches to those of the whole step, over data-parallel ranks and to every pipeline stage."""

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from torch import Tensor

from megatron_rl.telemetry.metrics import MeanMetrics
from megatron_rl.training import cpu


def reduce_metrics(collected: Iterable[Mapping[str, tuple[Tensor, Tensor]]]) -> MeanMetrics:
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
        names = sorted(totals)  # the same order on every rank
        table = torch.stack([totals[name] for name in names])
        dist.all_reduce(table, group=mpu.get_data_parallel_group(with_context_parallel=True))
        message = [dict(zip(names, map(tuple, table.tolist()), strict=True))]
    if mpu.get_pipeline_model_parallel_world_size() > 1:
        source = mpu.get_pipeline_model_parallel_last_rank()
        dist.broadcast_object_list(
            message, src=source, group=mpu.get_pipeline_model_parallel_group(), device=cpu.device()
        )
    return MeanMetrics(message[0])
