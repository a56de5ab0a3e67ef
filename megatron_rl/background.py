"""Something done again and again by a thread while a block runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread


@contextmanager
def repeated(act: Callable[[], object], *, every_s: float, name: str) -> Iterator[None]:
    """Call `act` at once, then every so often in a thread of that name, until the block ends."""
    over = Event()

    def go_on() -> None:
        while not over.wait(every_s):
            act()

    act()
    thread = Thread(target=go_on, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
