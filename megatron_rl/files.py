"""Files that are whole or not there."""

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
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
