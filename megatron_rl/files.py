"""Files that are whole or not there."""

import errno
import os
from pathlib import Path


def share(path: Path) -> None:
    """Let others read a file as the umask allows: some libraries make theirs for the owner alone."""
    umask = os.umask(0)
    os.umask(umask)
    path.chmod(0o666 & ~umask)


def replace_text(path: Path, text: str) -> None:
    """Write a file so that a reader, or a crash, never sees half of it."""
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_text(text, encoding="utf-8")
        sync(partial)  # before the name, or a power failure could leave the name without the text
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def sync(path: Path) -> None:
    """Have a file, or which names a directory holds, on the disk and not only in memory."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS) or not path.is_dir():
            raise  # some file systems can't do it for directories
    finally:
        os.close(handle)
