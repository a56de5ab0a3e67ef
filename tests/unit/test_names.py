"""The table of names and shards, against Megatron's layout written out row by row and transformers' own tensors."""

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoModelForCausalLM

from megatron_rl.errors import UserError
from megatron_rl.resharding.names import FAMILIES, Family, Shape, hf_shapes, parameters, stage_of
from megatron_rl.resharding.pieces import pieces, shard_shape
from tests.cases.sharded import megatron_shard, numbered
from tests.tiny import LLAMA, QWEN3, SHAPE, TIED, hf_config

FOUR_GROUPS = Shape(layers=2, hidden=20, heads=12, kv_heads=4, head_dim=6, intermediate=28, vocab=38, tied=True)
LAYOUTS = [
    *itertools.product((SHAPE, TIED, QWEN3, LLAMA), (1, 2)),  # TP 2 goes through the one key head of QWEN3
    *itertools.product((FOUR_GROUPS, replace(FOUR_GROUPS, family="qwen3")), (1, 2, 4)),
    (replace(FOUR_GROUPS, kv_heads=2), 4),
]


def filled(hf: dict[str, Tensor], shape: Shape, rank: int, tp: int) -> dict[tuple[str, int], Tensor]:
    """The shards of a rank, put together from the pieces; what no piece fills stays 0. No row is filled twice."""
    shards = {}
    for entry, layer in parameters(shape):
        shard = torch.zeros(shard_shape(entry, shape, tp), dtype=torch.int64)
        for piece in pieces(entry, layer, shape, rank, tp):
            assert not shard[piece.shard_rows].any()
            shard[piece.shard_rows] = hf[piece.hf][piece.index]
        shards[entry.megatron, layer] = shard
    return shards


@pytest.mark.parametrize(("shape", "tp"), LAYOUTS)
def test_every_shard_is_what_megatron_expects(shape: Shape, tp: int) -> None:
    hf = numbered(shape)
    for rank in range(tp):
        for (name, layer), shard in filled(hf, shape, rank, tp).items():
            assert torch.equal(shard, megatron_shard(name, hf, shape, layer, rank, tp)), (name, layer, rank)


@pytest.mark.parametrize(("shape", "tp"), LAYOUTS)
def test_every_element_lies_on_exactly_one_rank_but_those_that_tp_does_not_split(shape: Shape, tp: int) -> None:
    hf = numbered(shape)
    copies = {name: torch.zeros_like(tensor) for name, tensor in hf.items()}
    for rank, (entry, layer) in itertools.product(range(tp), parameters(shape)):
        for piece in pieces(entry, layer, shape, rank, tp):
            copies[piece.hf][piece.index] += 1
    for name, count in copies.items():
        assert count.eq(tp if "norm" in name else 1).all(), name


@pytest.mark.parametrize(("shape", "tp", "padding"), [(SHAPE, 1, 0), (LLAMA, 2, 1), (QWEN3, 2, 1), (FOUR_GROUPS, 4, 2)])
def test_only_vocabulary_padding_stays_unfilled(shape: Shape, tp: int, padding: int) -> None:
    hf = numbered(shape)
    unfilled: dict[str, int] = {}
    for rank in range(tp):
        for (name, _), shard in filled(hf, shape, rank, tp).items():
            unfilled[name] = unfilled.get(name, 0) + int(shard.eq(0).sum())
    expected = padding * shape.hidden
    assert unfilled.pop("embedding.word_embeddings.weight") == expected
    assert unfilled.pop("output_layer.weight", expected) == expected
    assert not any(unfilled.values())
    assert shape.padded_vocab(tp) == shape.vocab + padding


def test_a_rank_may_hold_nothing_but_vocabulary_padding() -> None:
    small = replace(FOUR_GROUPS, vocab=5)  # two rows a rank: 0 1 | 2 3 | 4 and padding | padding alone
    embedding, _ = next(parameters(small))
    rows = [[list(piece.rows) for piece in pieces(embedding, -1, small, rank, 4)] for rank in range(4)]
    assert rows == [[[0, 1]], [[2, 3]], [[4]], []]
    assert shard_shape(embedding, small, 4) == (2, 20)


@settings(max_examples=40)
@given(
    tp=st.sampled_from([1, 2, 3, 4]),
    groups=st.integers(1, 3),
    sharing=st.integers(1, 4),
    head_dim=st.integers(1, 5),
    wide=st.integers(1, 4),
    vocab=st.integers(1, 19),
    tied=st.booleans(),
    family=st.sampled_from(sorted(FAMILIES)),
)
def test_shards_of_any_model_put_the_checkpoint_back_together(
    tp: int, groups: int, sharing: int, head_dim: int, wide: int, vocab: int, tied: bool, family: Family
) -> None:
    kv_heads = tp * groups
    shape = Shape(
        layers=2, hidden=7, heads=kv_heads * sharing, kv_heads=kv_heads, head_dim=head_dim, intermediate=tp * wide,
        vocab=vocab, tied=tied, family=family,
    )  # fmt: skip
    hf = numbered(shape)
    back = {name: torch.zeros_like(tensor) for name, tensor in hf.items()}
    for rank in range(tp):
        shards = filled(hf, shape, rank, tp)
        for entry, layer in parameters(shape):
            for piece in pieces(entry, layer, shape, rank, tp):
                back[piece.hf][piece.index] = shards[entry.megatron, layer][piece.shard_rows]
    for name, tensor in hf.items():
        assert torch.equal(back[name], tensor), name


