"""Finding a server's processes by their open log file, which all of them inherit.

Their names, sessions and parents may change, and SGLang writes its processes' titles over their environment.
"""

import time
from pathlib import Path


def writing_to(log_file: Path) -> list[int]:
    """Living processes that have this file open."""
    found = set()
    for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if descriptor.readlink() == log_file:
                found.add(int(descriptor.parts[2]))
        except OSError:  # closed since, or another user's
            continue
    return sorted(found)


def left_behind(log_file: Path, within_s: float) -> list[int]:
    """Those that are still there after a while; returns at once when none is."""
    deadline = time.monotonic() + within_s
    while (found := writing_to(log_file)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return found
