"""Packed micro-batches of made-up responses, and the objective on one of them."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_rl.algorithms.losses import LossInputs, Metrics
from megatron_rl.config import AlgorithmConfig
from megatron_rl.rollout.delivery import block
from megatron_rl.training.flops import SequenceFlops
from megatron_rl.training.micro_batches import Place, pack, shares
from megatron_rl.training.objective import Given, Objective
from megatron_rl.types import MicroBatch, TrainedResponse
from tests.cases.responses import trained_response

FLOPS = SequenceFlops(linear=100, quadratic=1)
"""Of no model in particular."""


def sequences() -> list[TrainedResponse]:
    """Five responses of uneven lengths behind uneven prompts."""
    return [
        trained_response(
            prompt_ids=tuple(range(prompt)),
            response_ids=tuple(range(10 * number, 10 * number + length)),
            rollout_logprobs=tuple(-0.1 * (position + number) for position in range(length)),
            advantage=advantage,
            weight=weight,
            group=number // 2,
            number=number,
        )
        for number, (prompt, length, advantage, weight) in enumerate(
            [(1, 2, 1.5, 0.25), (3, 4, -0.5, 0.125), (2, 1, -0.5, 0.5), (4, 3, -2.0, 0.0625), (1, 6, 0.75, 0.375)]
        )
    ]


def micro_batches(of: list[TrainedResponse], size: int, multiple: int = 1) -> list[MicroBatch]:
    """Packed; `multiple`: the tokens of a micro-batch are padded to it."""
    return list(share_of_rank(of, Place(multiple=multiple), flops=FLOPS, micro_batch_size=size))


def share_of_rank(update: Sequence[TrainedResponse], place: Place, **options: Any) -> tuple[MicroBatch, ...]:
    """The micro-batches of a rank, packed from tokens that are all here."""
    of_rank = shares(update, place, **options)[place.rank]
    return tuple(pack([update[i] for i in batch], [block(update[i]) for i in batch], place) for batch in of_rank)


def objective(
    loss: Callable[[LossInputs], Any],
    batch: MicroBatch,
    logprobs: Tensor,
    *,
    entropies: Tensor | None = None,
    sampled: Tensor | None = None,
    reference: Tensor | None = None,
    first: bool = True,
    **algorithm: Any,
) -> tuple[Tensor, Metrics]:
    """Of one micro-batch with these switches; entropies are 0 unless given."""
    entropies = torch.zeros_like(logprobs) if entropies is None else entropies
    one = Objective(loss=loss, algorithm=AlgorithmConfig(**algorithm))
    return one(batch, logprobs, entropies, Given(sampled=sampled, reference=reference), first=first)


def logprobs_of(batch: MicroBatch) -> Tensor:
    """Made-up log-probs that depend on the label alone, so that every split of the batch has the same; a leaf."""
    values = -1.0 - (batch.labels.double() * 0.7).sin()
    return torch.where(batch.mask, values, math.nan).requires_grad_()
