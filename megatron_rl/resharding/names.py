"""The table of names: which tensors a model family has, and how Hugging Face, Megatron and SGLang call and fuse them.

A parameter of Megatron or SGLang holds one or several HF tensors. `pieces.py` reads from a line which part of them each
rank holds; import, export, live resharding and its plan are all derived from that, and there is no second table. A new
family is a line in `FAMILIES`, and a test.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from megatron_rl.errors import UserError

Family = Literal["qwen2", "qwen3", "llama"]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The numbers of a model that decide the names and shapes of its tensors."""

    family: Family = "qwen2"
    """Qwen2 and Qwen2.5; Qwen3 (dense); Llama 2 and 3: `model_type` of config.json."""

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

    def check_tensor_parallel(self, size: int, option: str = "trainer.tensor_parallel_size") -> None:
        """Refuse a TP size that doesn't divide what is split.

        Raises:
            UserError: naming the number that isn't divisible.
        """
        for what, count, shared in (
            ("num_attention_heads", self.heads, False),
            ("num_key_value_heads", self.kv_heads, True),  # by ranks, where there are more of them
            ("intermediate_size", self.intermediate, False),
        ):
            if count % size and not (shared and size % count == 0):
                raise UserError(
                    f"{option}: {size} does not divide {what} ({count}) of the model; choose a divisor of {count}"
                )
        if (self.query + 2 * self.key) % size:  # Megatron splits the fused projection evenly, through its heads
            raise UserError(
                f"{option}: {size} does not divide the {self.query + 2 * self.key} rows of the model's query, key and "
                f"value projections; choose a divisor of num_key_value_heads ({self.kv_heads})"
            )

    def padded_vocab(self, tp_size: int) -> int:
        """Rows of Megatron's embedding: the vocabulary rounded up so that every TP rank holds the same number."""
        return -(-self.vocab // tp_size) * tp_size


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

    sglang: str
    """Name of SGLang's parameter."""

    hf: tuple[HfTensor, ...]
    fusion: Fusion
    """How it is fused, and how TP splits it: `whole` not at all; `columns` evenly along the second dimension;
    `vocabulary` evenly along the first after padding; `gate_up` each half evenly along the first. `qkv` in Megatron is
    one query group after another, each as its query heads, its key head, its value head, and split evenly along the
    first; in SGLang each of the three is split evenly and stacked, and key and value heads are repeated over ranks when
    there are fewer of them than ranks."""

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
    sglang="model.embed_tokens.weight",
    hf=(_hf("model.embed_tokens.weight", "vocab", "hidden"),),
    fusion="vocabulary",
)
OUTPUT = Entry(
    megatron="output_layer.weight",
    sglang="lm_head.weight",
    hf=(_hf("lm_head.weight", "vocab", "hidden"),),
    fusion="vocabulary",
    needs="untied",
)

_INPUT_NORM = Entry(
    megatron=_LAYER + "input_layernorm.weight",
    te=_LAYER + "self_attention.linear_qkv.layer_norm_weight",
    sglang=_HF_LAYER + "input_layernorm.weight",
    hf=(_hf(_HF_LAYER + "input_layernorm.weight", "hidden"),),
    fusion="whole",
)
QKV = Entry(
    megatron=_LAYER + "self_attention.linear_qkv.weight",
    sglang=_HF_ATTENTION + "qkv_proj.weight",
    hf=(
        _hf(_HF_ATTENTION + "q_proj.weight", "query", "hidden"),
        _hf(_HF_ATTENTION + "k_proj.weight", "key", "hidden"),
        _hf(_HF_ATTENTION + "v_proj.weight", "key", "hidden"),
    ),
    fusion="qkv",
)
_QKV_BIAS = Entry(
    megatron=_LAYER + "self_attention.linear_qkv.bias",
    sglang=_HF_ATTENTION + "qkv_proj.bias",
    hf=(
        _hf(_HF_ATTENTION + "q_proj.bias", "query"),
        _hf(_HF_ATTENTION + "k_proj.bias", "key"),
        _hf(_HF_ATTENTION + "v_proj.bias", "key"),
    ),
    fusion="qkv",
)
_Q_NORM = Entry(
    megatron=_LAYER + "self_attention.q_layernorm.weight",
    sglang=_HF_ATTENTION + "q_norm.weight",
    hf=(_hf(_HF_ATTENTION + "q_norm.weight", "head_dim"),),
    fusion="whole",
)
_K_NORM = Entry(
    megatron=_LAYER + "self_attention.k_layernorm.weight",
    sglang=_HF_ATTENTION + "k_norm.weight",
    hf=(_hf(_HF_ATTENTION + "k_norm.weight", "head_dim"),),
    fusion="whole",
)
PROJECTION = Entry(
    megatron=_LAYER + "self_attention.linear_proj.weight",
    sglang=_HF_ATTENTION + "o_proj.weight",
    hf=(_hf(_HF_ATTENTION + "o_proj.weight", "hidden", "query"),),
    fusion="columns",
)
_MLP = (
    Entry(
        megatron=_LAYER + "pre_mlp_layernorm.weight",
        te=_LAYER + "mlp.linear_fc1.layer_norm_weight",
        sglang=_HF_LAYER + "post_attention_layernorm.weight",
        hf=(_hf(_HF_LAYER + "post_attention_layernorm.weight", "hidden"),),
        fusion="whole",
    ),
    Entry(
        megatron=_LAYER + "mlp.linear_fc1.weight",
        sglang=_HF_LAYER + "mlp.gate_up_proj.weight",
        hf=(
            _hf(_HF_LAYER + "mlp.gate_proj.weight", "intermediate", "hidden"),
            _hf(_HF_LAYER + "mlp.up_proj.weight", "intermediate", "hidden"),
        ),
        fusion="gate_up",
    ),
    Entry(
        megatron=_LAYER + "mlp.linear_fc2.weight",
        sglang=_HF_LAYER + "mlp.down_proj.weight",
        hf=(_hf(_HF_LAYER + "mlp.down_proj.weight", "hidden", "intermediate"),),
        fusion="columns",
    ),
)
_FINAL_NORM = Entry(
    megatron="decoder.final_layernorm.weight",
    sglang="model.norm.weight",
    hf=(_hf("model.norm.weight", "hidden"),),
    fusion="whole",
)

FAMILIES: dict[Family, tuple[Entry, ...]] = {
    "qwen2": (EMBEDDING, _INPUT_NORM, QKV, _QKV_BIAS, PROJECTION, *_MLP, _FINAL_NORM, OUTPUT),
    "qwen3": (EMBEDDING, _INPUT_NORM, QKV, _Q_NORM, _K_NORM, PROJECTION, *_MLP, _FINAL_NORM, OUTPUT),
    "llama": (EMBEDDING, _INPUT_NORM, QKV, PROJECTION, *_MLP, _FINAL_NORM, OUTPUT),
}
"""The lines of each family, in the order of the forward pass."""


def entries(shape: Shape) -> list[Entry]:
    """The lines of the table that a model of `shape` has."""
    return [entry for entry in FAMILIES[shape.family] if entry.needs is None or getattr(shape, entry.needs)]


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
    return 0 if entry == EMBEDDING else stages - 1


def hf_shapes(shape: Shape) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of the HF checkpoint, in forward order."""
    return {
        tensor.name.format(layer=layer): tensor.size(shape) for entry, layer in parameters(shape) for tensor in entry.hf
    }
