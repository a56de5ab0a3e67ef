"""Process groups and Megatron's parallel state."""

import datetime
import os

import torch
import torch.distributed as dist

from megatron_rl.config import Config
from megatron_rl.errors import UserError
from megatron_rl.resharding.names import Shape
from megatron_rl.training import cpu


def world_size() -> int:
    """Processes that torchrun started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def ranks_per_node() -> int:
    """Processes of each node; all of them where torchrun doesn't say."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", world_size()))


def data_parallel_ranks(world_size: int, *, tensor: int, context: int, pipeline: int) -> list[int]:
    """The data-parallel rank of each rank of the world, in Megatron's order: TP fastest, then CP, DP, PP."""
    data = world_size // (tensor * context * pipeline)
    return [rank // (tensor * context) % data for rank in range(world_size)]


def check_layout(config: Config, shape: Shape, world_size: int) -> None:
    """Refuse a layout that doesn't divide the model or the world, before anything is started.

    Raises:
        UserError: naming the sizes and what to change.
    """
    trainer = config.trainer
    tp, pp, cp = trainer.tensor_parallel_size, trainer.pipeline_parallel_size, trainer.context_parallel_size
    shape.check_tensor_parallel(tp)
    if shape.layers % pp:
        raise UserError(
            f"trainer.pipeline_parallel_size: {pp} does not divide num_hidden_layers ({shape.layers}) of the model"
        )
    if shape.layers % (pp * trainer.pipeline_chunks):
        raise UserError(
            f"trainer.pipeline_chunks: {trainer.pipeline_chunks} chunks in each of {pp} stages don't divide "
            f"num_hidden_layers ({shape.layers}) of the model"
        )
    if world_size % (tp * pp * cp):
        sizes = f"TP {tp} × PP {pp}" + (f" × CP {cp}" if cp > 1 else "")
        raise UserError(
            f"trainer: {sizes} does not divide the number of processes ({world_size}); start a multiple of "
            f"{tp * pp * cp} (torchrun --nproc-per-node, or megatron-rl train --processes)"
        )
    data_parallel = world_size // (tp * pp * cp)
    groups_per_update = config.rollout.prompts_per_step // config.algorithm.updates_per_rollout
    if groups_per_update * config.rollout.responses_per_prompt < data_parallel:
        raise UserError(
            f"rollout.prompts_per_step: {groups_per_update} groups an update can't feed {data_parallel} ranks (DP)"
        )


def start(config: Config) -> None:
    """Join the process group that torchrun describes (or a world of one) and set up Megatron's parallel state."""
    cpu.install()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    if cpu.has_cuda():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    timeout = datetime.timedelta(seconds=config.collective_timeout_s)
    if "RANK" in os.environ:
        dist.init_process_group(cpu.backend(), timeout=timeout)
    else:
        dist.init_process_group(cpu.backend(), store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    interleaved = config.trainer.pipeline_chunks > 1
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=config.trainer.tensor_parallel_size,
        pipeline_model_parallel_size=config.trainer.pipeline_parallel_size,
        virtual_pipeline_model_parallel_size=config.trainer.pipeline_chunks if interleaved else None,
        context_parallel_size=config.trainer.context_parallel_size,
        distributed_timeout_minutes=max(1, config.collective_timeout_s // 60),
    )
    model_parallel_cuda_manual_seed(config.seed)


def stop() -> None:
    """Leave the process groups, when all ranks have come here: rank 0 may write longer than the others."""
    from megatron.core import parallel_state

    dist.barrier()
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
