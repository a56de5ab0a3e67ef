"""The wish to stop, as signals, a file or the clock bring it; what comes of it is decided between two steps."""

from __future__ import annotations

import signal
import time
from collections import deque
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import psutil

STOP_FILE = "stop"
"""In the run directory: a run that finds it stops after its step, and removes it."""

INSIST_S = 5.0
"""Schedulers and launchers send a signal to the same process more than once, within moments: that is one wish. Somebody
who asks again after this long wants out at once."""


class StopWish:
    """While it is entered, SIGTERM and SIGINT (Ctrl-C) set `asked` instead of ending the process."""

    def __init__(self) -> None:
        self.asked = False
        self._since = 0.0
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> StopWish:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._handlers[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if not self.asked:
            self.asked, self._since = True, time.monotonic()
        elif time.monotonic() - self._since > INSIST_S:
            signal.signal(number, self._handlers[number])
            signal.raise_signal(number)


class TimeBudget:
    """Says when there is no time left for another step and for saving it. One step is always made."""

    STEPS = 10

    def __init__(self, after_s: float | None, begun: float | None = None) -> None:
        """A budget for this process.

        Args:
            after_s: seconds since it began; None: any number.
            begun: when that was, in seconds since the epoch, if it is not to be looked up.
        """
        self.after_s = after_s
        self._begun = psutil.Process().create_time() if begun is None else begun
        self._steps: deque[float] = deque(maxlen=self.STEPS)
        self._last: float | None = None

    def spent(self, saving_s: float, now: float | None = None) -> str | None:
        """Called between two steps: why the next one would be too long, or None.

        The next step is taken to be as long as the longest of the last ten, with all that was done in between.

        Args:
            saving_s: how long it takes to save.
            now: seconds since the epoch, if it is not to be looked up.
        """
        now = time.time() if now is None else now
        if self._last is not None:
            self._steps.append(now - self._last)
        self._last = now
        if self.after_s is None:
            return None
        gone, step = now - self._begun, max(self._steps, default=0.0)
        if not self._steps:  # a budget that start-up uses up would be started again for ever, and never get on
            return None
        if gone + step + saving_s <= self.after_s:
            return None
        taken = f"a step takes up to {step:.0f} s, saving {saving_s:.0f} s"
        return f"stop.after: {gone:.0f} of {self.after_s:.0f} s are gone, {taken}"


def take_stop_file(run_dir: Path) -> bool:
    """Whether somebody has put the stop file there; it is removed, so that the next start goes on.

    One that may not be removed stops the run too, and the next one. A file system that is away for a moment does not.
    """
    try:
        (run_dir / STOP_FILE).unlink()
    except PermissionError:
        return True
    except OSError:
        return False
    return True
