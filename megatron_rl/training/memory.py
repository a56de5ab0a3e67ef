"""The trainer's bytes on one rank, from the model's shape and the options alone: nothing is built, nobody is asked.

Parameters, gradients and optimizer state are exact in every layout. Activations are what the local layers keep, and
what backward takes beside them is an estimate of its largest moment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_rl.resharding.names import Shape
from megatron_rl.training.activations import (
    DTYPE_BYTES,
    FLOAT32,
    Sizes,
    ends_bytes,
    in_flight,
    layer_backward_bytes,
    layer_bytes,
    logits_bytes,
)
from megatron_rl.training.buffers import Bucket, Seat, held_parameters, lay_out
from megatron_rl.training.options import Adam, TrainerConfig

GB = 1e9
_MOMENTS = 2 * FLOAT32  # of Adam, of each parameter


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of one rank's trainer."""

    parameters: int
    """With the padding of the distributed optimizer's buffers."""

    gradients: int
    """fp32."""

    optimizer: int
    """Adam's moments and step counts, and fp32 parameters where the model's are in bf16: this replica's share."""

    optimizer_on_host: int
    """The same where `memory.optimizer_on_host` keeps it, with a copy of the gradients."""

    activations: int
    """Kept from forward to backward, of all micro-batches in flight."""

    backward: int
    """The most that backward takes beside them: logits on the last pipeline stage, a layer's gradients elsewhere."""

    asleep: int
    """On the device while engines sample."""

    arena: int
    """In host memory, for the whole run, to sleep in."""

    @property
    def training(self) -> int:
        """On the device, at the worst moment of an optimizer step."""
        return self.parameters + self.gradients + self.optimizer + self.activations + self.backward

    @property
    def host(self) -> int:
        """In host memory."""
        return self.arena + self.optimizer_on_host

    def table(self) -> str:
        """A Markdown table in GB (1e9 bytes)."""
        rows = {
            "parameters": self.parameters,
            "gradients": self.gradients,
            "optimizer": self.optimizer,
            "activations": self.activations,
            "logits or gradients in backward": self.backward,
            "**device, training**": self.training,
            "**device, asleep**": self.asleep,
            "**host**": self.host,
        }
        lines = [f"| {name} | {size / GB:.2f} |" for name, size in rows.items()]
        return "\n".join(["| part | GB |", "|---|---:|", *lines])


def memory(
    shape: Shape,
    trainer: TrainerConfig,
    seat: Seat,
    *,
    lengths: Sequence[int],
    micro_batches: int = 1,
    adam: Adam = "torch",
    on_cpu: bool = False,
) -> Memory:
    """The bytes of one rank.

    Args:
        shape: of the model.
        trainer: the layout, precision and what is computed again.
        seat: the rank's; TP ranks are all alike.
        lengths: padded lengths of the responses of the largest micro-batch, prompts included, in tokens.
        micro_batches: of an optimizer step, on this rank.
        adam: torch's keeps a step count for each parameter.
        on_cpu: torch computes there, which takes more for some sums.
    """
    held = held_parameters(shape, trainer, seat.stage)
    buckets = [bucket for chunk in held for bucket in lay_out(chunk, trainer, seat)]
    elements = sum(len(bucket.span) for bucket in buckets)
    on_device, on_host = _optimizer(buckets, trainer, seat, step=FLOAT32 if adam == "torch" else 0)
    sizes = Sizes.of(shape, trainer, lengths)
    parameters, gradients = elements * sizes.number, elements * FLOAT32
    first, last = seat.stage == 0, seat.stage == trainer.pipeline_parallel_size - 1
    layers = shape.layers // trainer.pipeline_parallel_size // trainer.pipeline_chunks
    of_chunk = layers * layer_bytes(shape, trainer, sizes) + ends_bytes(shape, trainer, sizes, first=first, last=last)
    backward = layer_backward_bytes(shape, trainer, sizes, [one for chunk in held for one in chunk], on_cpu=on_cpu)
    offload = trainer.memory.offload_while_sampling
    return Memory(
        parameters=parameters,
        gradients=gradients,
        optimizer=on_device,
        optimizer_on_host=on_host,
        activations=of_chunk * in_flight(trainer, seat, micro_batches),
        backward=max(backward, logits_bytes(shape, trainer, sizes, on_cpu=on_cpu) if last else 0),
        asleep=0 if offload else parameters + gradients + on_device,
        arena=parameters + on_device if offload else 0,
    )


def _optimizer(buckets: Sequence[Bucket], trainer: TrainerConfig, seat: Seat, step: int) -> tuple[int, int]:
    """Bytes on the device and on the host."""
    shares = [
        elements
        for bucket in buckets
        for elements in (
            (elements for _, elements in bucket.share(seat))
            if trainer.distributed_optimizer
            else (held.elements for held, _ in bucket.members)
        )
    ]
    counts = step * len(shares)
    if trainer.memory.optimizer_on_host:  # with fp32 parameters, and gradients to step with
        return 0, sum(shares) * (FLOAT32 + FLOAT32 + _MOMENTS) + counts
    fp32_copy = FLOAT32 if DTYPE_BYTES[trainer.dtype] < FLOAT32 else 0
    return sum(shares) * (fp32_copy + _MOMENTS) + counts, 0
