"""Megatron to Hugging Face: bytes go from file to file, by the kernel where they lie in one piece."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import torch

from checkpoints_tools.hf_to_megatron import BLOCK_BYTES
from checkpoints_tools.progress import progress
from checkpoints_tools.source import dtype_of, find_source, refuse_unknown
from checkpoints_tools.target import new_directory
from megatron_rl.errors import UserError
from megatron_rl.resharding.hf_files import carry, plan_of
from megatron_rl.resharding.hf_writer import Files
from megatron_rl.resharding.megatron_files import MegatronReader
from megatron_rl.resharding.names import hf_shapes

FILE_BYTES = 5 * 10**9


def megatron_to_hf(
    source: Path, target: Path, dtype: torch.dtype | None = None, *, max_bytes: int = FILE_BYTES
) -> None:
    """Convert a directory, or the weights of a run's checkpoint.

    Args:
        source: in Megatron's `torch_dist` format, of any layout.
        target: to be made, in Hugging Face's format.
        dtype: of the weights; None: as they are.
        max_bytes: of a file.

    Raises:
        UserError: in one line; nothing is left under the name `target`.
    """
    found = find_source(source)
    if found.kind == "Hugging Face":
        raise UserError(f"{source}: is in Hugging Face's format already")
    with found.open() as reader:
        assert isinstance(reader, MegatronReader)
        refuse_unknown(found, reader)
        dtype = dtype_of(found, reader, dtype)
        planned = plan_of(found.spec.shape, dtype)
        total = sum(torch.Size(size).numel() for size, _ in planned.values()) * dtype.itemsize
        with new_directory(target) as partial, progress("converting", total) as done:
            carry(found.beside, partial, dtype)
            with Files(partial, planned, max_bytes=max_bytes) as files, _Writer(reader, files, done) as writer:
                for name, size in hf_shapes(found.spec.shape).items():
                    writer.write(name, size, dtype)


class _Writer:
    """Brings tensors from a checkpoint into files."""

    def __init__(self, reader: MegatronReader, files: Files, done: Callable[[int], None]) -> None:
        self._reader, self._files, self._done = reader, files, done
        self._stack = ExitStack()
        self._open: dict[Path, int] = {}

    def __enter__(self) -> _Writer:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def write(self, name: str, size: tuple[int, ...], dtype: torch.dtype) -> None:
        """A whole tensor."""
        row = torch.Size(size[1:]).numel() * dtype.itemsize
        as_it_is = self._reader.dtype(name) == dtype
        for low, key, offset, count in self._reader.regions(name, range(size[0])):
            if not (as_it_is and self._copy(name, low * row, key, offset, count, size[1:], row)):
                self._through_memory(name, range(low, low + count), row, dtype)
            self._done(count * row)

    def _copy(
        self, name: str, at: int, key: str, offset: tuple[int, ...], count: int, columns: tuple[int, ...], row: int
    ) -> bool:
        """Rows that lie in one piece in each of their chunks; False if they do not."""
        front = len(offset) - 1 - len(columns)
        parts = list(self._reader.chunks.overlaps(key, offset, (*(1,) * front, count, *columns)))
        if any(chunk.size[front + 1 :] != columns for chunk, _, _ in parts):
            return False
        if sum(here[front].stop - here[front].start for _, here, _ in parts) != count:
            raise UserError(f"{self._reader.directory}: tensor {key} is not whole")
        for chunk, here, there in parts:
            path, begins = self._reader.chunks.place(chunk)
            rows = here[front].stop - here[front].start
            self._files.copy(
                name, at + here[front].start * row, self._handle(path), begins + there[front].start * row, rows * row
            )
        return True

    def _through_memory(self, name: str, rows: range, row: int, dtype: torch.dtype) -> None:
        most = max(1, BLOCK_BYTES // row)
        for low in range(rows.start, rows.stop, most):
            block = self._reader.read(name, (slice(low, min(low + most, rows.stop)),))
            self._files.fill(name, low * row, block.to(dtype))

    def _handle(self, path: Path) -> int:
        if path not in self._open:
            self._open[path] = os.open(path, os.O_RDONLY)
            self._stack.callback(os.close, self._open[path])
        return self._open[path]


if __name__ == "__main__":
    from checkpoints_tools.command import run_alone

    run_alone("megatron-to-hf")
