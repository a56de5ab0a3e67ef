"""Runs an SGLang server and outlives it, so that nothing of it is left behind. A script for SGLang's interpreter.

    python -P sglang_child.py PID ARGUMENTS...      (the keys come as a line of JSON on standard input)

PID is the process that started it. The server has children, they have children, some lead sessions of their own, and
none of them ends by itself when the server is killed. So this process is the reaper of them all: what loses its parent
becomes its child, wherever it went. It ends when the server ends, on SIGTERM, or when PID dies, however it dies, and
takes all of them along; so it does on SIGUSR1, at once: that server hangs. It imports the standard library only: its
interpreter may be another environment's.
"""

import ctypes
import json
import os
import runpy
import signal
import sys
import time
from pathlib import Path

GRACE_S = 8.0
"""How long the server may take to end by itself, which releases shared memory and GPUs in order. SGLang looks every 5
seconds whether it was asked to."""

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
_libc = ctypes.CDLL(None)


def main() -> int:
    """Run the server to its end.

    Returns:
        Its exit code, 128 + n for signal n; 0 if it was asked to end.
    """
    starter, arguments = int(sys.argv[1]), sys.argv[2:]
    awaited = {signal.SIGTERM, signal.SIGUSR1, signal.SIGCHLD}
    signal.pthread_sigmask(signal.SIG_BLOCK, awaited)  # they are waited for; nothing is ever interrupted
    _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    keys = sys.stdin.readline()
    if os.getppid() != starter or not keys:  # it died before the kernel was asked to tell
        return 0
    server = os.fork()
    if server == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, awaited)
        return _serve([*arguments, *(word for pair in json.loads(keys).items() for word in pair)])
    code, grace_s = None, GRACE_S
    while code is None:
        told = signal.sigwait(awaited)
        code = _reap().get(server) if told == signal.SIGCHLD else 0
        grace_s = 0.0 if told == signal.SIGUSR1 else GRACE_S
    _end_all(grace_s)
    return code


def _serve(arguments: list[str]) -> int:
    """In the child: be the server. Arguments that are set here show in no list of processes."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # should the parent be killed before it can clean up
    sys.argv = ["sglang.launch_server", *arguments]
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)
    return 0


def _reap() -> dict[int, int]:
    """Exit codes of the children that have ended, orphans of the server's among them."""
    codes: dict[int, int] = {}
    while True:
        try:
            child, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return codes
        if child == 0:
            return codes
        codes[child] = os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)


def _end_all(grace_s: float) -> None:
    """Ask all children to end, and kill what is there after a while: the children of those killed become ours."""
    deadline = time.monotonic() + grace_s
    asked: set[int] = set()
    while children := _children():
        late = time.monotonic() >= deadline
        for child in children if late else children - asked:
            os.kill(child, signal.SIGKILL if late else signal.SIGTERM)  # it can't be gone: only we reap it
            os.kill(child, signal.SIGCONT)  # a stopped one would not hear that it is asked
        asked |= children
        time.sleep(0.05)
        _reap()


def _children() -> set[int]:
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = stat.read_text()
        except OSError:  # it has ended since
            continue
        if int(text.rpartition(")")[2].split()[1]) == os.getpid():  # the name, in brackets, may have any letters
            found.add(int(stat.parent.name))
    return found


if __name__ == "__main__":
    sys.exit(main())
