"""Kept groups to the training batch, and the training batch to micro-batches. Pure: the same on every rank."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron_rl.algorithms.advantages import group_advantages
from megatron_rl.algorithms.shaping import soft_overlong_penalty
from megatron_rl.algorithms.weights import loss_weights
from megatron_rl.config import Config
from megatron_rl.types import Group, MicroBatch, TrainBatch, TrainedResponse


def make_batch(groups: Sequence[Group], config: Config) -> TrainBatch:
    """Rewards, advantages and loss weights of a rollout step, cut at group boundaries into its optimizer steps.

    Args:
        groups: the kept groups, in prompt order; not empty.
        config: of the run; `algorithm` and `rewards` decide.
    """
    responses = [graded.response for group in groups for graded in group.responses]
    ids = torch.tensor([number for number, group in enumerate(groups) for _ in group.responses])
    scores = torch.tensor([graded.score for group in groups for graded in group.responses], dtype=torch.float64)
    lengths = torch.tensor([len(response.ids) for response in responses])
    algorithm = config.algorithm

    rewards = config.rewards.wrong + (config.rewards.right - config.rewards.wrong) * scores
    if algorithm.soft_overlong:
        budget, buffer = config.rollout.max_response_tokens, algorithm.soft_overlong.buffer
        rewards = rewards + soft_overlong_penalty(lengths, max_length=budget, buffer=buffer)
    advantages = group_advantages(
        rewards, ids, estimator=algorithm.advantage, std_ddof=algorithm.std_ddof, std_eps=algorithm.std_eps
    )
    untrained = scores.isnan()
    if algorithm.mask_truncated:
        untrained |= torch.tensor([response.finish_reason != "stop" for response in responses])
    trained_lengths = torch.where(untrained, 0, lengths)

    updates = []
    for first, last in _cut(len(groups), algorithm.updates_per_rollout):
        members = ((ids >= first) & (ids < last)).nonzero().squeeze(1)
        weights = loss_weights(
            trained_lengths[members],
            ids[members],
            mode=algorithm.normalisation,
            budget=config.rollout.max_response_tokens,
        )
        updates.append(
            tuple(
                TrainedResponse(
                    prompt_ids=groups[int(ids[i])].prompt.ids,
                    response_ids=responses[i].ids,
                    rollout_logprobs=responses[i].logprobs,
                    advantage=float(advantages[i]),
                    weight=float(weight),
                )
                for i, weight in zip(members.tolist(), weights, strict=True)
            )
        )
    graded = ~scores.isnan()
    metrics = {
        "batch/groups": (float(len(groups)), 1.0),
        "batch/responses": (float(len(responses)), 1.0),
        "batch/tokens": (float(trained_lengths.sum()), 1.0),
        "batch/reward": (float(rewards[graded].sum()), float(graded.sum())),
        "batch/advantage_abs": (float(advantages.abs().sum()), float(graded.sum())),
    }
    return TrainBatch(updates=tuple(updates), metrics=metrics)


def _cut(count: int, parts: int) -> list[tuple[int, int]]:
    """`count` groups in at most `parts` runs whose sizes differ by at most one."""
    parts = max(1, min(parts, count))
    bounds = [count * part // parts for part in range(parts + 1)]
    return list(itertools.pairwise(bounds))


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
    mask = torch.zeros(rows, seq_length, dtype=torch.bool)
    for row, sequence in enumerate(sequences):
        whole = sequence.prompt_ids + sequence.response_ids
        tokens[row, : len(whole)] = torch.tensor(whole)
        response = slice(len(sequence.prompt_ids) - 1, len(whole) - 1)  # position t predicts token t + 1
        mask[row, response] = True
        weights[row, response] = sequence.weight
        advantages[row, response] = sequence.advantage
        rollout[row, response] = torch.tensor(sequence.rollout_logprobs)
    return MicroBatch(
        tokens=tokens[:, :-1].contiguous(),
        labels=tokens[:, 1:].contiguous(),
        mask=mask,
        weights=weights,
        advantages=advantages,
        rollout_logprobs=rollout,
    )
