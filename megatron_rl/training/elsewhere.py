"""The trainer, seen from a rank that only samples: it hands over its tokens, and goes on."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from megatron_rl.rollout.delivery import deliver
from megatron_rl.telemetry.metrics import MeanMetrics
from megatron_rl.training.batch import untrained
from megatron_rl.training.sharing import Sharing
from megatron_rl.types import Group, TrainBatch, TrainedResponse


class TrainerElsewhere:
    """What the loop calls on a trainer; the collectives are those of `Trainer`."""

    memory = None

    def __init__(self, sharing: Sharing, everyone: dist.ProcessGroup) -> None:
        self.sharing, self.everyone = sharing, everyone
        self.updates_done = 0

    def train(self, batch: TrainBatch) -> MeanMetrics:
        """Hand over the tokens of all optimizer steps; they are taken while this rank samples on."""
        for update in batch.updates:
            self._deliver(update)
        self.updates_done += len(batch.updates)
        return MeanMetrics()

    def kl_of_responses(self, groups: Sequence[Group]) -> list[float] | None:
        """Hand over the tokens of all groups, where their divergence is taken from the reward. Returns None."""
        kl = self.sharing.config.algorithm.kl
        if kl.wanted and kl.place == "reward":
            self._deliver(untrained(groups))
        return None

    def score(self, sequences: Sequence[tuple[int, ...]]) -> list[tuple[float, ...]]:
        """Nothing; the ranks that train know."""
        return []

    def _deliver(self, update: Sequence[TrainedResponse]) -> None:
        deliver(update, self.sharing.wanted(self.sharing.scheduled(update)), group=self.everyone)
