"""Checkpoints of Megatron's, read by the rectangles of HF tensors: the table of names once more, backwards."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from megatron_rl.errors import UserError
from megatron_rl.resharding.hf_files import HfReader
from megatron_rl.resharding.names import Entry, Shape, hf_shapes, parameters
from megatron_rl.resharding.pieces import Piece, parts
from megatron_rl.resharding.torch_dist import ChunkReader, is_torch_dist


def open_weights(directory: Path, shape: Shape) -> HfReader | MegatronReader:
    """A model's weights in either format.

    Raises:
        UserError: a file or tensor is missing, damaged, or has another shape than the model.
    """
    return MegatronReader(directory, shape) if is_torch_dist(directory) else HfReader(directory, shape)


@dataclass(frozen=True)
class Stacked:
    """A Megatron parameter as a checkpoint has it: layers lie in one tensor, a row of it each."""

    key: str
    front: tuple[int, ...]
    """Coordinates of the layer in front of the parameter's own."""


def stacked(name: str, layer: int) -> Stacked:
    """Where a parameter is, by its name in the table."""
    if layer < 0:
        return Stacked(name, ())
    return Stacked(name.replace("{layer}.", ""), (layer,))


def runs(entry: Entry, layer: int, shape: Shape) -> list[Piece]:
    """The pieces of HF tensors that make up the whole of a parameter, in order of their rows in it."""
    (part,) = parts("megatron", entry, shape, 0, 1)
    return [Piece(hf=one.hf.format(layer=layer), rows=one.rows, columns=one.columns, at=one.at) for one in part.pieces]


class MegatronReader:
    """Reads rectangles of HF tensors from a `torch_dist` checkpoint of any layout."""

    def __init__(self, directory: Path, shape: Shape) -> None:
        """Find every tensor.

        Raises:
            UserError: one is missing or has another shape than the model.
        """
        self.directory = directory
        self.chunks = ChunkReader(directory)
        self._homes: dict[str, tuple[Stacked, list[Piece]]] = {}
        self._sizes = sizes = hf_shapes(shape)
        for entry, layer in parameters(shape):
            home = self._find(entry, layer)
            pieces = runs(entry, layer, shape)
            self._check(home, entry, shape, sum(len(piece.rows) for piece in pieces), sizes[pieces[0].hf][1:])
            for piece in pieces:
                self._homes.setdefault(piece.hf, (home, []))[1].append(piece)

    def __enter__(self) -> MegatronReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.chunks.close()

    def _find(self, entry: Entry, layer: int) -> Stacked:
        """Under the name of the local layers, or of Transformer Engine's."""
        for name in (entry.megatron, entry.te):
            if name and (home := stacked(name, layer)).key in self.chunks.tensors:
                return home
        raise UserError(f"{self.directory}: tensor {stacked(entry.megatron, layer).key} is missing")

    def _check(self, home: Stacked, entry: Entry, shape: Shape, rows: int, rest: tuple[int, ...]) -> None:
        found = tuple(self.chunks.tensors[home.key].size)
        front = (shape.layers,) if home.front else ()
        padded = entry.fusion == "vocabulary" and len(found) == 2 and found[0] >= rows
        if found != (*front, rows, *rest) and not (padded and found[1:] == rest):
            raise UserError(
                f"{self.directory}: tensor {home.key} has shape {found}, config.json makes it {(*front, rows, *rest)}"
            )

    @property
    def unknown(self) -> list[str]:
        """Tensors that the model doesn't have; beside the weights an optimizer's state may lie here."""
        known = {home.key for home, _ in self._homes.values()}
        return sorted(key for key in self.chunks.tensors if key not in known and not key.startswith("optimizer."))

    def dtype(self, name: str) -> torch.dtype:
        """Of an HF tensor."""
        return self.chunks.dtype(self._homes[name][0].key)

    def regions(self, name: str, rows: range) -> Iterator[tuple[int, str, tuple[int, ...], int]]:
        """Rows of an HF tensor, as they lie one after another in tensors of the checkpoint.

        Yields:
            The first of these rows, the key, the offset of that row there, and how many follow each other.
        """
        home, pieces = self._homes[name]
        width = len(self.chunks.tensors[home.key].size) - len(home.front) - 1
        for piece in pieces:
            low, high = max(rows.start, piece.rows.start), min(rows.stop, piece.rows.stop)
            if low < high:
                at = piece.at + low - piece.rows.start
                yield low, home.key, (*home.front, at, *(0,) * width), high - low

    def read(self, name: str, index: tuple[slice, ...]) -> Tensor:
        """The rectangle `index` of an HF tensor."""
        size = self._sizes[name]
        bounds = [range(*one.indices(length)) for one, length in zip(index, size, strict=False)]
        bounds += [range(length) for length in size[len(bounds) :]]
        found = torch.empty([len(one) for one in bounds], dtype=self.dtype(name))
        for low, key, offset, count in self.regions(name, bounds[0]):
            into = found[low - bounds[0].start : low - bounds[0].start + count]
            begin = (*offset[: len(offset) - len(size) + 1], *(one.start for one in bounds[1:]))
            front = (1,) * (len(offset) - len(size))
            self.chunks.read(key, begin, into.view(*front, *into.shape))
        return found
