"""Files that are whole or not there."""

import os
from pathlib import Path


def replace_text(path: Path, text: str) -> None:
    """Write a file so that a reader, or a crash, never sees half of it."""
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
