"""What each rank of Megatron and SGLang holds of a model, written out row by row, without the table of names."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from megatron_rl.resharding.names import Shape, hf_shapes


def numbered(shape: Shape) -> dict[str, Tensor]:
    """Every tensor of the checkpoint; no two elements of the model have the same value, and none is 0."""
    tensors, first = {}, 1
    for name, size in hf_shapes(shape).items():
        tensors[name] = torch.arange(first, first + math.prod(size)).view(size)
        first += math.prod(size)
    return tensors


def megatron_shard(name: str, hf: dict[str, Tensor], shape: Shape, layer: int, rank: int, tp: int) -> Tensor:
    """What Megatron expects of a TP rank; padding of the vocabulary is 0."""
    block = f"model.layers.{layer}."
    if "linear_qkv" in name:
        q, k, v = _projections(hf, block, name)
        rows = []
        for group in range(shape.kv_heads):
            sharing = [head for head in range(shape.heads) if head * shape.kv_heads // shape.heads == group]
            rows += [*_heads(q, shape, sharing), *_heads(k, shape, [group]), *_heads(v, shape, [group])]
        return torch.stack(rows).tensor_split(tp)[rank]  # where TP has more ranks than groups, through their heads
    if "linear_fc1" in name:
        return torch.cat([_part(hf[f"{block}mlp.{x}_proj.weight"], rank, tp) for x in ("gate", "up")])
    short = name.removeprefix("decoder.layers.{layer}.")
    if "word_embeddings" in name or "output_layer" in name:
        whole = hf["model.embed_tokens.weight" if "word" in name else "lm_head.weight"]
        return _part(_padded(whole, -(-shape.vocab // tp) * tp), rank, tp)
    return {
        "decoder.final_layernorm.weight": lambda: hf["model.norm.weight"],
        "input_layernorm.weight": lambda: hf[block + "input_layernorm.weight"],
        "pre_mlp_layernorm.weight": lambda: hf[block + "post_attention_layernorm.weight"],
        "self_attention.q_layernorm.weight": lambda: hf[block + "self_attn.q_norm.weight"],
        "self_attention.k_layernorm.weight": lambda: hf[block + "self_attn.k_norm.weight"],
        "self_attention.linear_proj.weight": lambda: _part(hf[block + "self_attn.o_proj.weight"], rank, tp, 1),
        "mlp.linear_fc2.weight": lambda: _part(hf[block + "mlp.down_proj.weight"], rank, tp, 1),
    }[short]()


def sglang_shard(name: str, hf: dict[str, Tensor], shape: Shape, layer: int, rank: int, tp: int) -> Tensor:
    """What SGLang's own loader leaves on a TP rank; padding of the vocabulary is 0."""
    block = f"model.layers.{layer}."
    if "qkv_proj" in name:
        q, k, v = _projections(hf, block, name)
        queries = [head for head in range(shape.heads) if head * tp // shape.heads == rank]
        # Key heads are dealt out like query heads, or repeated: each head to tp / kv_heads ranks in a row.
        keys = sorted({head * shape.kv_heads // shape.heads for head in queries})
        if tp >= shape.kv_heads:
            keys = [rank * shape.kv_heads // tp]
        return torch.stack([*_heads(q, shape, queries), *_heads(k, shape, keys), *_heads(v, shape, keys)])
    if "gate_up_proj" in name:
        return torch.cat([_part(hf[f"{block}mlp.{x}_proj.weight"], rank, tp) for x in ("gate", "up")])
    if name in ("model.embed_tokens.weight", "lm_head.weight"):
        padded = next(rows for rows in range(shape.vocab, 10**6) if rows % 64 == 0)
        while padded % tp:
            padded += 64
        return _part(_padded(hf[name][: shape.vocab], padded), rank, tp)
    whole = hf[name.format(layer=layer)]
    return _part(whole, rank, tp, 1) if "o_proj" in name or "down_proj" in name else whole


def _projections(hf: dict[str, Tensor], block: str, name: str) -> list[Tensor]:
    return [hf[f"{block}self_attn.{x}_proj.{name.rpartition('.')[2]}"] for x in "qkv"]


def _heads(tensor: Tensor, shape: Shape, heads: Iterable[int]) -> list[Tensor]:
    return [tensor[head * shape.head_dim + row] for head in heads for row in range(shape.head_dim)]


def _part(tensor: Tensor, rank: int, tp: int, dim: int = 0) -> Tensor:
    return tensor.tensor_split(tp, dim)[rank]


def _padded(tensor: Tensor, rows: int) -> Tensor:
    return torch.cat((tensor, tensor.new_zeros(rows - len(tensor), tensor.shape[1])))
