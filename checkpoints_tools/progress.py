"""How far a conversion is, at which rate, and how long it will take."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show bytes done of `total` on the terminal; nothing where there is none. Gives what is told of further bytes."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    console = Console(stderr=True, quiet=not sys.stderr.isatty())
    with Progress(*columns, TimeRemainingColumn(), console=console) as bar:
        task = bar.add_task(what, total=total)
        yield lambda count: bar.advance(task, count)
