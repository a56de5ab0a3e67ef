"""The layers that stand in for Transformer Engine's, against Hugging Face's norm and attention written out."""

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

from megatron_rl.training.layers import RMSNorm, SdpaAttention
from tests.cases.group import group_of_one


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
def test_attention_is_causal_grouped_scaled_and_stays_inside_its_sequence(scale: float | None) -> None:
    heads, kv_heads, head_dim, starts = 6, 3, 4, [0, 5, 6, 10, 22]
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(starts[-1], heads, head_dim, generator=generator, requires_grad=True)
    key, value = (
        torch.randn(starts[-1], kv_heads, head_dim, generator=generator, requires_grad=True) for _ in range(2)
    )
    attention = SdpaAttention.__new__(SdpaAttention)
    torch.nn.Module.__init__(attention)
    attention.softmax_scale = scale
    packed = SimpleNamespace(cu_seqlens_q=torch.tensor(starts))
    expected = torch.empty(starts[-1], heads, head_dim)
    for start, end in pairwise(starts):
        for t in range(start, end):
            for h in range(heads):
                k, v = key[start : t + 1, h // 2], value[start : t + 1, h // 2]
                expected[t, h] = ((k @ query[t, h]) * (scale or head_dim**-0.5)).softmax(0) @ v
    leaves, probe = (query, key, value), torch.randn(expected.shape, generator=generator)
    with group_of_one() as group:
        attention.context = group
        out = attention(query, key, value, None, packed_seq_params=packed)
    torch.testing.assert_close(out, expected.flatten(1), atol=1e-6, rtol=0)
    found = torch.autograd.grad((out * probe.flatten(1)).sum(), leaves)
    wanted = torch.autograd.grad((expected * probe).sum(), leaves)
    torch.testing.assert_close(found, wanted, atol=3e-6, rtol=0)
