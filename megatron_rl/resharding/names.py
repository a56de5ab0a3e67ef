"""The table of names and shards: how Hugging Face tensors lie in Megatron's parameters, once per model family.

A Megatron parameter holds one or several HF tensors, fused along their first dimension. The rank `tp_rank` of `tp_size`
holds a part of it, and each part is a concatenation, in order, of rectangular *pieces* of HF tensors. `pieces()` lists
them; HF import reads them, HF export and live resharding put them back. There is no second table.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from megatron_rl.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The numbers of a model that decide the shapes of its tensors."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    """Rows of the embedding in the HF checkpoint."""

    tied: bool
    """The output projection is the embedding."""

    @property
    def query(self) -> int:
        """Rows of the query projection."""
        return self.heads * self.head_dim

    @property
    def key(self) -> int:
        """Rows of the key projection, and of the value projection."""
        return self.kv_heads * self.head_dim

    @property
    def untied(self) -> bool:
        """The output projection is a tensor of its own."""
        return not self.tied

    def check_tensor_parallel(self, size: int) -> None:
        """Refuse a TP size that doesn't divide what is split.

        Raises:
            UserError: naming the number that isn't divisible.
        """
        for what, count in (
            ("num_attention_heads", self.heads),
            ("num_key_value_heads", self.kv_heads),
            ("intermediate_size", self.intermediate),
        ):
            if count % size:
                raise UserError(
                    f"trainer.tensor_parallel_size: {size} does not divide {what} ({count}) of the model; "
                    f"choose a divisor of {count}"
                )

    def padded_vocab(self, tp_size: int) -> int:
        """Rows of Megatron's embedding: the vocabulary rounded up so that every TP rank holds the same number."""
        return -(-self.vocab // tp_size) * tp_size


@dataclass(frozen=True, kw_only=True)
class Piece:
    """The rectangle `hf[rows.start:rows.stop, columns.start:columns.stop]`, at row `at` of a Megatron shard."""

    hf: str
    rows: range
    columns: range | None
    """None: all columns, or the tensor has one dimension."""

    at: int

    @property
    def index(self) -> tuple[slice, ...]:
        """The rectangle in the HF tensor."""
        rows = slice(self.rows.start, self.rows.stop)
        return (rows,) if self.columns is None else (rows, slice(self.columns.start, self.columns.stop))

    @property
    def shard_rows(self) -> slice:
        """The rows of the Megatron shard that it fills, over all of the shard's columns."""
        return slice(self.at, self.at + len(self.rows))


@dataclass(frozen=True, kw_only=True)
class HfTensor:
    """A tensor of the HF checkpoint: its name and the sizes of its dimensions, as attributes of `Shape`."""

    name: str
    dims: tuple[str, ...]

    def size(self, shape: Shape) -> tuple[int, ...]:
        """Its shape in a model of `shape`."""
        return tuple(getattr(shape, dim) for dim in self.dims)


Fusion = Literal["whole", "vocabulary", "columns", "qkv", "gate_up"]


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One line of the table: a Megatron parameter and the HF tensors in it. `{layer}` counts from 0 over the model."""

    megatron: str
    """Name under the local layer spec."""

    te: str | None = None
    """Name under the Transformer Engine spec, where it differs."""

    hf: tuple[HfTensor, ...]
    fusion: Fusion
    """How TP splits it: `whole` not at all; `columns` evenly along the second dimension; `vocabulary` evenly along the
    first after padding; `qkv` by query groups, each as its query heads, its key head, its value head; `gate_up` each
    half evenly along the first."""

    needs: str | None = None
    """The flag of `Shape` without which a model doesn't have it."""

    @property
    def per_layer(self) -> bool:
        """Whether every layer has one."""
        return "{layer}" in self.megatron


def _hf(name: str, *dims: str) -> HfTensor:
    return HfTensor(name=name, dims=dims)


_LAYER = "decoder.layers.{layer}."
_HF_LAYER = "model.layers.{layer}."
_HF_ATTENTION = _HF_LAYER + "self_attn."

EMBEDDING = Entry(
    megatron="embedding.word_embeddings.weight",
    hf=(_hf("model.embed_tokens.weight", "vocab", "hidden"),),
    fusion="vocabulary",
)
OUTPUT = Entry(
    megatron="output_layer.weight",
    hf=(_hf("lm_head.weight", "vocab", "hidden"),),
    fusion="vocabulary",
    needs="untied",
)

QWEN2 = (
    EMBEDDING,
    Entry(
        megatron=_LAYER + "input_layernorm.weight",
        te=_LAYER + "self_attention.linear_qkv.layer_norm_weight",
        hf=(_hf(_HF_LAYER + "input_layernorm.weight", "hidden"),),
        fusion="whole",
    ),
    Entry(
        megatron=_LAYER + "self_attention.linear_qkv.weight",
        hf=(
            _hf(_HF_ATTENTION + "q_proj.weight", "query", "hidden"),
            _hf(_HF_ATTENTION + "k_proj.weight", "key", "hidden"),
            _hf(_HF_ATTENTION + "v_proj.weight", "key", "hidden"),
        ),
        fusion="qkv",
    ),
    Entry(
        megatron=_LAYER + "self_attention.linear_qkv.bias",
        hf=(
            _hf(_HF_ATTENTION + "q_proj.bias", "query"),
            _hf(_HF_ATTENTION + "k_proj.bias", "key"),
            _hf(_HF_ATTENTION + "v_proj.bias", "key"),
        ),
        fusion="qkv",
    ),
    Entry(
        megatron=_LAYER + "self_attention.linear_proj.weight",
        hf=(_hf(_HF_ATTENTION + "o_proj.weight", "hidden", "query"),),
        fusion="columns",
    ),
    Entry(
        megatron=_LAYER + "pre_mlp_layernorm.weight",
        te=_LAYER + "mlp.linear_fc1.layer_norm_weight",
        hf=(_hf(_HF_LAYER + "post_attention_layernorm.weight", "hidden"),),
        fusion="whole",
    ),
    Entry(
        megatron=_LAYER + "mlp.linear_fc1.weight",
        hf=(
            _hf(_HF_LAYER + "mlp.gate_proj.weight", "intermediate", "hidden"),
            _hf(_HF_LAYER + "mlp.up_proj.weight", "intermediate", "hidden"),
        ),
        fusion="gate_up",
    ),
    Entry(
        megatron=_LAYER + "mlp.linear_fc2.weight",
        hf=(_hf(_HF_LAYER + "mlp.down_proj.weight", "hidden", "intermediate"),),
        fusion="columns",
    ),
    Entry(
        megatron="decoder.final_layernorm.weight",
        hf=(_hf("model.norm.weight", "hidden"),),
        fusion="whole",
    ),
    OUTPUT,
)
"""Qwen2 and Qwen2.5, in the order of the forward pass."""


def entries(shape: Shape) -> list[Entry]:
    """The lines of the table that a model of `shape` has."""
    return [entry for entry in QWEN2 if entry.needs is None or getattr(shape, entry.needs)]


def parameters(shape: Shape) -> Iterator[tuple[Entry, int]]:
    """Every Megatron parameter of the model as (entry, layer), −1 where it belongs to no layer, in forward order."""
    table = entries(shape)
    layered = [entry for entry in table if entry.per_layer]
    first = table.index(layered[0])
    yield from ((entry, -1) for entry in table[:first])
    yield from ((entry, layer) for layer in range(shape.layers) for entry in layered)
    yield from ((entry, -1) for entry in table[first + len(layered) :])


def stage_of(entry: Entry, layer: int, shape: Shape, stages: int, chunks: int = 1) -> int:
    """The pipeline stage that holds a parameter (of a tied embedding: the original).

    Under the interleaved schedule a stage holds several chunks of layers, dealt out in turn.
    """
    if entry.per_layer:
        return layer // (shape.layers // (stages * chunks)) % stages
    before_layers = QWEN2.index(entry) < next(i for i, line in enumerate(QWEN2) if line.per_layer)
    return 0 if before_layers else stages - 1


def hf_shapes(shape: Shape) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of the HF checkpoint, in forward order."""
    return {
        tensor.name.format(layer=layer): tensor.size(shape) for entry, layer in parameters(shape) for tensor in entry.hf
    }


def pieces(entry: Entry, layer: int, shape: Shape, tp_rank: int, tp_size: int) -> list[Piece]:
    """The pieces of HF tensors that make up one rank's shard of a parameter, in order of their rows in it.

    Rows of the shard beyond the last piece are padding of the vocabulary.
    """
    names = [tensor.name.format(layer=layer) for tensor in entry.hf]
    sizes = _hf_sizes(entry, shape)
    if entry.fusion == "columns":
        return [Piece(hf=names[0], rows=range(sizes[0][0]), columns=_part(sizes[0][1], tp_rank, tp_size), at=0)]
    if entry.fusion == "qkv":
        groups = _part(shape.kv_heads, tp_rank, tp_size)
        per_group = (shape.heads // shape.kv_heads * shape.head_dim, shape.head_dim, shape.head_dim)
        cuts = [(i, range(g * n, (g + 1) * n)) for g in groups for i, n in enumerate(per_group)]
    elif entry.fusion == "vocabulary":
        rows = _part(shape.padded_vocab(tp_size), tp_rank, tp_size)
        cuts = [(0, range(min(rows.start, shape.vocab), min(rows.stop, shape.vocab)))]
    elif entry.fusion == "whole":
        cuts = [(0, range(sizes[0][0]))]
    else:
        cuts = [(i, _part(size[0], tp_rank, tp_size)) for i, size in enumerate(sizes)]
    return list(_stack(names, cuts))


def shard_shape(entry: Entry, shape: Shape, tp_size: int) -> tuple[int, ...]:
    """Shape of one TP rank's shard of a parameter, padding included."""
    rows = sum(size[0] for size in _hf_sizes(entry, shape))
    columns = _hf_sizes(entry, shape)[0][1:]
    if entry.fusion == "whole":
        return (rows, *columns)
    if entry.fusion == "columns":
        return (rows, columns[0] // tp_size)
    if entry.fusion == "vocabulary":
        rows = shape.padded_vocab(tp_size)
    return (rows // tp_size, *columns)


def _hf_sizes(entry: Entry, shape: Shape) -> list[tuple[int, ...]]:
    return [tensor.size(shape) for tensor in entry.hf]


def _part(size: int, rank: int, parts: int) -> range:
    step = size // parts
    return range(rank * step, (rank + 1) * step)


def _stack(names: Sequence[str], cuts: Sequence[tuple[int, range]]) -> Iterator[Piece]:
    at = 0
    for which, rows in cuts:
        if rows:
            yield Piece(hf=names[which], rows=rows, columns=None, at=at)
        at += len(rows)
