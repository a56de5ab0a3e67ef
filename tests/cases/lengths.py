"""Lengths of responses as long reasoning has them, and how evenly a schedule loads ranks."""

import math
import random
from collections.abc import Sequence

from megatron_rl.resharding.names import Shape

QWEN2_5_32B = Shape(
    layers=64, hidden=5120, heads=40, kv_heads=8, head_dim=128, intermediate=27648, vocab=152064, tied=False
)

Work = Sequence[Sequence[float]]
"""FLOPs, `[ranks][micro-batches]`."""


def response_lengths(responses: int, seed: int) -> list[int]:
    """Lognormal, median 3,000 tokens, sigma 0.9, cut off at 20,480."""
    generator = random.Random(seed)
    return [min(20_480, math.ceil(generator.lognormvariate(math.log(3000), 0.9))) for _ in range(responses)]


def imbalance(work: Work) -> float:
    """By how much the rank with most to do is above the mean."""
    totals = [sum(of_rank) for of_rank in work]
    return max(totals) / (sum(totals) / len(totals)) - 1


def lockstep_loss(work: Work) -> float:
    """The same where ranks wait for the slowest in every micro-batch."""
    return sum(map(max, zip(*work, strict=True))) / (sum(map(sum, work)) / len(work)) - 1
