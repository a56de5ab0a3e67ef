"""A GPU is in one phase at a time: `sync`, `rollout` or `train`. This machine owns sleeping and waking."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from megatron_rl.rollout.engine import Engine

Phase = Literal["start", "sync", "rollout", "train"]
_LEGAL: dict[Phase, tuple[Phase, ...]] = {
    "start": ("sync",),
    "sync": ("rollout",),
    "rollout": ("rollout", "train"),  # again: evaluation, or a step without a batch
    "train": ("sync",),
}


class Phases:
    """Moves one rank from phase to phase and counts the seconds in each."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.phase: Phase = "start"
        self._seconds: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def enter(self, phase: Phase) -> Iterator[None]:
        """Be in `phase`; the engine sleeps while the trainer trains, and its weights are undefined until synced.

        Raises:
            RuntimeError: `phase` can't follow the one before.
        """
        if phase not in _LEGAL[self.phase]:
            raise RuntimeError(f"phase {phase} can't follow {self.phase}")
        begun = time.perf_counter()
        if phase == "train":
            self.engine.sleep()
        elif phase == "sync":
            self.engine.wake()
        self.phase = phase
        yield
        self._seconds[phase] += time.perf_counter() - begun

    def take_seconds(self) -> dict[str, float]:
        """Seconds in each phase since the last call."""
        seconds = dict(self._seconds)
        self._seconds.clear()
        return seconds
