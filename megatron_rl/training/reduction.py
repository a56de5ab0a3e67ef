"""Metrics of micro-batches to those of the whole step, over data-parallel ranks and to every pipeline stage."""

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from torch import Tensor

from megatron_rl.telemetry.metrics import MeanMetrics
from megatron_rl.training import cpu

T = TypeVar("T")


def reduce_metrics(collected: Iterable[Mapping[str, tuple[Tensor, Tensor]]]) -> MeanMetrics:
    """Sum what the last pipeline stage collected, over micro-batches and data-parallel ranks. A collective.

    Args:
        collected: a mapping for each micro-batch; empty on other stages. Names may differ: each has its own weight.

    Returns:
        The same on every rank.
    """
    totals: dict[str, Tensor] = {}
    for of_micro_batch in collected:
        for name, (total, weight) in of_micro_batch.items():
            pair = torch.stack((total.detach().double(), weight.detach().double().to(total.device)))
            totals[name] = totals[name] + pair if name in totals else pair
    table = torch.stack(list(totals.values())).tolist() if totals else []  # one copy from the device
    metrics = MeanMetrics(dict(zip(totals, map(tuple, table), strict=True)))
    reduced = MeanMetrics()
    for share in from_last_stage(metrics.pairs):
        reduced.merge(share)
    return reduced


def from_last_stage(value: T) -> list[T]:
    """What each data-parallel rank of the last pipeline stage has, on every rank. A collective."""
    values = [value]
    if mpu.is_pipeline_last_stage():
        group = mpu.get_data_parallel_group(with_context_parallel=True)
        values = [value] * group.size()
        dist.all_gather_object(values, value, group=group)
    if mpu.get_pipeline_model_parallel_world_size() > 1:
        message = [values]
        dist.broadcast_object_list(
            message,
            src=mpu.get_pipeline_model_parallel_last_rank(),
            group=mpu.get_pipeline_model_parallel_group(),
            device=cpu.device(),
        )
        values = message[0]
    return values


def sum_over(values: Tensor, *, group: dist.ProcessGroup) -> Tensor:
    """The sum of all ranks' values, on each of them; their losses all depend on it, so gradients are summed too."""
    return values if group.size() == 1 else _SumOver.apply(values, group)


class _SumOver(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _SumOver.summed(values, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _SumOver.summed(grad, ctx.group), None

    @staticmethod
    def summed(values: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = values.contiguous().clone()
        dist.all_reduce(total, group=group)
        return total
