"""Copies slices straight into a model's parameters.

SGLang imports `load` as a custom weight loader; the embedded engine calls `apply`. In a server this file is all there
is of us, so it imports torch and nothing else.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

PADDING = -1
"""In place of an offset: the rectangle becomes 0."""

_CHUNK = 2**22
"""Elements whose digest is summed up at once: eight bytes each, while it lasts."""


def load(model: torch.nn.Module, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Take a bucket: SGLang's contract for a custom weight loader.

    Args:
        model: the TP rank's.
        named_tensors: `parameters`, the names that are spoken of, as bytes of text with a line each; `bucket` and
            `moves` as for `apply`; `report`, in memory of the trainer's rank, `[1 + digests]`: the number of a
            parameter that the model doesn't have, or has in another size, and then nothing is written (−1: none); and
            the digests of what was written, read back, or, without `moves`, those of the whole parameters; `[1]`:
            nobody wants them. Empty tensors are left out. An exception here would end the server.
    """
    given = dict(named_tensors)
    known = dict(model.named_parameters())
    names = bytes(given["parameters"].tolist()).decode().splitlines() if "parameters" in given else []
    report, moves = given["report"], given.get("moves", torch.empty(0, 6, dtype=torch.int64))
    wrong = _first_wrong(known, names, moves.tolist())
    report[0] = wrong
    if wrong < 0:
        parameters = [known[name] for name in names]
        if len(moves):
            report[1:] = apply(parameters, moves, given.get("bucket", moves), read_back=report.numel() > 1)
        elif report.numel() > 1:
            report[1:] = torch.stack([digest(parameter.data) for parameter in parameters])
    if report.is_cuda:  # the reply must not come before the copies are done
        torch.cuda.synchronize(report.device)


@torch.no_grad()
def apply(parameters: Sequence[Tensor], moves: Tensor, bucket: Tensor, *, read_back: bool) -> Tensor:
    """Write slices into parameters.

    Args:
        parameters: matrices, or vectors, which count as matrices of one column.
        moves: `[slices, 6]`: number of the parameter, first row, first column, rows, columns, and where in the bucket
            the slice begins, in bytes, row after row; or PADDING.
        bucket: bytes.
        read_back: whether to compute digests.

    Returns:
        The digest of each slice as it is in the parameter now, `[slices]`, or `[0]`.
    """
    digests = []
    for which, row, column, rows, columns, offset in moves.tolist():
        parameter = parameters[which]
        target = rectangle(parameter.data, row, column, rows, columns)
        if offset == PADDING:
            target.zero_()
        else:
            size = rows * columns * parameter.element_size()
            target.copy_(bucket[offset : offset + size].view(parameter.dtype).view(rows, columns))
        if read_back:
            digests.append(digest(target))
    return torch.stack(digests) if digests else torch.empty(0, dtype=torch.int64, device=bucket.device)


def _first_wrong(known: Mapping[str, Tensor], names: Sequence[str], moves: Sequence[Sequence[int]]) -> int:
    """The number of a name that is not known, or has no such rectangle; −1: there is none."""
    for number, name in enumerate(names):
        if name not in known:
            return number
    for which, row, column, rows, columns, _ in moves:
        shape = known[names[which]].shape
        if row + rows > shape[0] or column + columns > (*shape, 1)[1]:
            return which
    return -1


def rectangle(tensor: Tensor, row: int, column: int, rows: int, columns: int) -> Tensor:
    """A view `[rows, columns]` of a matrix, or of a vector, which counts as a matrix of one column."""
    matrix = tensor if tensor.ndim == 2 else tensor.unsqueeze(1)
    return matrix[row : row + rows, column : column + columns]


def digest(tensor: Tensor) -> Tensor:
    """A sum over all elements' bits, each times its place: another one when bits differ or trade places. int64."""
    words = {2: torch.int16, 4: torch.int32}[tensor.element_size()]
    flat = tensor.contiguous().view(-1).view(words)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, flat.numel(), _CHUNK):
        part = flat[start : start + _CHUNK].long()
        total += (part * torch.arange(start + 1, start + 1 + part.numel(), device=tensor.device)).sum()
    return total
