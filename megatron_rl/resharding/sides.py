"""The two sides of a run: the layout of its trainer, and which ranks share an engine."""

from __future__ import annotations

from megatron_rl.config import Config
from megatron_rl.errors import UserError
from megatron_rl.resharding.layout import Layout
from megatron_rl.resharding.names import Shape
from megatron_rl.resharding.placement import aligned_step
from megatron_rl.rollout.groups import EngineGroup
from megatron_rl.training import cpu, setup


def trainer_layout(config: Config, shape: Shape, ranks: int) -> Layout:
    """Of the ranks that train, which are the first ones of a run.

    Args:
        config: of the run.
        shape: of the model.
        ranks: how many train.
    """
    trainer = config.trainer
    model = trainer.tensor_parallel_size * trainer.pipeline_parallel_size * trainer.context_parallel_size
    return Layout(
        side="megatron",
        shape=shape,
        tensor=trainer.tensor_parallel_size,
        pipeline=trainer.pipeline_parallel_size,
        context=trainer.context_parallel_size,
        data=ranks // model,
        chunks=trainer.pipeline_chunks,
    )


def check_engine(config: Config, shape: Shape) -> None:
    """Refuse engines whose parameters a model can't be split into.

    Args:
        config: of the run.
        shape: of the model.

    Raises:
        UserError: naming the number that is not divisible.
    """
    size = config.rollout.tensor_parallel_size
    shape.check_tensor_parallel(size, "rollout.tensor_parallel_size")
    if config.rollout.engine == "embedded" or config.reshard.method == "gather" or cpu.has_cuda():
        return
    for what, count, unit in cpu.sglang_units(shape.intermediate, shape.kv_heads, size):
        if count % unit:
            raise UserError(
                f"reshard.method: on a CPU SGLang pads {what} ({count}) to a multiple of {unit}, which the plan "
                "doesn't know; set it to gather"
            )


def engine_group(config: Config, shape: Shape) -> EngineGroup:
    """The engine of this process. Before the process group is joined.

    Args:
        config: of the run.
        shape: of the model.
    """
    size, first, step = config.rollout.tensor_parallel_size, setup.first_that_samples(config), 1
    if size > 1 and first == 0 and config.reshard.placement == "aligned" and config.reshard.method == "plan":
        trainers = trainer_layout(config, shape, setup.trainers(config))
        step = aligned_step(trainers, size, gpus_per_node=setup.ranks_per_node())
    return EngineGroup(rank=setup.rank(), size=size, world=setup.world_size(), first=first, step=step)
