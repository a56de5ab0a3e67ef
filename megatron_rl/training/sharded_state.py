"""What each rank writes of weights and optimizer state into a checkpoint, and reads back: rectangles of tensors.

Every byte is written by one rank and nothing is gathered. Of weights, which data-parallel ranks have alike, each writes
some; of the distributed optimizer's state each writes what it has. A run of elements of a matrix is at most three
rectangles, and any layout finds its own among those of any other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from megatron.core import parallel_state as mpu
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from megatron_rl.resharding.torch_dist import Chunk, ChunkReader
from megatron_rl.training.optimizer import held_state, set_adam_steps
from megatron_rl.training.trainer import Trainer

STATE = "optimizer.state"


@dataclass(frozen=True)
class Held:
    """A rectangle that this rank has."""

    chunk: Chunk
    tensor: Tensor
    """The trainer's own memory, contiguous."""

    ours: bool
    """Whether this rank writes it: others may have the same."""


@dataclass(frozen=True)
class _Place:
    """Where a part of a parameter lies in a tensor of the checkpoint."""

    key: str
    offset: tuple[int, ...]
    leading: int
    """Dimensions of the tensor in front of the part's own: layers are stacked."""

    whole: tuple[int, ...]
    start: int
    """Of its first element in the flattened parameter."""

    size: tuple[int, ...]
    first_copy: bool
    """Whether ranks that differ in more than the data-parallel rank leave it to this one."""

    @property
    def stop(self) -> int:
        return self.start + torch.Size(self.size).numel()


def held(trainer: Trainer) -> Iterator[Held]:
    """All that the trainer's checkpoint holds of this rank."""
    vocab = trainer.spec.shape.vocab
    places = {id(parameter): found for chunk in trainer.model for parameter, found in _places(chunk, vocab)}
    parameters = [parameter for chunk in trainer.model for parameter in chunk.parameters()]
    mine = {id(parameter) for parameter in _share_of(parameters)}
    for parameter in parameters:
        flat, ours = parameter.data.view(-1), id(parameter) in mine
        yield from _rectangles(places[id(parameter)], flat, 0, prefix="", ours=ours)
    for state in held_state(trainer.optimizer):
        ours = not state.shared or id(state.parameter) in mine
        for name, flat in state.tensors.items():
            prefix = f"{STATE}.{name}."
            yield from _rectangles(places[id(state.parameter)], flat, state.start, prefix=prefix, ours=ours)


def load(trainer: Trainer, reader: ChunkReader, updates: int) -> None:
    """Fill the trainer from a checkpoint of any layout; it goes on after so many optimizer steps.

    Raises:
        UserError: something is missing, or damaged.
    """
    for one in held(trainer):
        reader.read(one.chunk.key, one.chunk.offset, one.tensor)
    set_adam_steps(trainer.optimizer, updates)
    trainer.updates_done = updates


def _places(chunk: GPTModel, vocab: int) -> Iterator[tuple[torch.nn.Parameter, list[_Place]]]:
    """Where Megatron says that each parameter belongs, in parts where it is fused of several."""
    metadata = {"dp_cp_group": mpu.get_data_parallel_group(with_context_parallel=True)}
    for found in nested_values(chunk.sharded_state_dict(metadata=metadata)):
        if isinstance(found, ShardedTensorFactory):
            yield found.data, [_place(part, found.data, vocab) for part in nested_values(found.build())]
        elif isinstance(found, ShardedTensor):  # Transformer Engine adds objects, which hold nothing here
            yield found.data, [_place(found, found.data, vocab)]


def _place(part: ShardedTensor, parameter: Tensor, vocab: int) -> _Place:
    begins = part.data.data_ptr() - parameter.data_ptr()
    if not part.data.is_contiguous():
        raise RuntimeError(f"{part.key}: a part of the parameter that does not lie in one piece")
    size, whole = tuple(part.data.shape), tuple(part.global_shape)
    if part.allow_shape_mismatch:  # rows of the vocabulary: how far it is padded depends on the layout, so that goes
        size = (max(0, min(size[0], vocab - part.global_offset[0])), *size[1:])
        whole = (vocab, *whole[1:])
    return _Place(
        key=part.key,
        offset=tuple(part.global_offset),
        leading=part.prepend_axis_num,
        whole=whole,
        start=begins // parameter.element_size(),
        size=size,
        first_copy=not any(part.replica_id[:-1]),
    )


def _share_of(parameters: Sequence[torch.nn.Parameter]) -> Iterator[torch.nn.Parameter]:
    """Those that this one of the data-parallel ranks writes: each goes to the rank that has least."""
    ranks = mpu.get_data_parallel_world_size(with_context_parallel=True)
    rank = mpu.get_data_parallel_rank(with_context_parallel=True)
    given = [0] * ranks
    for parameter in sorted(parameters, key=lambda one: -one.numel()):
        least = given.index(min(given))
        given[least] += parameter.numel()
        if least == rank:
            yield parameter


def _rectangles(places: Sequence[_Place], flat: Tensor, start: int, *, prefix: str, ours: bool) -> Iterator[Held]:
    """What a run of elements of a parameter, from `start` on, fills of the tensors that the parameter lies in."""
    for place in places:
        low, high = max(start, place.start), min(start + flat.numel(), place.stop)
        for begin, offset, size in cut(low - place.start, high - place.start, place.size):
            at = place.start + begin - start
            front, behind = place.offset[: place.leading], place.offset[place.leading :]
            chunk = Chunk(
                key=prefix + place.key,
                offset=(*front, *(a + b for a, b in zip(behind, offset, strict=True))),
                size=(1,) * place.leading + size,
                whole=place.whole,
                dtype=flat.dtype,
            )
            tensor = flat[at : at + torch.Size(size).numel()].view(chunk.size)
            yield Held(chunk, tensor, ours=ours and place.first_copy)


def cut(start: int, stop: int, size: tuple[int, ...]) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """The elements from `start` to `stop` of a flattened vector or matrix, as rectangles of it.

    Yields:
        The first element of each, its offset and its size.
    """
    if stop <= start:
        return
    if len(size) == 1:
        yield start, (start,), (stop - start,)
        return
    columns = size[1]
    while start < stop:
        row, column = divmod(start, columns)
        rows = 1 if column else (stop - start) // columns
        width = columns if rows and not column else min(stop - start, columns - column)
        yield start, (row, column), (max(rows, 1), width)
        start += max(rows, 1) * width


def own_chunks(trainer: Trainer) -> dict[Chunk, Tensor]:
    """What this rank writes, with its data, which the next optimizer step changes."""
    return {one.chunk: one.tensor for one in held(trainer) if one.ours}
