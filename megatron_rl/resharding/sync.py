"""The trainer's weights to an engine: the one call that the loop knows."""

from collections.abc import Collection

from megatron.core.models.gpt import GPTModel

from megatron_rl.resharding.gather import gather_hf
from megatron_rl.resharding.names import Shape
from megatron_rl.rollout.engine import Engine


def push_weights(chunks: Collection[GPTModel], shape: Shape, engine: Engine, version: int) -> None:
    """Bring the current weights to the engine of this rank. A collective: every rank calls it in the same step.

    Args:
        chunks: of the model, that this rank holds.
        shape: of the whole model.
        engine: the engine that this rank leads.
        version: optimizer steps behind the weights.
    """
    engine.update_weights(gather_hf(chunks, shape), version)
