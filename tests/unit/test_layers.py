"""The layers that stand in for Transformer Engine's, against Hugging Face's norm and attention written out."""

from types import SimpleNamespace

import pytest
import torch
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

from megatron_rl.training.layers import RMSNorm, SdpaAttention


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_is_hugging_faces(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, x = torch.randn(7, generator=generator), torch.randn(3, 2, 7, generator=generator).to(dtype)
    ours = RMSNorm(SimpleNamespace(params_dtype=dtype, sequence_parallel=False), 7, eps=0.3)
    theirs = Qwen2RMSNorm(7, eps=0.3).to(dtype)
    for norm in (ours, theirs):
        norm.weight.data.copy_(weight)
    assert ours.weight.dtype == dtype
    assert torch.equal(ours(x), theirs(x))


@pytest.mark.parametrize("split", [True, False])
def test_the_norm_tells_megatron_whether_it_sees_a_part_of_the_tokens(split: bool) -> None:
    norm = RMSNorm(SimpleNamespace(params_dtype=torch.float32, sequence_parallel=split), 7)
    assert vars(norm.weight)["sequence_parallel"] is split


@pytest.mark.parametrize("scale", [None, 0.25])
def test_attention_is_causal_grouped_and_scaled(scale: float | None) -> None:
    seq, batch, heads, kv_heads, head_dim = 5, 2, 6, 3, 4
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(seq, batch, heads, head_dim, generator=generator)
    key, value = (torch.randn(seq, batch, kv_heads, head_dim, generator=generator) for _ in range(2))
    attention = SdpaAttention.__new__(SdpaAttention)
    torch.nn.Module.__init__(attention)
    attention.softmax_scale = scale
    out = attention(query, key, value, None)
    assert out.shape == (seq, batch, heads * head_dim)
    for t in range(seq):
        for b in range(batch):
            for h in range(heads):
                k, v = key[: t + 1, b, h // 2], value[: t + 1, b, h // 2]
                scores = (k @ query[t, b, h]) * (scale or head_dim**-0.5)
                expected = scores.softmax(0) @ v
                assert torch.allclose(out[t, b, h * head_dim : (h + 1) * head_dim], expected, atol=1e-6)
