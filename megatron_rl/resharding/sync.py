"""The trainer's weights to an engine: the one call that the loop knows."""

from collections.abc import Collection, Iterator

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel

from megatron_rl.resharding.gather import gather_hf
from megatron_rl.resharding.names import Shape, hf_shapes
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


def send_weights(chunks: Collection[GPTModel], shape: Shape, to: dist.ProcessGroup | None) -> None:
    """Bring the current weights to ranks that only sample. A collective with `receive_weights` there.

    Args:
        chunks: of the model, that this rank holds.
        shape: of the whole model.
        to: rank 0 and those ranks; None: this rank is another one.
    """
    for _, tensor in gather_hf(chunks, shape):
        if to is not None:
            dist.broadcast(tensor, src=0, group=to)


def receive_weights(
    engine: Engine, shape: Shape, version: int, group: dist.ProcessGroup, *, dtype: torch.dtype, device: torch.device
) -> None:
    """Take what `send_weights` sends, one whole tensor after another, into the engine of this rank.

    Args:
        engine: it.
        shape: of the whole model.
        version: optimizer steps behind the weights.
        group: rank 0 and the ranks that only sample.
        dtype: of the weights.
        device: of this rank.
    """

    def received() -> Iterator[tuple[str, torch.Tensor]]:
        for name, size in hf_shapes(shape).items():
            tensor = torch.empty(size, dtype=dtype, device=device)
            dist.broadcast(tensor, src=0, group=group)
            yield name, tensor

    engine.update_weights(received(), version)
