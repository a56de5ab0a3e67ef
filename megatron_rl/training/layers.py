"""Layers for Megatron without Transformer Engine: a norm that allows sequence parallelism, and SDPA attention.

Megatron's own local norm refuses sequence parallelism, and its local attention builds the whole score matrix.
"""

import copy
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


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
    """Causal core attention through torch's scaled_dot_product_attention. Batches are padded on the right."""

    def __init__(self, config: TransformerConfig, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__(config=config)
        self.softmax_scale = softmax_scale

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        """`[seq, batch, heads, head_dim]` to `[seq, batch, heads · head_dim]`."""
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        grouped = q.shape[1] != k.shape[1]
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.softmax_scale, enable_gqa=grouped)
        return out.permute(2, 0, 1, 3).flatten(2)

    def sharded_state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:
        """Nothing: it has no parameters."""
        return {}


def local_block_spec(config: TransformerConfig) -> TransformerBlockSubmodules:
    """The layers of this pipeline stage, and the final norm."""
    layer: ModuleSpec = copy.deepcopy(get_gpt_layer_local_spec(normalization="RMSNorm"))
    parts = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
    parts.self_attention.submodules.core_attention = SdpaAttention
    return TransformerBlockSubmodules(layer_specs=[layer] * get_num_layers_to_build(config), layer_norm=RMSNorm)
