"""The most memory in use while something runs, looked at now and then by a thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from megatron_rl.background import repeated


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
        """Look at it until the block ends; at its beginning and its end in any case, unless that is an exception."""
        with repeated(self._look, every_s=self._every_s, name="peak"):
            yield
        self._look()

    def _look(self) -> None:
        self.bytes = max(self.bytes, self._read())
