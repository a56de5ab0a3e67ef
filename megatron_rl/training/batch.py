"""Kept groups to the training batch: rewards, advantages, loss weights. Pure: alike on all ranks."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.algorithms.advantages import group_advantages
from megatron_rl.algorithms.attribution import gradient_shares
from megatron_rl.algorithms.filters import load_filter
from megatron_rl.algorithms.shaping import soft_overlong_penalty
from megatron_rl.algorithms.weights import loss_weights
from megatron_rl.config import AlgorithmConfig, Config
from megatron_rl.errors import UserError
from megatron_rl.functions import trying
from megatron_rl.presets import PRESETS
from megatron_rl.types import Graded, Group, Prompt, TrainBatch, TrainedResponse

COMPARED = ("grpo", "dapo", "dr_grpo")
"""Objectives whose gradient shares are measured beside the configured one's, on the same batch."""


@dataclass(frozen=True, kw_only=True)
class _Responses:
    """All responses of the batch as columns, `[responses]`."""

    group_ids: Tensor
    scores: Tensor
    lengths: Tensor
    trained_lengths: Tensor
    """0 where a response is not trained on."""

    rewards: Tensor
    """After shaping; NaN where ungraded."""


def make_batch(groups: Sequence[Group], config: Config, kl: Sequence[float] | None = None) -> TrainBatch:
    """Rewards, advantages and loss weights of a rollout step, cut at group boundaries into its optimizer steps.

    Args:
        groups: the kept groups, in prompt order; not empty.
        config: of the run; `algorithm` and `rewards` decide.
        kl: divergence from the reference policy, summed over each response, where it is taken from the reward.
    """
    columns = _columns(groups, config, kl)
    cuts = _cut(len(groups), config.algorithm.updates_per_rollout)
    advantages, weights = _terms(columns, config, config.algorithm, cuts)
    responses = [graded for group in groups for graded in group.responses]
    ids = columns.group_ids.tolist()
    trained = [
        TrainedResponse(
            prompt_ids=groups[group].prompt.ids,
            length=one.length,
            home=one.home,
            response=one.response,
            advantage=advantage,
            weight=weight,
            group=group,
            number=number,
        )
        for number, (one, group, advantage, weight) in enumerate(
            zip(responses, ids, advantages.tolist(), weights.tolist(), strict=True)
        )
    ]
    updates = tuple(tuple(one for one in trained if first <= one.group < last) for first, last in cuts)
    metrics = _metrics(columns, config, cuts, advantages, weights)
    if kl is not None:
        metrics["batch/kl"] = (sum(kl), float(columns.lengths.sum()))
    return TrainBatch(updates=updates, metrics=metrics)


def try_batch(config: Config) -> None:
    """Make a batch of two made-up groups, so that a wrong function is known before anything is sampled.

    Raises:
        UserError: an advantage, normalisation or filter of the user's isn't there, or returned something wrong.
    """
    answers = [
        Graded(length=length, finish_reason="stop", score=float(length % 2))
        for length in range(1, config.rollout.responses_per_prompt + 1)
    ]
    prompt = Prompt(index=0, text="", ids=(0,), answer="")
    groups = [Group(prompt=prompt, responses=tuple(part)) for part in (answers, answers[:2])]
    algorithm = config.algorithm
    with trying(f"algorithm.advantage: {algorithm.advantage}"):
        columns = _columns(groups, config, None)
        _advantages(columns, algorithm)
    with trying(f"algorithm.normalisation: {algorithm.normalisation}"):
        make_batch(groups, config)
    load_filter(algorithm.group_filter)([0.0, 1.0])


def untrained(groups: Sequence[Group]) -> list[TrainedResponse]:
    """All responses of the groups as the trainer sees them, to be scored only."""
    pairs = [(group, graded) for group, members in enumerate(groups) for graded in members.responses]
    return [
        TrainedResponse(
            prompt_ids=groups[group].prompt.ids,
            length=one.length,
            home=one.home,
            response=one.response,
            advantage=0.0,
            weight=1.0,
            group=group,
            number=number,
        )
        for number, (group, one) in enumerate(pairs)
    ]


