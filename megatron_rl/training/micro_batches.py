"""The responses of an optimizer step to this rank's micro-batches. Pure: every rank knows everybody's."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron_rl.types import MicroBatch, TrainedResponse


@dataclass(frozen=True, kw_only=True)
class Share:
    """What one data-parallel rank does in an optimizer step."""

    micro_batches: tuple[MicroBatch, ...]
    """As many on every rank, all of one shape `[rows, seq_length]`."""

    seq_length: int


def share_of_rank(
    update: Sequence[TrainedResponse], *, rank: int, ranks: int, micro_batch_size: int, multiple: int
) -> Share:
    """This rank's micro-batches of an optimizer step.

    Responses with weight 0 are left out; a rank without any still runs, on rows that are all padding. Longest first,
    dealt out in turn, so that ranks get like lengths.

    Args:
        update: all sequences of the optimizer step.
        rank: data-parallel rank.
        ranks: data-parallel size.
        micro_batch_size: most responses in a micro-batch.
        multiple: the padded length is a multiple of this (sequence parallelism splits it).
    """
    trained = sorted((s for s in update if s.weight != 0), key=lambda s: -len(s.prompt_ids) - len(s.response_ids))
    longest = len(trained[0].prompt_ids) + len(trained[0].response_ids) if trained else 2
    seq_length = -(-(longest - 1) // multiple) * multiple
    count = max(1, -(-len(trained) // (ranks * micro_batch_size)))
    mine = trained[rank::ranks]
    rows = max(1, -(-len(trained) // (ranks * count)))  # the same everywhere, and no more empty ones than must be
    batches = (mine[i * rows : (i + 1) * rows] for i in range(count))
    return Share(micro_batches=tuple(_pad(batch, rows, seq_length) for batch in batches), seq_length=seq_length)


def _pad(sequences: Sequence[TrainedResponse], rows: int, seq_length: int) -> MicroBatch:
    tokens = torch.zeros(rows, seq_length + 1, dtype=torch.int64)
    weights, advantages, rollout = (torch.zeros(rows, seq_length) for _ in range(3))
    response_ids, group_ids = (torch.full((rows, seq_length), -1) for _ in range(2))
    for row, sequence in enumerate(sequences):
        whole = sequence.prompt_ids + sequence.response_ids
        tokens[row, : len(whole)] = torch.tensor(whole)
        response = slice(len(sequence.prompt_ids) - 1, len(whole) - 1)  # position t predicts token t + 1
        response_ids[row, response] = row
        group_ids[row, response] = sequence.group
        weights[row, response] = sequence.weight
        advantages[row, response] = sequence.advantage
        rollout[row, response] = torch.tensor(sequence.rollout_logprobs)
    return MicroBatch(
        tokens=tokens[:, :-1].contiguous(),
        labels=tokens[:, 1:].contiguous(),
        mask=response_ids >= 0,
        weights=weights,
        advantages=advantages,
        rollout_logprobs=rollout,
        response_ids=response_ids,
        group_ids=group_ids,
        responses=rows,
        numbers=tuple(sequence.number for sequence in sequences),
    )
