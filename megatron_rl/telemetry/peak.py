"""The most memory in use while something runs, looked at now and then by a thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Peak:
    """The largest value seen. GPU libraries count their own process only; several share a GPU here."""

    def __init__(self, read: Callable[[], int], every_s: float = 0.25) -> None:
        """Describe it.

        Args:
            read: the bytes in use now; called from another thread too.
            every_s: between two looks. What comes and goes in between is missed.
        """
        self._read, self._every_s = read, every_s
        self.bytes = 0

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Look at it until the block ends, at its beginning and its end in any case."""
        over = threading.Event()

        def look() -> None:
            self.bytes = max(self.bytes, self._read())

        def go_on_looking() -> None:
            while not over.wait(self._every_s):
                look()

        look()
        thread = threading.Thread(target=go_on_looking, name="peak", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
            look()