def _columns(groups: Sequence[Group], config: Config, kl: Sequence[float] | None) -> _Responses:
    graded = [graded for group in groups for graded in group.responses]
    lengths = torch.tensor([one.length for one in graded])
    scores = torch.tensor([one.score for one in graded], dtype=torch.float64)
    algorithm = config.algorithm
    rewards = config.rewards.wrong + (config.rewards.right - config.rewards.wrong) * scores
    if algorithm.soft_overlong:
        soft, budget = algorithm.soft_overlong, config.rollout.max_response_tokens
        rewards = rewards + soft_overlong_penalty(lengths, max_length=budget, buffer=soft.buffer, floor=soft.floor)
    if kl is not None:
        if not math.isfinite(sum(kl)):
            raise UserError("algorithm.kl: the divergence of a response is not finite; see megatron-rl replay")
        rewards = rewards - algorithm.kl.coef * torch.tensor(kl, dtype=torch.float64)
    untrained = scores.isnan()
    if algorithm.mask_truncated:
        untrained |= torch.tensor([one.finish_reason != "stop" for one in graded])
    return _Responses(
        group_ids=torch.tensor([number for number, group in enumerate(groups) for _ in group.responses]),
        scores=scores,
        lengths=lengths,
        trained_lengths=torch.where(untrained, 0, lengths),
        rewards=rewards,
    )


def _terms(
    columns: _Responses, config: Config, algorithm: AlgorithmConfig, cuts: Sequence[tuple[int, int]]
) -> tuple[Tensor, Tensor]:
    """Advantages and loss weights of all responses, `[responses]`, as `algorithm` has them."""
    advantages = _advantages(columns, algorithm)
    weights = torch.zeros_like(columns.scores)
    for first, last in cuts:
        members = (columns.group_ids >= first) & (columns.group_ids < last)
        weights[members] = loss_weights(
            columns.trained_lengths[members],
            columns.group_ids[members],
            mode=algorithm.normalisation,
            budget=config.rollout.max_response_tokens,
        )
    return advantages, weights


def _advantages(columns: _Responses, algorithm: AlgorithmConfig) -> Tensor:
    return group_advantages(
        columns.rewards,
        columns.group_ids,
        estimator=algorithm.advantage,
        std_ddof=algorithm.std_ddof,
        std_eps=algorithm.std_eps,
        lengths=columns.lengths,
    )


def _metrics(
    columns: _Responses, config: Config, cuts: Sequence[tuple[int, int]], advantages: Tensor, weights: Tensor
) -> dict[str, tuple[float, float]]:
    graded = ~columns.scores.isnan()
    metrics = {
        "batch/groups": (float(len(columns.group_ids.unique())), 1.0),
        "batch/responses": (float(len(columns.lengths)), 1.0),
        "batch/tokens": (float(columns.trained_lengths.sum()), 1.0),
        "batch/reward": (float(columns.rewards[graded].sum()), float(graded.sum())),
        "batch/advantage_abs": (float(advantages.abs().sum()), float(graded.sum())),
    }
    compared = {"this": (advantages, weights)}
    for name in COMPARED:
        preset = {key: PRESETS[name].algorithm[key] for key in ("advantage", "normalisation")}
        compared[name] = _terms(columns, config, config.algorithm.model_copy(update=preset), cuts)
    for name, (of_advantages, of_weights) in compared.items():
        shares = gradient_shares(of_advantages, of_weights, columns.lengths, columns.scores, columns.group_ids)
        metrics |= {f"share_{name}/{share}": pair for share, pair in shares.items()}
    return metrics


def _cut(count: int, parts: int) -> list[tuple[int, int]]:
    """`count` groups in at most `parts` runs whose sizes differ by at most one."""
    parts = max(1, min(parts, count))
    bounds = [count * part // parts for part in range(parts + 1)]
    return list(itertools.pairwise(bounds))
