"""Process groups and Megatron's parallel state."""

import datetime
import os
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from megatron_rl.config import Config
from megatron_rl.errors import UserError
from megatron_rl.resharding.names import Shape
from megatron_rl.rollout.groups import EngineGroup
from megatron_rl.training import cpu


def world_size() -> int:
    """Processes that torchrun started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    """Number of this process among them."""
    return int(os.environ.get("RANK", "0"))


def ranks_per_node() -> int:
    """Processes of each node; all of them where torchrun doesn't say."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", world_size()))


def trainers(config: Config) -> int:
    """How many ranks train: the first ones; the others only sample."""
    return world_size() - config.rollout.ranks


def first_that_samples(config: Config) -> int:
    """The first rank that samples: all do, or the last ones."""
    return trainers(config) if config.rollout.placement == "separate" else 0


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
    sampling = config.rollout.ranks
    train = world_size - sampling
    if train < 1:
        raise UserError(f"rollout.ranks: {sampling} of {world_size} processes can't sample while others train")
    if train % (tp * pp * cp):
        sizes = f"TP {tp} × PP {pp}" + (f" × CP {cp}" if cp > 1 else "")
        others = f", beside {sampling} that sample" if sampling else ""
        raise UserError(
            f"trainer: {sizes} does not divide the number of processes ({train}{others}); start a multiple of "
            f"{tp * pp * cp}{others} (torchrun --nproc-per-node, or megatron-rl train --processes)"
        )
    data_parallel = train // (tp * pp * cp)
    groups_per_update = config.rollout.prompts_per_step // config.algorithm.updates_per_rollout
    if groups_per_update * config.rollout.responses_per_prompt < data_parallel:
        raise UserError(
            f"rollout.prompts_per_step: {groups_per_update} groups an update can't feed {data_parallel} ranks (DP)"
        )


@dataclass(frozen=True, kw_only=True)
class Groups:
    """Process groups beside the default one, which on a rank that trains is that of all that do."""

    everyone: dist.ProcessGroup
    """All ranks of the run."""

    store: dist.Store
    """Of all ranks."""

    weights: dist.ProcessGroup | None = None
    """Rank 0, which has the trainer's weights, and the ranks that only sample; on those."""

    engine: dist.ProcessGroup | None = None
    """The ranks that share this rank's engine, when it is not alone with one."""


def start(config: Config, engines: EngineGroup | None = None) -> Groups:
    """Join the process group that torchrun describes (or a world of one); set up Megatron's parallel state on those of
    its ranks that train.

    Args:
        config: of the run.
        engines: which ranks share one.
    """
    cpu.install()
    from megatron.core import parallel_state

    from megatron_rl.training.random_state import seed_all

    if cpu.has_cuda():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    timeout = datetime.timedelta(seconds=config.collective_timeout_s)
    if "RANK" in os.environ:
        dist.init_process_group(cpu.backend(), timeout=timeout)
    else:
        dist.init_process_group(cpu.backend(), store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    store = dist.distributed_c10d._get_default_store()
    everyone, engine = dist.distributed_c10d._get_default_group(), _of_this_engine(engines, timeout)
    groups = Groups(everyone=everyone, store=store, engine=engine)
    if config.rollout.placement == "separate":
        groups = _separate(groups, trainers(config), timeout)
        if dist.get_rank(groups.everyone) >= trainers(config):
            seed_all(config.seed, dist.get_rank(groups.everyone))
            return groups
    interleaved = config.trainer.pipeline_chunks > 1
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=config.trainer.tensor_parallel_size,
        pipeline_model_parallel_size=config.trainer.pipeline_parallel_size,
        virtual_pipeline_model_parallel_size=config.trainer.pipeline_chunks if interleaved else None,
        context_parallel_size=config.trainer.context_parallel_size,
        distributed_timeout_minutes=max(1, config.collective_timeout_s // 60),
    )
    seed_all(config.seed, dist.get_rank(groups.everyone))
    return groups


def _of_this_engine(engines: EngineGroup | None, timeout: datetime.timedelta) -> dist.ProcessGroup | None:
    """Make the groups of all engines on all ranks, before ranks have others: torch names one by how many there are."""
    if engines is None or engines.size == 1:
        return None
    ranks = list(engines.all_ranks())
    of_each = [ranks[start : start + engines.size] for start in range(0, len(ranks), engines.size)]
    mine: dist.ProcessGroup | None = dist.new_subgroups_by_enumeration(of_each, timeout=timeout, backend="gloo")[0]
    return mine


def _separate(groups: Groups, trainers: int, timeout: datetime.timedelta) -> Groups:
    """Make those that train a world of their own: all of Megatron takes the default group for the world."""
    of_trainers = dist.new_group(list(range(trainers)), timeout=timeout)
    weights = dist.new_group([0, *range(trainers, dist.get_world_size())], timeout=timeout)
    rank = dist.get_rank()
    if rank < trainers:
        dist.distributed_c10d._update_default_pg(of_trainers)
    return replace(groups, weights=weights if rank == 0 or rank >= trainers else None)


def stop(groups: Groups | None = None) -> None:
    """Leave the process groups, when all ranks have come here: rank 0 may write longer than the others."""
    from megatron.core import parallel_state

    everyone = groups.everyone if groups else dist.distributed_c10d._get_default_group()
    dist.barrier(everyone)
    if parallel_state.is_initialized():
        parallel_state.destroy_model_parallel()
    dist.distributed_c10d._update_default_pg(everyone)
    dist.destroy_process_group()
