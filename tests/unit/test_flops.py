"""FLOPs of a sequence, by hand and as PyTorch counts those of the Hugging Face model."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megatron_rl.resharding.names import Shape
from megatron_rl.training.flops import SequenceFlops, sequence_flops
from tests.tiny import LLAMA, QWEN3, SHAPE, TIED, random_model


def test_worked_by_hand() -> None:
    shape = Shape(layers=2, hidden=4, heads=2, kv_heads=1, head_dim=3, intermediate=5, vocab=7, tied=False)
    # multiply-adds of a token and layer: q 4 × 6, k and v 4 × 3 each, output 6 × 4, gate, up and down 4 × 5 each
    layer = 24 + 12 + 12 + 24 + 3 * 20
    # of a pair of tokens and layer: 6 for the score, 6 for the value, half of the pairs
    assert sequence_flops(shape) == SequenceFlops(linear=6 * (2 * layer + 4 * 7), quadratic=6 * 2 * (6 + 6) // 2)
    assert sequence_flops(shape)(10) == 1752 * 10 + 72 * 100


@pytest.mark.parametrize("tokens", [1, 7, 32])
@pytest.mark.parametrize("shape", [SHAPE, TIED, QWEN3, LLAMA], ids=["untied", "tied", "qwen3", "llama"])
def test_they_are_those_that_pytorch_counts(shape: Shape, tokens: int) -> None:
    model = random_model(shape, attn_implementation="eager").requires_grad_()
    with FlopCounterMode(display=False) as counted:
        model(torch.arange(tokens)[None] % shape.vocab).logits.sum().backward()
    flops = sequence_flops(shape)
    # Eager attention multiplies masked pairs too: the whole square, not half of it.
    assert counted.get_total_flops() == flops.linear * tokens + 2 * flops.quadratic * tokens**2
