"""Whether a directory of files is whole: their sizes and checksums, in a file that is written last."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megatron_rl.files import replace_text

NAME = "manifest.json"
_BLOCK = 1 << 24


def fingerprint(path: Path, meanwhile: Callable[[], None] = lambda: None) -> list[int]:
    """Size in bytes and CRC-32 of a file; `meanwhile` is called after each block."""
    size = checksum = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            size, checksum = size + len(block), zlib.crc32(block, checksum)
            meanwhile()
    return [size, checksum]


def write_manifest(directory: Path, fingerprints: Mapping[str, list[int]]) -> None:
    """Write what the files of a directory are, by name."""
    replace_text(directory / NAME, json.dumps({"files": dict(sorted(fingerprints.items()))}, indent=1))


def first_fault(directory: Path, *, number: int = 0, of: int = 1) -> str | None:
    """The first thing that is wrong with a directory, or None if it is as it was written.

    Args:
        directory: with a manifest.
        number: of `of` who share the work: each looks into some of the files.
        of: how many they are.

    Raises:
        OSError: a file is there and can't be read: that says nothing about what is in it.
    """
    manifest = directory / NAME
    try:
        files = _checked(json.loads(manifest.read_text()))
    except FileNotFoundError:
        return f"{manifest} is missing: it was not finished, or written by a version before there were any"
    except ValueError as error:
        return f"{manifest}: {error}"
    for place, (name, expected) in enumerate(files.items()):
        path = directory / name
        try:
            if (size := path.stat().st_size) != expected[0]:
                return f"{path} has {size} bytes, {expected[0]} were written"
            if place % of == number and fingerprint(path) != expected:
                return f"{path} has other bytes than were written"
        except FileNotFoundError:
            return f"{path} is missing"
    return None


def _checked(found: Any) -> dict[str, list[int]]:
    files = found.get("files") if isinstance(found, dict) else None
    if not isinstance(files, dict) or not files:
        raise ValueError("lists no files")
    for name, entry in files.items():
        if not (isinstance(entry, list) and len(entry) == 2 and all(type(value) is int for value in entry)):
            raise ValueError(f"{name!r} has no size and checksum")
    return files
