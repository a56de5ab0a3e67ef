"""The wish to stop, as signals bring it; what comes of it is decided between two steps."""

from __future__ import annotations

import signal
import time
from types import FrameType, TracebackType
from typing import Any

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
