"""From prompts to the groups of a training batch: dynamic sampling, in prompt order."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from megatron_rl.algorithms.filters import load_filter
from megatron_rl.config import Config
from megatron_rl.data.stream import PromptStream
from megatron_rl.errors import UserError
from megatron_rl.rollout.engine import Sampling
from megatron_rl.rollout.figures import sampling_metrics
from megatron_rl.rollout.sampler import TRAINING_STREAM, Draw, GroupSampler
from megatron_rl.telemetry.metrics import MeanMetrics
from megatron_rl.types import Group


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """What a rollout step gives."""

    groups: tuple[Group, ...]
    """The training batch, in prompt order; fewer than asked for when the rounds ran out."""

    sampled: tuple[Group, ...]
    """All groups that were sampled for it, those left out too."""

    metrics: MeanMetrics


class Collector:
    """Draws prompts until a batch is full of groups that teach something."""

    def __init__(
        self, sampler: GroupSampler, stream: PromptStream, config: Config, warn: Callable[[str], None]
    ) -> None:
        """Collect from `stream`; `warn` is told, on every rank, when a batch stays short."""
        self.sampler, self.stream, self.config, self.warn = sampler, stream, config, warn
        self.keeps = load_filter(config.algorithm.group_filter)

    def collect(self, step: int) -> Rollout:
        """The groups of rollout step `step`. A collective; the same on every rank.

        With `algorithm.dynamic_sampling` groups that are all right or all wrong are left out and further prompts drawn,
        at most `rollout.max_rounds` times. Kept groups beyond the batch are counted as surplus.
        """
        rollout, dynamic = self.config.rollout, self.config.algorithm.dynamic_sampling
        sampling = Sampling(temperature=rollout.temperature)
        sampled: list[Group] = []
        kept: list[Group] = []
        rounds = 0
        while len(kept) < rollout.prompts_per_step and rounds < (rollout.max_rounds if dynamic else 1):
            count = self._next_draws(len(kept), len(sampled))
            draws = [
                Draw(place=(TRAINING_STREAM, step, position), prompt=prompt)
                for position, prompt in self.stream.draw(count)
            ]
            groups = self.sampler.sample(
                draws,
                responses=rollout.responses_per_prompt,
                max_tokens=rollout.max_response_tokens,
                sampling=sampling,
            )
            sampled += groups
            kept += [group for group in groups if self._teaches(group)]
            rounds += 1
        if not any(group.graded_scores for group in sampled):
            raise UserError(
                f"rewards.grader: step {step}: none of {len(sampled)} groups could be graded (its failures are above); "
                "the run stops, its last checkpoint stays"
            )
        batch = kept[: rollout.prompts_per_step]
        if len(batch) < rollout.prompts_per_step:
            self.warn(
                f"step {step}: {len(batch)} of {rollout.prompts_per_step} groups kept in {rounds} rounds of sampling; "
                "training on these"
            )
        metrics = sampling_metrics(sampled)
        metrics.add("rollout/rounds", rounds)
        metrics.add("rollout/groups_kept", len(batch))
        metrics.add("rollout/groups_surplus", len(kept) - len(batch))
        return Rollout(groups=tuple(batch), sampled=tuple(sampled), metrics=metrics)

    def _teaches(self, group: Group) -> bool:
        """Whether a group is trained on: an advantage compares at least two grades."""
        scores = group.graded_scores
        return len(scores) > 1 and (not self.config.algorithm.dynamic_sampling or self.keeps(scores))

    def _next_draws(self, kept: int, sampled: int) -> int:
        """How many prompts should fill the batch, by the share that was kept so far; never more than a batch."""
        wanted = self.config.rollout.prompts_per_step
        if not sampled:
            return wanted
        return min(wanted, math.ceil((wanted - kept) * sampled / max(kept, 1)))
