"""The formula for every byte in every layout: what each rank measures, and what the formula says of it."""

from collections.abc import Callable
from itertools import product

from megatron.core import parallel_state as mpu

from megatron_rl.config import Config
from megatron_rl.training.buffers import Seat, held_parameters
from megatron_rl.training.hf_config import read_model_spec
from megatron_rl.training.memory import memory
from megatron_rl.training.trainer import Trainer
from megatron_rl.types import TrainedResponse
from tests.cases.responses import trained_response
from tests.distributed.data import VOCABULARY
from tests.measure import kept_for_backward, state_bytes

Bytes = dict[str, int]


def compare(config_of: Callable[..., Config]) -> dict[str, tuple[Bytes, Bytes]]:
    """(measured, computed) by kind of trainer."""
    found = {}
    for dtype, sharded in product(("float32", "bfloat16"), (False, True)):
        config = config_of(dtype=dtype, distributed_optimizer=sharded, micro_batch_size=4)
        trainer = Trainer(config, read_model_spec(config.model.path), VOCABULARY)
        share = trainer.share([response(number) for number in range(4 * mpu.get_data_parallel_world_size())])
        with kept_for_backward(trainer) as kept:
            trainer.gradients(share)
        measured = {**state_bytes(trainer), "activations": sum(kept.values())}
        replicas = mpu.get_data_parallel_group(with_context_parallel=True)
        seat = Seat(stage=mpu.get_pipeline_model_parallel_rank(), replica=replicas.rank(), replicas=replicas.size())
        registered = [[tuple(one.shape) for one in chunk.parameters()] for chunk in trainer.model]
        held = held_parameters(trainer.spec.shape, config.trainer, seat.stage)
        assert registered == [[one.size for one in chunk] for chunk in held]
        computed = memory(trainer.spec.shape, config.trainer, seat, lengths=share[0].lengths)
        found[f"{dtype}, {sharded}"] = (measured, {name: getattr(computed, name) for name in measured})
    return found


def response(number: int) -> TrainedResponse:
    """16 tokens that are fed in, so that nothing is padded in any layout."""
    return trained_response(
        prompt_ids=(3, 4, 5),
        response_ids=(6,) * 14,
        rollout_logprobs=(-1.0,) * 14,
        advantage=1.0,
        weight=0.1,
        group=0,
        number=number,
    )
