"""The responses of an optimizer step to ranks and micro-batches, and tokens to packed rows. Pure: every rank knows
everybody's share from lengths alone, and packs its own when its tokens are there.

A micro-batch is one row of responses after one another (thd form), each behind its prompt and padded to what context
and sequence parallelism need. Under context parallelism a rank holds two chunks of every response, the r-th from the
front and the r-th from the back, so that causal attention costs all ranks the same; Megatron and Transformer Engine
expect it so.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from megatron_rl.rollout.delivery import IDS, LOGPROBS
from megatron_rl.training.schedule import schedule
from megatron_rl.types import MicroBatch, TrainedResponse


@dataclass(frozen=True, kw_only=True)
class Place:
    """Which of an optimizer step's data a rank works on."""

    rank: int = 0
    """Data-parallel rank, and how many there are."""

    ranks: int = 1
    context_rank: int = 0
    """Context-parallel rank, and how many there are."""

    context_ranks: int = 1
    multiple: int = 1
    """Of which the tokens are that a context-parallel rank holds of a micro-batch: sequence parallelism splits them
    over TP, and FP8 products want 32."""


def shares(
    update: Sequence[TrainedResponse],
    place: Place,
    *,
    flops: Callable[[int], int],
    micro_batch_size: int | None = None,
    max_tokens: int | None = None,
    multiple: int = 1,
) -> list[list[list[int]]]:
    """The micro-batches of every data-parallel rank in an optimizer step: as many on each, see `schedule`.

    Responses with weight 0 are left out; a micro-batch without any still runs, on padding.

    Args:
        update: all responses of the optimizer step.
        place: of this rank; the result is the same for all.
        flops: of a response of so many tokens.
        micro_batch_size: most responses in a micro-batch.
        max_tokens: most tokens in a micro-batch, with padding; a longer response gets one of its own.
        multiple: what the number of micro-batches on a rank is a multiple of.

    Returns:
        `[data-parallel ranks][micro-batches][responses]`: indices of `update`.
    """
    trained = [index for index, one in enumerate(update) if one.weight != 0]
    of_ranks = schedule(
        [_padded(update[index], place) for index in trained],
        flops,
        ranks=place.ranks,
        # Rounded down, so that a micro-batch still fits when it is padded as a whole.
        max_tokens=None if max_tokens is None else max_tokens - max_tokens % _batch_multiple(place),
        max_responses=micro_batch_size,
        multiple=multiple,
    )
    return [[[trained[which] for which in batch] for batch in of_rank] for of_rank in of_ranks]


def pack(responses: Sequence[TrainedResponse], blocks: Sequence[Tensor], place: Place) -> MicroBatch:
    """One micro-batch; without responses it is padding alone.

    Args:
        responses: in their order.
        blocks: of each, its ids and log-probs as `deliver` gives them.
        place: of this rank.
    """
    lengths = [_padded(one, place) for one in responses] or [_response_multiple(place)]
    lengths[-1] += -sum(lengths) % _batch_multiple(place)
    starts = [0, *accumulate(lengths)]
    total = starts[-1]
    tokens, labels = (torch.zeros(total, dtype=torch.int64) for _ in range(2))
    response_ids, group_ids = (torch.full((total,), -1) for _ in range(2))
    weights, advantages, rollout = (torch.zeros(total) for _ in range(3))
    positions = torch.cat([torch.arange(length) for length in lengths])
    for number, (one, block, start) in enumerate(zip(responses, blocks, starts, strict=False)):
        whole = torch.cat((torch.tensor(one.prompt_ids), block[IDS]))
        tokens[start : start + len(whole) - 1] = whole[:-1]
        labels[start : start + len(whole) - 1] = whole[1:]
        response = slice(start + len(one.prompt_ids) - 1, start + len(whole) - 1)  # position t predicts token t + 1
        response_ids[response], group_ids[response] = number, one.group
        weights[response], advantages[response] = one.weight, one.advantage
        rollout[response] = block[LOGPROBS].view(torch.float32)
    held = held_tokens(lengths, place.context_rank, place.context_ranks)

    def row(values: Tensor) -> Tensor:
        return (values if place.context_ranks == 1 else values[held]).unsqueeze(0)

    return MicroBatch(
        tokens=row(tokens),
        labels=row(labels),
        positions=row(positions),
        mask=row(response_ids >= 0),
        weights=row(weights),
        advantages=row(advantages),
        rollout_logprobs=row(rollout),
        response_ids=row(response_ids),
        group_ids=row(group_ids),
        responses=len(responses),
        numbers=tuple(one.number for one in responses),
        lengths=tuple(lengths),
        starts=torch.tensor(starts, dtype=torch.int32),
    )


def held_tokens(lengths: Sequence[int], context_rank: int, context_ranks: int) -> Tensor:
    """Which tokens of a micro-batch with these padded lengths a context-parallel rank holds, in its order: indices."""
    if context_ranks == 1:
        return torch.arange(sum(lengths))
    held, start = [], 0
    for length in lengths:
        chunks = torch.arange(start, start + length).chunk(2 * context_ranks)
        held += [chunks[context_rank], chunks[2 * context_ranks - 1 - context_rank]]
        start += length
    return torch.cat(held)


def _padded(one: TrainedResponse, place: Place) -> int:
    """Tokens of a response with its prompt and padding."""
    length = len(one.prompt_ids) + one.length - 1  # the last token is a label only
    return length + -length % _response_multiple(place)


def _response_multiple(place: Place) -> int:
    """What the tokens of a response are a multiple of: context parallelism splits it into two chunks a rank."""
    return 1 if place.context_ranks == 1 else 2 * place.context_ranks


def _batch_multiple(place: Place) -> int:
    """What the tokens of a micro-batch are a multiple of."""
    return _response_multiple(place) * place.multiple
