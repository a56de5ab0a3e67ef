"""A directory that is whole or not there, and one process's alone while it is made."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_rl.errors import UserError, first_cause
from megatron_rl.files import sync

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
"""What a file system without locks says."""


@contextmanager
def new_directory(target: Path) -> Iterator[Path]:
    """Give a directory to write into, which gets the name `target` when the block ends without an error.

    What a conversion that was killed has left is removed.

    Raises:
        UserError: `target` is there already, another process is making it, or something can't be written; then nothing
            is left of it.
    """
    partial = target.with_name(f".{target.name}.converting")
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise UserError(f"{target}: is there already; remove it or choose another name")
    handle = -1
    try:
        handle = _take(partial, target)
        yield partial
        sync(partial)
        if target.exists():
            target.rmdir()
        partial.rename(target)
        sync(target.absolute().parent)
    except Exception as error:
        if handle >= 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise UserError(_told(target, error)) from error
    except BaseException:  # Ctrl-C
        if handle >= 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise
    finally:
        if handle >= 0:
            os.close(handle)


def _take(partial: Path, target: Path) -> int:
    """Make the directory and lock it; what was there goes, unless somebody writes to it."""
    if partial.exists():
        old = os.open(partial, os.O_RDONLY)
        try:
            _lock(old, target)
            shutil.rmtree(partial)
        finally:
            os.close(old)
    partial.mkdir(parents=True)
    handle = os.open(partial, os.O_RDONLY)
    _lock(handle, target)
    return handle


def _lock(handle: int, target: Path) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(f"{target}: another process is writing it; wait for it or choose another name") from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise


def _told(target: Path, error: Exception) -> str:
    cause = first_cause(error)
    return cause if isinstance(error, UserError) else f"{target} could not be written: {cause}"
