"""Processes that graders run in: spawned, ended at once, and never outliving the trainer."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from contextlib import suppress
from multiprocessing.context import SpawnContext, SpawnProcess
from types import ModuleType

LAST_WORDS_S = 0.5
"""How long a process that ended by itself counts as alive. pebble looks for its task among those that it knows to be
begun; a busy trainer may not have read yet that this one was, and the task would be lost until its deadline."""

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


class GraderProcess(SpawnProcess):
    """A process of a grader. It leads a process group, so that what the grader started is ended with it."""

    _killed = False
    _ended = 0.0

    def start(self) -> None:
        """Start it without the program's main module, which spawned processes import otherwise: that may be heavy.

        The module is put back before anything else can miss it.
        """
        main = sys.modules["__main__"]
        sys.modules["__main__"] = ModuleType("__main__")
        try:
            super().start()
        finally:
            sys.modules["__main__"] = main

    def is_alive(self) -> bool:
        """Whether it runs, or its last words may be unread."""
        if super().is_alive():
            return True
        self._ended = self._ended or time.monotonic()
        return not self._killed and time.monotonic() < self._ended + LAST_WORDS_S

    def terminate(self) -> None:
        """Kill it: a hung grader is deaf to anything less, and the pool stands still until it is gone."""
        self._killed = True
        if self.pid and self.is_alive():
            with suppress(ProcessLookupError):  # it has only begun, and leads no group yet
                os.killpg(self.pid, signal.SIGKILL)
            self.kill()


class GraderContext(SpawnContext):
    """Spawns graders' processes: a fork of a process with CUDA and threads is unusable, and large."""

    Process = GraderProcess


def settle_in(parent: int) -> None:
    """In a new process: lead a group, leave the end to the trainer, and die with it.

    Signals that are meant for the trainer reach all processes of a job: Ctrl-C in a terminal, SIGTERM from Slurm. The
    trainer ends the pool when it is time; a process that ends in the middle of a message would leave the pool locked.
    """
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before the kernel was asked to tell
        os._exit(1)
