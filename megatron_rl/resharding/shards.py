"""The parameters of a Megatron model, each with its line in the table of names."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from megatron.core.models.gpt import GPTModel

from megatron_rl.resharding.names import Entry, Shape, entries


@dataclass(frozen=True)
class NamedShard:
    """A parameter of this rank with its line in the table."""

    entry: Entry
    layer: int
    parameter: torch.nn.Parameter


def named_shards(model: GPTModel, shape: Shape) -> Iterator[NamedShard]:
    """Every parameter of this rank, in the order of `names.parameters`.

    Raises:
        KeyError: the model has a parameter that the table doesn't know.
    """
    table = {name: entry for entry in entries(shape) for name in (entry.megatron, entry.te) if name}
    if shape.tied:  # with PP, the last stage keeps a copy of the embedding under this name
        table["output_layer.weight"] = table["embedding.word_embeddings.weight"]
    offset = model.decoder.layers[0].layer_number - 1 if len(model.decoder.layers) else 0
    for name, parameter in model.named_parameters():
        generic, layer = name, -1
        if name.startswith("decoder.layers."):
            number, rest = name.removeprefix("decoder.layers.").split(".", 1)
            generic, layer = "decoder.layers.{layer}." + rest, int(number) + offset
        yield NamedShard(table[generic], layer, parameter)