@pytest.mark.parametrize("shape", [SHAPE, TIED, FOUR_GROUPS, QWEN3, replace(QWEN3, tied=False), LLAMA])
def test_the_checkpoints_tensors_are_those_of_transformers(shape: Shape) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(hf_config(shape))
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if shape.tied:
        del expected["lm_head.weight"]  # an alias of the embedding
    assert hf_shapes(shape) == expected
    assert set(expected) == {name for name, _ in model.named_parameters()}


@pytest.mark.parametrize("shape", [SHAPE, TIED])
def test_parameters_come_in_the_order_of_the_forward_pass(shape: Shape) -> None:
    order = [(entry.megatron, layer) for entry, layer in parameters(shape)]
    assert order[0] == ("embedding.word_embeddings.weight", -1)
    assert [layer for _, layer in order[1:22]] == [0] * 7 + [1] * 7 + [2] * 7
    tail = [("decoder.final_layernorm.weight", -1), ("output_layer.weight", -1)]
    assert order[22:] == (tail[:1] if shape.tied else tail)
    assert list(hf_shapes(shape))[:2] == ["model.embed_tokens.weight", "model.layers.0.input_layernorm.weight"]


def test_names_under_transformer_engine_differ_where_norms_are_fused_into_the_linear_behind_them() -> None:
    names = {entry.megatron.removeprefix("decoder.layers.{layer}."): entry.te for entry, _ in parameters(SHAPE)}
    fused = {name: te.removeprefix("decoder.layers.{layer}.") for name, te in names.items() if te}
    assert fused == {
        "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
        "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
    }


def test_names_under_transformer_engine_are_those_that_were_recorded() -> None:
    layer = {
        "self_attention.linear_qkv.layer_norm_weight",
        "self_attention.linear_qkv.weight",
        "self_attention.linear_proj.weight",
        "mlp.linear_fc1.layer_norm_weight",
        "mlp.linear_fc1.weight",
        "mlp.linear_fc2.weight",
    }
    recorded = {  # of models in Megatron's format, written by others with its Transformer Engine spec
        "qwen2": layer | {"self_attention.linear_qkv.bias"},
        "qwen3": layer | {"self_attention.q_layernorm.weight", "self_attention.k_layernorm.weight"},
        "llama": layer,
    }
    for shape in (SHAPE, replace(QWEN3, tied=False), LLAMA):
        found = {entry.te or entry.megatron for entry, layer in parameters(shape) if layer in (-1, 0)}
        assert found == {
            "embedding.word_embeddings.weight",
            "decoder.final_layernorm.weight",
            "output_layer.weight",
            *(f"decoder.layers.{{layer}}.{name}" for name in recorded[shape.family]),
        }


@pytest.mark.parametrize(
    ("layers", "stages", "expected"),
    [(3, 1, [0, 0, 0]), (3, 3, [0, 1, 2]), (6, 2, [0, 0, 0, 1, 1, 1]), (6, 3, [0, 0, 1, 1, 2, 2])],
)
@pytest.mark.parametrize("tied", [False, True])
def test_the_stage_of_each_parameter(layers: int, stages: int, expected: list[int], tied: bool) -> None:
    shape = replace(SHAPE, layers=layers, tied=tied)
    found = {(entry.megatron, layer): stage_of(entry, layer, shape, stages) for entry, layer in parameters(shape)}
    assert found.pop(("embedding.word_embeddings.weight", -1)) == 0
    assert found.pop(("decoder.final_layernorm.weight", -1)) == stages - 1
    assert found.pop(("output_layer.weight", -1), stages - 1) == stages - 1
    for (_, layer), stage in found.items():
        assert stage == expected[layer]


@pytest.mark.parametrize(
    ("shape", "tp", "named"),
    [
        (SHAPE, 3, "num_attention_heads (10)"),
        (SHAPE, 5, "num_key_value_heads (2)"),
        (replace(SHAPE, heads=20, kv_heads=10), 5, "intermediate_size (24)"),
        (replace(SHAPE, heads=4, kv_heads=4), 8, "num_attention_heads (4)"),  # only key heads may be shared
    ],
)
def test_a_tensor_parallel_size_that_does_not_divide_is_refused_by_name(shape: Shape, tp: int, named: str) -> None:
    with pytest.raises(UserError, match=r"^trainer\.tensor_parallel_size: ") as caught:
        shape.check_tensor_parallel(tp)
    assert f"{tp} does not divide {named}" in str(caught.value)
    for size in (1, 2):
        shape.check_tensor_parallel(size)


def test_numbers_that_follow_from_the_others() -> None:
    assert (SHAPE.query, SHAPE.key, SHAPE.untied, TIED.untied) == (60, 12, True, False)
