"""Where the elements of HF tensors lie in what a rank of Megatron, a rank of SGLang, or an HF checkpoint holds.

Each tensor that somebody holds (a *part*) is a concatenation of rectangles of HF tensors (*pieces*), and perhaps of
padding. The coordinates of HF tensors are what all sides have in common.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from megatron_rl.resharding.names import Entry, Shape

Side = Literal["megatron", "sglang", "hf"]

_SGLANG_ROWS = 64
"""SGLang pads a vocabulary to a multiple of this, which TP must divide (`DEFAULT_VOCAB_PADDING_SIZE`)."""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """The rectangle `hf[rows.start:rows.stop, columns.start:columns.stop]`, at row `at` of a part."""

    hf: str
    rows: range
    columns: range | None
    """None: all columns, or the tensor has one dimension."""

    at: int

    @property
    def index(self) -> tuple[slice, ...]:
        """The rectangle in the HF tensor."""
        rows = slice(self.rows.start, self.rows.stop)
        return (rows,) if self.columns is None else (rows, slice(self.columns.start, self.columns.stop))

    @property
    def shard_rows(self) -> slice:
        """The rows of the part that it fills, over all of the part's columns."""
        return slice(self.at, self.at + len(self.rows))


@dataclass(frozen=True, kw_only=True)
class Part:
    """A tensor that a rank holds: its name and pieces, with `{layer}` in them, and its shape."""

    name: str
    size: tuple[int, ...]
    pieces: tuple[Piece, ...]
    """In the order of their rows. Rows that no piece fills are padding of the vocabulary."""


def parts(side: Side, entry: Entry, shape: Shape, tp_rank: int = 0, tp_size: int = 1) -> list[Part]:
    """What one TP rank holds of a line of the table: one tensor, or, in an HF checkpoint, each of its tensors."""
    sizes = [tensor.size(shape) for tensor in entry.hf]
    if side == "hf":
        return [
            Part(name=tensor.name, size=size, pieces=(_whole(tensor.name, size),))
            for tensor, size in zip(entry.hf, sizes, strict=True)
        ]
    name = entry.megatron if side == "megatron" else entry.sglang
    if entry.fusion == "columns":
        columns = _share(sizes[0][1], tp_rank, tp_size)
        piece = replace(_whole(entry.hf[0].name, sizes[0]), columns=columns)
        return [Part(name=name, size=(sizes[0][0], len(columns)), pieces=(piece,))]
    cuts = _cuts(side, entry, shape, tp_rank, tp_size)
    rows = sum(len(rows) for _, rows in cuts)
    if entry.fusion == "vocabulary":
        rows = _padded_vocab(side, shape, tp_size) // tp_size
    stacked = tuple(_stack([tensor.name for tensor in entry.hf], cuts))
    return [Part(name=name, size=(rows, *sizes[0][1:]), pieces=stacked)]


def pieces(entry: Entry, layer: int, shape: Shape, tp_rank: int, tp_size: int) -> list[Piece]:
    """The pieces that make up one rank's shard of a Megatron parameter, in order of their rows in it."""
    (part,) = parts("megatron", entry, shape, tp_rank, tp_size)
    return [replace(piece, hf=piece.hf.format(layer=layer)) for piece in part.pieces]


def shard_shape(entry: Entry, shape: Shape, tp_size: int) -> tuple[int, ...]:
    """Shape of one TP rank's shard of a Megatron parameter, padding included."""
    return parts("megatron", entry, shape, 0, tp_size)[0].size


def _padded_vocab(side: Side, shape: Shape, tp_size: int) -> int:
    if side == "megatron":
        return shape.padded_vocab(tp_size)
    multiple = _SGLANG_ROWS if _up(shape.vocab, _SGLANG_ROWS) % tp_size == 0 else _SGLANG_ROWS * tp_size
    return _up(shape.vocab, multiple)


def _cuts(side: Side, entry: Entry, shape: Shape, tp_rank: int, tp_size: int) -> list[tuple[int, range]]:
    """(which HF tensor, its rows), in the order in which they are stacked."""
    sizes = [tensor.size(shape)[0] for tensor in entry.hf]
    if entry.fusion == "whole":
        return [(0, range(sizes[0]))]
    if entry.fusion == "vocabulary":
        rows = _share(_padded_vocab(side, shape, tp_size), tp_rank, tp_size)
        return [(0, range(min(rows.start, shape.vocab), min(rows.stop, shape.vocab)))]
    if entry.fusion == "gate_up":
        return [(which, _share(size, tp_rank, tp_size)) for which, size in enumerate(sizes)]
    if side == "megatron":
        return list(_within(_by_group(shape), _share(sum(sizes), tp_rank, tp_size)))
    repeated = max(1, tp_size // shape.kv_heads)  # ranks that share a key head
    keys = _share(shape.key, tp_rank // repeated, tp_size // repeated)
    return [(0, _share(shape.query, tp_rank, tp_size)), (1, keys), (2, keys)]


def _by_group(shape: Shape) -> Iterator[tuple[int, range]]:
    """Rows of the query, key and value projection as Megatron fuses them: one query group after another."""
    of_query = shape.query // shape.kv_heads
    for group in range(shape.kv_heads):
        for which, rows in enumerate((of_query, shape.head_dim, shape.head_dim)):
            yield which, range(group * rows, (group + 1) * rows)


def _within(runs: Iterator[tuple[int, range]], wanted: range) -> Iterator[tuple[int, range]]:
    """The part of stacked runs of rows that lies in the rows `wanted` of the stack."""
    at = 0
    for which, rows in runs:
        kept = rows[max(wanted.start - at, 0) : max(wanted.stop - at, 0)]
        if kept:
            yield which, kept
        at += len(rows)


def _whole(name: str, size: tuple[int, ...]) -> Piece:
    return Piece(hf=name, rows=range(size[0]), columns=None, at=0)


def _up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def _share(size: int, rank: int, parts: int) -> range:
    step = size // parts
    return range(rank * step, (rank + 1) * step)


def _stack(names: Sequence[str], cuts: Sequence[tuple[int, range]]) -> Iterator[Piece]:
    at = 0
    for which, rows in cuts:
        if rows:
            yield Piece(hf=names[which], rows=rows, columns=None, at=at)
        at += len(rows)
