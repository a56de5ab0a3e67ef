"""Safetensors files of bounded size: their headers are known before any data, which comes in any order."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from megatron_rl.files import sync

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
Planned = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
"""Those that a model's weights may have here, and their names in a header."""

_CANNOT = (errno.EPERM, errno.EXDEV, errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EBADF)
"""What the kernel says where it can't copy from file to file itself."""

_BLOCK = 1 << 24


@dataclass(frozen=True)
class _Place:
    file: str
    start: int
    size: int


class Files:
    """The weights of an HF directory. A context: left without an error, every byte must have been filled in."""

    def __init__(self, directory: Path, planned: Planned, *, max_bytes: int = 5 * 10**9) -> None:
        """Make the files, empty but for their headers.

        Args:
            directory: that is there.
            planned: shape and dtype of each tensor, in the order in which they come into files.
            max_bytes: of the tensors in a file; a larger tensor has one of its own.
        """
        self._directory = directory
        groups = _groups(planned, max_bytes)
        names = [SINGLE] if len(groups) == 1 else [_name(number, len(groups)) for number in range(len(groups))]
        self._places: dict[str, _Place] = {}
        self._missing: dict[str, int] = {}
        self._open: dict[str, int] = {}
        for file, group in zip(names, groups, strict=True):
            self._begin(file, group, planned)

    def _begin(self, file: str, group: list[str], planned: Planned) -> None:
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        ends = 0
        for name in group:
            begins, ends = ends, ends + _size(planned[name])
            shape, dtype = planned[name]
            header[name] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [begins, ends]}
            self._places[name] = _Place(file, begins, ends - begins)
            self._missing[name] = ends - begins
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        handle = os.open(self._directory / file, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666)
        self._open[file] = handle
        _write(handle, memoryview(len(text).to_bytes(8, "little") + text), 0)
        for name in group:
            place = self._places[name]
            self._places[name] = _Place(file, place.start + 8 + len(text), place.size)

    def __enter__(self) -> Files:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._finish()
        finally:
            for handle in self._open.values():
                os.close(handle)

    def fill(self, name: str, at: int, data: Tensor) -> None:
        """Write contiguous data into a tensor, from its byte `at` on."""
        view = memoryview(data.contiguous().view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
        place = self._places[name]
        _write(self._open[place.file], view, place.start + at)
        self._missing[name] -= len(view)

    def copy(self, name: str, at: int, source: int, offset: int, size: int) -> None:
        """Copy bytes of the open file `source` into a tensor, from its byte `at` on."""
        place = self._places[name]
        _copy(source, offset, self._open[place.file], place.start + at, size)
        self._missing[name] -= size

    def _finish(self) -> None:
        for name, left in self._missing.items():
            if left:
                raise RuntimeError(f"{name}: {left} bytes were not written")
        for handle in self._open.values():
            os.fsync(handle)
        if SINGLE not in self._open:
            total = sum(place.size for place in self._places.values())
            weight_map = {name: place.file for name, place in self._places.items()}
            index = self._directory / INDEX
            index.write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2))
            sync(index)


def _groups(planned: Planned, max_bytes: int) -> list[list[str]]:
    groups: list[list[str]] = [[]]
    held = 0
    for name, what in planned.items():
        if groups[-1] and held + _size(what) > max_bytes:
            groups.append([])
            held = 0
        groups[-1].append(name)
        held += _size(what)
    return groups


def _size(what: tuple[tuple[int, ...], torch.dtype]) -> int:
    shape, dtype = what
    return torch.Size(shape).numel() * dtype.itemsize


def _name(number: int, files: int) -> str:
    return f"model-{number + 1:05d}-of-{files:05d}.safetensors"


def _write(handle: int, data: memoryview, at: int) -> None:
    while data:
        written = os.pwrite(handle, data[: 1 << 30], at)
        data, at = data[written:], at + written


def _copy(source: int, offset: int, target: int, at: int, size: int) -> None:
    """By the kernel where it can, else through memory."""
    while size:
        try:
            copied = os.copy_file_range(source, target, size, offset, at)
        except OSError as error:
            if error.errno not in _CANNOT:
                raise
            block = os.pread(source, min(size, _BLOCK), offset)
            copied = os.pwrite(target, block, at)
        if not copied:
            raise OSError(errno.EIO, "a file ends before its data")
        size, offset, at = size - copied, offset + copied, at + copied
