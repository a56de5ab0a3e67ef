"""Which rectangles of a source's parts are which rectangles of a target's: geometry, the same for every layer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from megatron_rl.resharding.layout import Layout
from megatron_rl.resharding.names import Entry
from megatron_rl.resharding.pieces import Part, Piece, parts

Unit = tuple[int, int]
"""Rows and columns of what must stay whole: (1, 1) is an element, (128, 128) a block of blockwise FP8."""


@dataclass(frozen=True, kw_only=True)
class Corner:
    """Where a rectangle begins in a tensor that somebody holds."""

    tensor: str
    """Its name, with `{layer}` in it."""

    row: int
    column: int


@dataclass(frozen=True, kw_only=True)
class Cut:
    """A rectangle that a target's TP rank takes from the source. 1-dimensional tensors have one column."""

    hf: str
    """The HF tensor that it is of, with `{layer}` in it."""

    rows: range
    columns: range
    """Of the HF tensor."""

    source: Corner
    holders: tuple[int, ...]
    """The TP ranks of the source that hold it."""

    target: Corner

    @property
    def elements(self) -> int:
        """How many it has."""
        return len(self.rows) * len(self.columns)

    def __str__(self) -> str:
        """Its place in the HF tensor."""
        columns = f", {self.columns.start}:{self.columns.stop}" if self.columns != range(1) else ""
        return f"{self.hf}[{self.rows.start}:{self.rows.stop}{columns}]"


def cuts(entry: Entry, source: Layout, target: Layout, tp_rank: int, *, most: int, unit: Unit) -> list[Cut]:
    """All that a TP rank of the target takes for a line of the table, in the order of its own rows.

    Args:
        entry: the line.
        source: who has it.
        target: who wants it.
        tp_rank: of the target.
        most: elements of a cut, at most.
        unit: what must stay whole.

    Raises:
        ValueError: a unit would be cut, or something of the target comes from nowhere or twice, by name.
    """
    held: dict[tuple[str, Piece], list[int]] = {}
    for holder in range(source.tensor):
        for part in parts(source.side, entry, source.shape, holder, source.tensor):
            for piece in part.pieces:
                held.setdefault((part.name, piece), []).append(holder)
    sizes = {tensor.name: tensor.size(target.shape) for tensor in entry.hf}
    found = []
    for part in parts(target.side, entry, target.shape, tp_rank, target.tensor):
        width = part.size[1] if len(part.size) > 1 else 1
        _check_stacked(part, padded=entry.fusion == "vocabulary")
        for wanted in part.pieces:
            of_piece = [
                cut
                for (name, piece), holders in held.items()
                if (cut := _common(part, wanted, name, piece, tuple(holders), width))
            ]
            _check_whole(of_piece, wanted, width)
            whole = unit if len(part.size) > 1 else (1, 1)  # vectors are not quantised
            _check_units(of_piece, sizes[wanted.hf], whole)
            found += [small for cut in of_piece for small in _split(cut, most, whole)]
    return found


def padding(part: Part) -> range:
    """The rows of a part that no piece fills: they are its last ones."""
    last = part.pieces[-1].shard_rows.stop if part.pieces else 0
    return range(last, part.size[0])


def _common(part: Part, wanted: Piece, name: str, piece: Piece, holders: tuple[int, ...], width: int) -> Cut | None:
    rows = _both(wanted.rows, piece.rows)
    if piece.hf != wanted.hf or not rows:
        return None
    # All columns of a part are those of its piece, so None, all columns, is the part's width if both have all.
    whole = range(width) if wanted.columns is None else wanted.columns
    columns = whole if piece.columns is None else _both(whole, piece.columns)
    if not columns:
        return None
    return Cut(
        hf=piece.hf,
        rows=rows,
        columns=columns,
        source=_corner(name, piece, rows, columns),
        holders=holders,
        target=_corner(part.name, wanted, rows, columns),
    )


def _corner(tensor: str, piece: Piece, rows: range, columns: range) -> Corner:
    first_column = piece.columns.start if piece.columns else 0
    return Corner(tensor=tensor, row=piece.at + rows.start - piece.rows.start, column=columns.start - first_column)


def _both(one: range, other: range) -> range:
    return range(max(one.start, other.start), min(one.stop, other.stop))


def _check_stacked(part: Part, *, padded: bool) -> None:
    """Pieces fill all rows, one behind the other; only a vocabulary has padding, behind them."""
    end = 0
    for piece in part.pieces:
        if piece.at != end:
            raise ValueError(f"{part.name}: {piece.hf} begins in row {piece.at}, where what is before it ends in {end}")
        end += len(piece.rows)
    if end > part.size[0] or (end < part.size[0] and not padded):
        raise ValueError(f"{part.name}: its pieces have {end} rows, and it has {part.size[0]}")


def _check_whole(found: list[Cut], wanted: Piece, width: int) -> None:
    """Every element of a piece comes from one place."""
    missing = len(wanted.rows) * width - sum(cut.elements for cut in found)
    twice = any(
        _both(one.rows, other.rows) and _both(one.columns, other.columns)
        for number, one in enumerate(found)
        for other in found[:number]
    )
    if missing or twice:
        raise ValueError(f"{wanted.hf}: {missing} elements of rows {wanted.rows} have no source, or some have two")


def _check_units(found: list[Cut], size: tuple[int, ...], unit: Unit) -> None:
    """No unit comes from two places, or goes to two; the last one of a tensor may be smaller."""
    for cut in found:
        for span, step, end in zip((cut.rows, cut.columns), unit, size, strict=False):
            if span.start % step or (span.stop % step and span.stop != end):
                raise ValueError(f"{cut}: the layouts cut a unit of {unit[0]} × {unit[1]}; choose other TP sizes")


def _split(cut: Cut, most: int, unit: Unit) -> Iterator[Cut]:
    """Cuts of at most `most` elements, or of one unit: of whole rows where a row of units fits in it."""
    if cut.elements <= most:
        yield cut
        return
    width = min(len(cut.columns), max(1, most // unit[0] // unit[1]) * unit[1])
    height = max(1, most // width // unit[0]) * unit[0] if width == len(cut.columns) else unit[0]
    for row in range(0, len(cut.rows), height):
        for column in range(0, len(cut.columns), width):
            yield replace(
                cut,
                rows=cut.rows[row : row + height],
                columns=cut.columns[column : column + width],
                source=_moved(cut.source, row, column),
                target=_moved(cut.target, row, column),
            )


def _moved(corner: Corner, rows: int, columns: int) -> Corner:
    return replace(corner, row=corner.row + rows, column=corner.column + columns)
