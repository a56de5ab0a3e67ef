"""The parameters of a Megatron model, each with its line in the table of names."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from megatron.core.models.gpt import GPTModel

from megatron_rl.resharding.names import EMBEDDING, OUTPUT, Entry, Shape, parameters


@dataclass(frozen=True)
class NamedShard:
    """A parameter of this rank with its line in the table."""

    entry: Entry
    layer: int
    parameter: torch.nn.Parameter


def named_shards(chunks: Iterable[GPTModel], shape: Shape) -> Iterator[NamedShard]:
    """Every parameter of this rank's chunks of the model, in forward order.

    Raises:
        KeyError: the model has a parameter that the table doesn't know.
    """
    for chunk in chunks:
        yield from _of_chunk(chunk, shape)


def _of_chunk(model: GPTModel, shape: Shape) -> Iterator[NamedShard]:
    unnamed = dict(model.named_parameters())
    first = model.decoder.layers[0].layer_number - 1 if len(model.decoder.layers) else 0
    for entry, layer in parameters(shape):
        for name in (entry.megatron, entry.te):
            parameter = unnamed.pop(name.format(layer=layer - first), None) if name else None
            if parameter is not None:
                yield NamedShard(entry, layer, parameter)
    copy = unnamed.pop(OUTPUT.megatron, None) if shape.tied else None  # the last stage's copy of the embedding
    if copy is not None:
        yield NamedShard(EMBEDDING, -1, copy)
    if unnamed:
        raise KeyError(f"not in the table of names: {', '.join(unnamed)}")
