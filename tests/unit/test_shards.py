"""The parameters of a rank's part of a model are found in the table of names, whatever the stage and the layers."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_rl.resharding.names import EMBEDDING, OUTPUT, Shape, parameters, stage_of
from megatron_rl.resharding.shards import named_shards
from tests.tiny import LLAMA, QWEN3, SHAPE, TIED

Place = tuple[str, int]


def stage(shape: Shape, rank: int, ranks: int, *, te: bool, more: tuple[str, ...] = ()) -> tuple[Any, dict[Place, str]]:
    """A pipeline stage as Megatron names its parameters, and the name of each place that it holds."""
    places = [(entry, layer) for entry, layer in parameters(shape) if stage_of(entry, layer, shape, ranks) == rank]
    layers = sorted({layer for _, layer in places if layer >= 0})
    names = {
        (entry.megatron, layer): ((te and entry.te) or entry.megatron).format(layer=layer - layers[0])
        for entry, layer in places
    }
    named = {name: torch.nn.Parameter(torch.zeros(1)) for name in [*reversed(names.values()), *more]}
    blocks = [SimpleNamespace(layer_number=layer + 1) for layer in layers]
    model = SimpleNamespace(decoder=SimpleNamespace(layers=blocks), named_parameters=named.items, named=named)
    return model, names


@pytest.mark.parametrize("te", [False, True])
@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("shape", [SHAPE, TIED, QWEN3, LLAMA])
def test_every_parameter_is_found_once_in_forward_order(shape: Shape, ranks: int, te: bool) -> None:
    found = []
    for rank in range(ranks):
        model, names = stage(shape, rank, ranks, te=te)
        shards = list(named_shards([model], shape))
        for shard in shards:
            assert shard.parameter is model.named[names[shard.entry.megatron, shard.layer]]
        assert len({id(shard.parameter) for shard in shards}) == len(model.named)
        found += [(shard.entry, shard.layer) for shard in shards]
    assert found == list(parameters(shape))


def test_the_last_stages_copy_of_a_tied_embedding_is_the_embedding() -> None:
    model, _ = stage(TIED, 2, 3, te=False, more=(OUTPUT.megatron,))
    last = list(named_shards([model], TIED))[-1]
    assert (last.entry, last.layer) == (EMBEDDING, -1)
    assert last.parameter is model.named[OUTPUT.megatron]


@pytest.mark.parametrize("name", ["decoder.layers.0.self_attention.q_layernorm.weight", "decoder.layers.9.mlp.weight"])
def test_a_parameter_that_the_table_does_not_know_is_an_error(name: str) -> None:
    model, _ = stage(SHAPE, 0, 1, te=False, more=(name,))
    with pytest.raises(KeyError, match=name):
        list(named_shards([model], SHAPE))
