"""Metrics as (sum, weight), so that they add up exactly over micro-batches, ranks and updates."""

from __future__ import annotations

from collections.abc import Mapping


class MeanMetrics:
    """Named weighted means that are still sums."""

    def __init__(self, pairs: Mapping[str, tuple[float, float]] | None = None) -> None:
        self.pairs: dict[str, tuple[float, float]] = dict(pairs or {})

    def add(self, name: str, total: float, weight: float = 1.0) -> None:
        """Add `total`, a sum over `weight` things."""
        old = self.pairs.get(name, (0.0, 0.0))
        self.pairs[name] = (old[0] + total, old[1] + weight)

    def merge(self, other: MeanMetrics | Mapping[str, tuple[float, float]]) -> None:
        """Add everything of another, or of plain (sum, weight) pairs."""
        for name, (total, weight) in (other.pairs if isinstance(other, MeanMetrics) else other).items():
            self.add(name, total, weight)

    def values(self) -> dict[str, float]:
        """Name to mean; a metric of nothing is left out."""
        return {name: total / weight for name, (total, weight) in self.pairs.items() if weight}
