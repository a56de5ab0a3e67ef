"""The trainer's weights to an engine: the one call that the loop knows."""

from megatron.core.models.gpt import GPTModel

from megatron_rl.resharding.gather import gather_hf
from megatron_rl.resharding.names import Shape
from megatron_rl.rollout.engine import Engine


def push_weights(model: GPTModel, shape: Shape, engine: Engine, version: int) -> None:
    """Bring the current weights to the engine of this rank. A collective: every rank calls it in the same step.

    Args:
        model: this rank's part of the policy.
        shape: of the whole model.
        engine: the engine that this rank leads.
        version: optimizer steps behind the weights.
    """
    engine.update_weights(gather_hf(model, shape), version)
