"""Hugging Face to Megatron: each piece of a tensor is read when its turn to be written comes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from checkpoints_tools.progress import progress
from checkpoints_tools.source import dtype_of, find_source, refuse_unknown
from checkpoints_tools.target import new_directory
from megatron_rl.errors import UserError
from megatron_rl.files import sync
from megatron_rl.resharding.hf_files import HfReader, carry
from megatron_rl.resharding.megatron_files import MegatronReader, runs, stacked
from megatron_rl.resharding.names import Shape, parameters
from megatron_rl.resharding.torch_dist import Chunk, finish, nothings, write_chunks

BLOCK_BYTES = 128 * 10**6
"""Of a piece that is in memory at once."""


def hf_to_megatron(source: Path, target: Path, dtype: torch.dtype | None = None) -> None:
    """Convert a directory.

    Args:
        source: in Hugging Face's format.
        target: to be made, in Megatron's `torch_dist`, with config.json, tokenizer and the like beside the weights.
        dtype: of the weights; None: as they are.

    Raises:
        UserError: in one line; nothing is left under the name `target`.
    """
    found = find_source(source)
    if found.kind != "Hugging Face":
        raise UserError(f"{source}: is in Megatron's format already")
    with found.open() as reader:
        refuse_unknown(found, reader)
        dtype = dtype_of(found, reader, dtype)
        pieces = dict(_pieces(found.spec.shape, dtype))
        with new_directory(target) as partial, progress("converting", sum(one.bytes for one in pieces)) as done:
            carry(found.beside, partial, dtype)
            with _Ahead(reader, pieces, done) as ahead:
                empty = nothings(found.spec.shape.layers)
                results = write_chunks(partial, list(pieces), ahead.take, number=0, nothings=empty)
            finish(partial, pieces, [results], empty)
            for file in partial.iterdir():
                sync(file)


def _pieces(shape: Shape, dtype: torch.dtype) -> Iterator[tuple[Chunk, tuple[str, range]]]:
    """What is written, each with the rows of the HF tensor that it is, in forward order."""
    for entry, layer in parameters(shape):
        # Megatron's local layers use Transformer Engine's names in checkpoints, so that either loads the other's.
        home, pieces = stacked(entry.te or entry.megatron, layer), runs(entry, layer, shape)
        columns = entry.hf[0].size(shape)[1:]
        front = (shape.layers,) if home.front else ()
        whole = (*front, sum(len(piece.rows) for piece in pieces), *columns)
        most = max(1, BLOCK_BYTES // (torch.Size(columns).numel() * dtype.itemsize))
        for piece in pieces:
            for low in range(piece.rows.start, piece.rows.stop, most):
                rows = range(low, min(low + most, piece.rows.stop))
                at = piece.at + low - piece.rows.start
                chunk = Chunk(
                    key=home.key,
                    offset=(*home.front, at, *(0 for _ in columns)),
                    size=(*(1 for _ in front), len(rows), *columns),
                    whole=whole,
                    dtype=dtype,
                )
                yield chunk, (piece.hf, rows)


class _Ahead:
    """Reads the next piece while one is being written."""

    def __init__(
        self,
        reader: HfReader | MegatronReader,
        pieces: dict[Chunk, tuple[str, range]],
        done: Callable[[int], None],
    ) -> None:
        self._reader, self._pieces, self._done = reader, pieces, done
        self._order = iter(list(pieces))
        self._next: tuple[Chunk, Future[Tensor]] | None = None
        self._thread = ThreadPoolExecutor(1)

    def __enter__(self) -> _Ahead:
        self._begin()
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown(cancel_futures=True)

    def _begin(self) -> None:
        chunk = next(self._order, None)
        self._next = (chunk, self._thread.submit(self._read, chunk)) if chunk else None

    def _read(self, chunk: Chunk) -> Tensor:
        name, rows = self._pieces[chunk]
        found = self._reader.read(name, (slice(rows.start, rows.stop),))
        return found.to(chunk.dtype, copy=True)  # of its own: a view would be copied when its turn comes

    def take(self, chunk: Chunk) -> Tensor:
        """The data of a chunk; chunks are asked for in their order."""
        if self._next is None or self._next[0] != chunk:
            raise RuntimeError(f"{chunk} is not the next")
        found = self._next[1].result()
        self._begin()
        self._done(chunk.bytes)
        return found


if __name__ == "__main__":
    from checkpoints_tools.command import run_alone

    run_alone("hf-to-megatron")
