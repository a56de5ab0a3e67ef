"""Start several local processes of one command, and pass on how they ended.

torchrun's agent would do, but for stopping: it kills its workers 30 seconds after it was asked to stop, saved or not,
and its own exit code says nothing of theirs.
"""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from types import FrameType

GRACE_S = 20.0
"""How long the others may take to end after the first; a rank that failed is waited for in a collective."""


def launch_local(processes: int, arguments: Sequence[str]) -> int:
    """Run `python -m megatron_rl ARGUMENTS` in `processes` processes of one process group.

    SIGTERM or SIGINT (Ctrl-C) is passed on as SIGTERM: the run saves after its step and ends with 75. If this process
    is killed, the kernel sends its children SIGTERM.

    Returns:
        The exit code: 0, or that of the first process that failed (128 + n for signal n).
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {"WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    threads = os.environ.get("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    children: list[subprocess.Popen[bytes]] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        for child in children:
            child.send_signal(signal.SIGTERM)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        for rank in range(processes):
            place = {**shared, "RANK": rank, "LOCAL_RANK": rank, "OMP_NUM_THREADS": threads}
            children.append(
                subprocess.Popen(
                    [sys.executable, "-m", "megatron_rl", *arguments],
                    env={**os.environ, **{key: str(value) for key, value in place.items()}},
                    start_new_session=True,  # Ctrl-C in a terminal comes to us alone
                    preexec_fn=_stop_with_parent,
                )
            )
        return _wait(children)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait(children: Sequence["subprocess.Popen[bytes]"]) -> int:
    """Wait for all. They end together: after the first one the others get `GRACE_S`, then they are killed."""
    first, deadline = 0, float("inf")
    while True:
        codes = [child.poll() for child in children]
        first = first or next((code for code in codes if code), 0)
        if deadline == float("inf") and codes.count(None) < len(codes):
            deadline = time.monotonic() + GRACE_S
        if None not in codes:
            return first if first >= 0 else 128 - first
        if time.monotonic() > deadline:
            for child in children:
                child.kill()
        time.sleep(0.05)


_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)  # before any fork: loading it in a child of a process with threads could hang


def _stop_with_parent() -> None:
    """In the child: SIGTERM when the parent dies, however it dies."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
