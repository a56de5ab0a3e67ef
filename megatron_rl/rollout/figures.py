"""Figures about sampled groups."""

import math
from collections.abc import Sequence

from megatron_rl.algorithms.filters import keep_group
from megatron_rl.telemetry.metrics import MeanMetrics
from megatron_rl.types import Group


def sampling_metrics(groups: Sequence[Group], prefix: str = "rollout") -> MeanMetrics:
    """Accuracy, lengths and counts of sampled groups, as (sum, weight)."""
    metrics = MeanMetrics()
    for group in groups:
        scores = group.graded_scores
        mixed = keep_group(scores)
        metrics.add(f"{prefix}/mixed_groups", mixed)
        metrics.add(f"{prefix}/all_right_groups", not mixed and bool(scores) and scores[0] >= 0.5)
        metrics.add(f"{prefix}/all_wrong_groups", not mixed and bool(scores) and scores[0] < 0.5)
        for answer in group.responses:
            length = answer.length
            metrics.add(f"{prefix}/length", length)
            metrics.add(f"{prefix}/truncated", answer.finish_reason == "length")
            metrics.add(f"{prefix}/aborted", answer.finish_reason == "abort")
            metrics.add(f"{prefix}/ungraded", math.isnan(answer.score))
            if not math.isnan(answer.score):
                metrics.add(f"{prefix}/accuracy", answer.score)
                metrics.add(f"{prefix}/length_{'right' if answer.score >= 0.5 else 'wrong'}", length)
    lengths = [answer.length for group in groups for answer in group.responses]
    metrics.add(f"{prefix}/samples", len(lengths))
    metrics.add(f"{prefix}/tokens", sum(lengths))
    return metrics
