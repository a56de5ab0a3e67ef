"""Layers for Megatron without Transformer Engine: a norm that allows sequence parallelism, and SDPA attention.

Megatron's own local norm refuses sequence parallelism, and its local attention builds the whole score matrix.
"""

import copy
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state as mpu
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_rl.training.micro_batches import held_tokens


class RMSNorm(torch.nn.Module):
    """Root-mean-square norm over the last dimension, computed in fp32, in Hugging Face's order of operations."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        # Under sequence parallelism each rank sees a part of the tokens: Megatron sums such gradients over TP.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """`[..., hidden]` to the same."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class SdpaAttention(MegatronModule):
    """Causal core attention over packed sequences through torch's scaled_dot_product_attention.

    Under context parallelism each rank gathers all keys and values and attends from the queries that it holds.
    """

    def __init__(self, config: TransformerConfig, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__(config=config)
        self.softmax_scale = softmax_scale
        self.context = mpu.get_context_parallel_group()

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *_: Any, packed_seq_params: PackedSeqParams, **__: Any
    ) -> Tensor:
        """`[tokens, heads, head_dim]` to `[tokens, heads · head_dim]`."""
        starts = packed_seq_params.cu_seqlens_q.tolist()
        spans = [slice(start, end) for start, end in pairwise(starts)]
        return (self._whole if self.context.size() == 1 else self._parts)(query, key, value, spans)

    def _whole(self, query: Tensor, key: Tensor, value: Tensor, spans: Sequence[slice]) -> Tensor:
        """Sequences of like lengths side by side, padded on the right, where causal attention never looks."""
        out = query.new_zeros(len(query), query.shape[1] * query.shape[2])
        for members in _alike(spans):
            width = members[0].stop - members[0].start
            ends = zip(*((span.start, span.stop - 1) for span in members), strict=True)
            first, last = (torch.tensor(column, device=query.device)[:, None] for column in ends)
            index = first + torch.arange(width, device=query.device)
            inside = index <= last
            index = index.minimum(last)
            found = self._sdpa(query[index], key[index], value[index], is_causal=True)
            out = out.index_copy(0, index[inside], found[inside])
        return out

    def _parts(self, query: Tensor, key: Tensor, value: Tensor, spans: Sequence[slice]) -> Tensor:
        ranks, lengths = self.context.size(), [span.stop - span.start for span in spans]
        held = [held_tokens(lengths, rank, ranks).to(query.device) for rank in range(ranks)]
        in_order = torch.cat(held).argsort()
        key, value = (_GatherContext.apply(x, self.context)[in_order] for x in (key, value))
        out = []
        for span in spans:
            here = slice(span.start // ranks, span.stop // ranks)
            mine = held[self.context.rank()][here]
            seen = torch.arange(span.start, span.stop, device=query.device) <= mine[:, None]
            found = self._sdpa(query[None, here], key[None, span], value[None, span], attn_mask=seen)
            out.append(found[0])
        return torch.cat(out)

    def _sdpa(self, query: Tensor, key: Tensor, value: Tensor, **mask: Any) -> Tensor:
        """`[sequences, tokens, heads, head_dim]` to `[sequences, tokens, heads · head_dim]`."""
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        grouped = q.shape[1] != k.shape[1]
        out = F.scaled_dot_product_attention(q, k, v, scale=self.softmax_scale, enable_gqa=grouped, **mask)
        return out.transpose(1, 2).flatten(2)

    def sharded_state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:
        """Nothing: it has no parameters."""
        return {}


class _GatherContext(torch.autograd.Function):
    """The tokens of all context-parallel ranks, one rank after another; backward sums what all ranks did with them."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, context: dist.ProcessGroup) -> Tensor:
        ctx.context = context
        parts = [torch.empty_like(part) for _ in range(context.size())]
        dist.all_gather(parts, part.contiguous(), group=context)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.context)
        return grad.chunk(ctx.context.size())[ctx.context.rank()], None


def _alike(spans: Sequence[slice]) -> list[list[slice]]:
    """Spans in runs, longest first, in which none is shorter than three quarters of the first."""
    runs: list[list[slice]] = []
    for span in sorted(spans, key=lambda span: span.start - span.stop):
        if not runs or 4 * (span.stop - span.start) < 3 * (runs[-1][0].stop - runs[-1][0].start):
            runs.append([])
        runs[-1].append(span)
    return runs


def local_block_spec(config: TransformerConfig, chunk: int | None) -> TransformerBlockSubmodules:
    """The layers of a chunk of this pipeline stage (None: of its only one), and the final norm."""
    layer: ModuleSpec = copy.deepcopy(get_gpt_layer_local_spec(normalization="RMSNorm"))
    parts = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
    attention = parts.self_attention.submodules
    attention.core_attention = SdpaAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    return TransformerBlockSubmodules(
        layer_specs=[layer] * get_num_layers_to_build(config, vp_stage=chunk), layer_norm=RMSNorm
    )
