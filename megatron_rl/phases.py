"""A GPU is in one phase at a time: `sync`, `rollout` or `train`. This machine owns sleeping and waking."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Literal, Protocol

from megatron_rl.rollout.engine import Engine
from megatron_rl.telemetry.peak import Peak
from megatron_rl.training import cpu

GB = 1e9
Phase = Literal["start", "sync", "rollout", "train"]
_LEGAL: dict[Phase, tuple[Phase, ...]] = {
    "start": ("sync", "train"),
    "sync": ("rollout",),
    "rollout": ("rollout", "train"),  # again: evaluation, or a step without a batch
    "train": ("train", "sync"),  # again: a checkpoint
}


class Sleeper(Protocol):
    """The trainer's memory on the device; both calls do nothing where it is so already."""

    def sleep(self, *, keep_parameters: bool = False) -> None:
        """Give it back; of all but the parameters, if they are to be kept."""

    def wake(self) -> None:
        """Have it again as it was, gradients apart."""


class Phases:
    """Moves one rank from phase to phase; counts the seconds in each and looks at the memory in use."""

    def __init__(self, engine: Engine, trainer: Sleeper | None, *, separate: bool = False) -> None:
        """Begin with the engine asleep and the trainer awake.

        Args:
            engine: of this rank.
            trainer: its memory; None: it keeps that while the engine samples.
            separate: engine and trainer are on different GPUs: nobody sleeps, and phases come in any order.
        """
        self.engine, self.trainer, self.separate = engine, trainer, separate
        self.phase: Phase = "start"
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._peaks: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def enter(self, phase: Phase) -> Iterator[None]:
        """Be in `phase`. The engine sleeps in `train`, the trainer in `rollout`, and in `sync` but for its parameters.

        Once awake, the engine's weights are undefined until synced.

        Raises:
            RuntimeError: `phase` can't follow the one before.
        """
        if phase not in _LEGAL[self.phase] and not self.separate:
            raise RuntimeError(f"phase {phase} can't follow {self.phase}")
        begun = time.perf_counter()
        if phase == "train":
            if not self.separate:
                self.engine.sleep()
            if self.trainer:
                self.trainer.wake()
        elif self.trainer:
            self.trainer.sleep(keep_parameters=phase == "sync")
        if phase == "sync":
            self.engine.wake()
        elif phase == "rollout":
            self.engine.resume()
        self.phase = phase
        peak = Peak(partial(cpu.used_bytes, cpu.device()))  # a new thread would look at the first GPU
        with peak.watch():
            yield
        self._peaks[phase] = max(self._peaks[phase], peak.bytes / GB)
        self._seconds[phase] += time.perf_counter() - begun

    def take_seconds(self) -> dict[str, float]:
        """Seconds in each phase since the last call."""
        seconds = dict(self._seconds)
        self._seconds.clear()
        return seconds

    def take_peaks(self) -> dict[str, float]:
        """The most GB in use in each phase since the last call: on the device by all, on a CPU by this process."""
        peaks = dict(self._peaks)
        self._peaks.clear()
        return peaks
