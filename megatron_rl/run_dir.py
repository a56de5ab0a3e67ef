"""The run directory: checked before anything is started, and one run's alone while it runs."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from types import TracebackType
from typing import IO

from megatron_rl.errors import UserError

FOLDERS = ("checkpoints", "samples", "tensorboard", "batches", "hf", "engines")
FILES = ("config.yaml", "metrics.jsonl", "stop")


def check_run_dir(run_dir: Path) -> None:
    """Refuse a run directory that can't be written to, before hours have gone into a run.

    Raises:
        UserError: naming the path that stands in the way.
    """
    for path in (run_dir, *(run_dir / name for name in FOLDERS)):
        if path.exists() and not path.is_dir():
            raise UserError(f"run_dir: {path} is not a directory; move it away or choose another run_dir")
    for path in (run_dir / name for name in FILES):
        if path.is_dir():
            raise UserError(f"run_dir: {path} is a directory where a file is written; choose another run_dir")
    existing = next(path for path in (run_dir, *run_dir.absolute().parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise UserError(f"run_dir: {run_dir} can't be made or written to (see {existing})")


class RunLock:
    """Makes the directory and holds it until it is closed or the process ends, however it ends."""

    def __init__(self, run_dir: Path) -> None:
        """Take it.

        Raises:
            UserError: another process holds it, or it can't be made.
        """
        path = run_dir / ".lock"
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            self._file: IO[str] = path.open("a")
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"run_dir: another run is writing to {run_dir}; stop it or choose another run_dir"
            ) from None
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):  # a file system without locks
                raise UserError(f"run_dir: {path}: {error.strerror}") from None

    def __enter__(self) -> RunLock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
