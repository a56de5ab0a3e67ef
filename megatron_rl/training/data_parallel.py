"""Gradients in fp32, summed over data-parallel and context-parallel ranks: plain sums, never averages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.module import Float16Module
from torch import Tensor

from megatron_rl.training.options import TrainerConfig


def wrap(chunks: Sequence[GPTModel], trainer: TrainerConfig) -> list[DistributedDataParallel]:
    """Each chunk of this rank's model with its gradient buffers, and Megatron's schedules told how to reduce them."""
    config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        average_in_collective=False,
        use_distributed_optimizer=trainer.distributed_optimizer,
        overlap_grad_reduce=trainer.overlap_grad_reduce,
    )
    wrapped = [
        DistributedDataParallel(
            chunk.config, config, Float16Module(chunk.config, chunk) if chunk.config.bf16 else chunk
        )
        for chunk in chunks
    ]
    of_schedule = chunks[0].config
    of_schedule.finalize_model_grads_func = _finalize_sums
    if trainer.overlap_grad_reduce:  # in the last micro-batch only
        no_sync = [chunk.no_sync for chunk in wrapped]
        of_schedule.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
    return wrapped


def _finalize_sums(models: list[Any], num_tokens: Tensor | None = None, **kwargs: Any) -> None:
    """Megatron's reductions of the gradient, without its division by the number of tokens."""
    finalize_model_grads(models, None, **kwargs)
