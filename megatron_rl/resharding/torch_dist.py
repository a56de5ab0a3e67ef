"""Megatron's distributed checkpoints (`torch_dist`): rectangles of tensors, written and read one at a time.

torch's file writer writes them, behind a plan of our own that makes each tensor when its turn comes, so that nobody
holds more than one. Any reader of the format reads them, Megatron's too: a tensor may be cut into any rectangles. Read
back, files are mapped, and only what is asked for is touched.
"""

from __future__ import annotations

import io
import json
import mmap
import os
import zipfile
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, Metadata, SavePlan, SavePlanner
from torch.distributed.checkpoint.filesystem import _StoragePrefix
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import BytesIOWriteData, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from megatron_rl.errors import UserError

COMMON = "common.pt"
_FORMAT = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
"""What Megatron looks for in `metadata.json`."""


@dataclass(frozen=True)
class Chunk:
    """A rectangle of a tensor of the checkpoint."""

    key: str
    offset: tuple[int, ...]
    size: tuple[int, ...]
    whole: tuple[int, ...]
    """Shape of the tensor."""

    dtype: torch.dtype

    @property
    def index(self) -> MetadataIndex:
        """By which torch finds it."""
        return MetadataIndex(self.key, torch.Size(self.offset))

    @property
    def bytes(self) -> int:
        """Its size."""
        return torch.Size(self.size).numel() * self.dtype.itemsize


class _Plan(SavePlanner):
    """Makes each tensor when its turn to be written comes."""

    def __init__(self, make: Callable[[Chunk], Tensor], chunks: Sequence[Chunk]) -> None:
        self._make, self._chunks = make, {chunk.index: chunk for chunk in chunks}

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        if write_item.type == WriteItemType.BYTE_IO:
            nothing = io.BytesIO()
            torch.save([None], nothing)  # Megatron wants a list
            return nothing
        chunk = self._chunks[write_item.index]
        return self._make(chunk).reshape(chunk.size)

    def set_up_planner(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError

    create_local_plan = create_global_plan = finish_plan = cast(Any, set_up_planner)


def write_chunks(
    directory: Path,
    chunks: Sequence[Chunk],
    make: Callable[[Chunk], Tensor],
    *,
    number: int,
    nothings: Sequence[str] = (),
) -> list[WriteResult]:
    """Write a file of chunks.

    Args:
        directory: of the checkpoint.
        chunks: what comes into it, in this order.
        make: gives the data of one, contiguous and on the host, of any shape.
        number: of the file; no two files of a checkpoint may have the same.
        nothings: keys under which None is written too (`nothings`).

    Returns:
        Where each chunk is, for `finish`.

    Raises:
        OSError: it can't be written.
    """
    if not chunks and not nothings:
        return []
    items = [
        WriteItem(index=MetadataIndex(key), type=WriteItemType.BYTE_IO, bytes_io_data=BytesIOWriteData(0))
        for key in nothings
    ]
    items += [
        WriteItem(
            index=chunk.index,
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                chunk=_stored(chunk), properties=TensorProperties(dtype=chunk.dtype), size=torch.Size(chunk.whole)
            ),
        )
        for chunk in chunks
    ]
    plan = SavePlan(items, storage_data=_StoragePrefix(f"__{number}_"))
    return FileSystemWriter(directory, per_thread_copy_ahead=0).write_data(plan, _Plan(make, chunks)).wait()


def nothings(layers: int) -> list[str]:
    """Keys that Megatron's layers want to find beside the weights, for FP8 scaling that ours don't keep: nothing there.

    The local layers ask for those of the four projections; Transformer Engine's attention and norms ask too.
    """
    modules = "self_attention.linear_qkv self_attention.linear_proj self_attention.core_attention mlp.linear_fc1 "
    modules += "mlp.linear_fc2"
    return [
        *(
            f"decoder.layers.{module}._extra_state/shard_{layer}_{layers}"
            for module in modules.split()
            for layer in range(layers)
        ),
        "decoder.final_layernorm._extra_state/shard_0_1",
    ]


def finish(
    directory: Path,
    chunks: Iterable[Chunk],
    results: Iterable[Sequence[WriteResult]],
    nothings: Sequence[str] = (),
) -> None:
    """Write what says where everything is: of all chunks of the checkpoint, and what `write_chunks` said of them."""
    tensors: dict[str, Any] = {key: BytesStorageMetadata() for key in nothings}
    for chunk in chunks:
        if chunk.key not in tensors:
            properties = TensorProperties(dtype=chunk.dtype)
            tensors[chunk.key] = TensorStorageMetadata(properties, torch.Size(chunk.whole), [])
        tensors[chunk.key].chunks.append(_stored(chunk))
    torch.save({}, directory / COMMON)
    (directory / "metadata.json").write_text(json.dumps(_FORMAT))
    FileSystemWriter(directory).finish(Metadata(state_dict_metadata=tensors), [list(one) for one in results])


def _stored(chunk: Chunk) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(chunk.offset), torch.Size(chunk.size))


def is_torch_dist(directory: Path) -> bool:
    """Whether a directory holds a checkpoint of this format."""
    return (directory / ".metadata").exists()


class ChunkReader:
    """Reads rectangles of the tensors of a checkpoint, however it was cut into chunks. Not for several threads."""

    def __init__(self, directory: Path) -> None:
        """Read what says where everything is.

        Raises:
            UserError: that is missing or damaged.
        """
        self.directory = directory
        try:
            found = FileSystemReader(directory).read_metadata()
            self.tensors: Mapping[str, TensorStorageMetadata] = {
                key: value
                for key, value in found.state_dict_metadata.items()
                if isinstance(value, TensorStorageMetadata)
            }
            self._places = dict(found.storage_data)
        except Exception as error:  # a damaged pickle may raise anything
            raise UserError(f"{directory / '.metadata'}: {type(error).__name__}: {error}") from None
        self._by_row: dict[str, _ByRow] = {}
        self._mapped: dict[str, mmap.mmap] = {}
        self.blob = lru_cache(maxsize=4)(self._blob)

    def close(self) -> None:
        """Let go of the files, once nobody holds what was read by `blob`."""
        self.blob.cache_clear()
        self._mapped.clear()

    def dtype(self, key: str) -> torch.dtype:
        """Of a tensor."""
        return self.tensors[key].properties.dtype

    def read(self, key: str, offset: Sequence[int], into: Tensor) -> None:
        """Fill a tensor with the rectangle of its shape at `offset`.

        Args:
            key: of the tensor.
            offset: where the rectangle begins.
            into: contiguous, on any device, of the tensor's dtype and number of dimensions.

        Raises:
            UserError: the checkpoint has not all of it, or not in this dtype; a file is missing or damaged.
        """
        if key not in self.tensors:
            raise UserError(f"{self.directory}: tensor {key} is missing")
        if self.dtype(key) != into.dtype:
            raise UserError(f"{self.directory}: tensor {key} is {self.dtype(key)}, not {into.dtype}")
        target = torch.empty(into.shape, dtype=into.dtype) if into.device.type != "cpu" else into
        filled = 0
        for chunk, here, there in self.overlaps(key, offset, tuple(into.shape)):
            rectangle = target[tuple(here)]
            _as_bytes(rectangle).copy_(_as_bytes_of(self.blob(chunk), chunk)[_in_bytes(there, chunk.dtype.itemsize)])
            filled += rectangle.numel()
        if filled != into.numel():
            raise UserError(
                f"{self.directory}: tensor {key} has shape {tuple(self.tensors[key].size)}; of the "
                f"{tuple(into.shape)} at {tuple(offset)} {into.numel() - filled} elements are missing"
            )
        if target is not into:
            into.copy_(target)

    def overlaps(
        self, key: str, offset: Sequence[int], size: Sequence[int]
    ) -> Iterator[tuple[Chunk, list[slice], list[slice]]]:
        """The chunks that hold parts of a rectangle; where the part is in the rectangle, and in the chunk."""
        found = self.tensors[key]
        if key not in self._by_row:
            self._by_row[key] = _ByRow(found.chunks)
        for stored in self._by_row[key].near(offset, size):
            here, there = [], []
            for start, length, begin, extent in zip(offset, size, stored.offsets, stored.sizes, strict=True):
                low, high = max(start, begin), min(start + length, begin + extent)
                if low >= high:
                    break
                here.append(slice(low - start, high - start))
                there.append(slice(low - begin, high - begin))
            else:
                whole = tuple(found.size)
                yield (
                    Chunk(key, tuple(stored.offsets), tuple(stored.sizes), whole, found.properties.dtype),
                    here,
                    there,
                )

    def place(self, chunk: Chunk) -> tuple[Path, int]:
        """The file that holds the data of a chunk, and at which byte they begin: row by row, nothing between."""
        if chunk.index not in self._places:
            raise UserError(f"{self.directory / '.metadata'}: does not say where {chunk.key} at {chunk.offset} is")
        where = self._places[chunk.index]
        path = self.directory / where.relative_path
        try:
            with path.open("rb") as file:
                return path, where.offset + _data_of(_Part(file, where.offset, where.length), chunk.bytes)
        except (zipfile.BadZipFile, OSError, StopIteration, ValueError) as error:
            raise UserError(f"{path}: {error or type(error).__name__}; the file is damaged") from None

    def _blob(self, chunk: Chunk) -> Tensor:
        """The data of a chunk, as bytes in the mapped file."""
        path, at = self.place(chunk)
        if path.name not in self._mapped:
            with path.open("rb") as file:  # a private map: torch wants to be able to write
                self._mapped[path.name] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        if at + chunk.bytes > len(self._mapped[path.name]):
            raise UserError(f"{path}: shorter than it should be; the file is damaged")
        return torch.frombuffer(self._mapped[path.name], dtype=torch.uint8, count=chunk.bytes, offset=at)


class _ByRow:
    """The chunks of a tensor in order of their first coordinate: a large model has thousands, and few are wanted."""

    def __init__(self, chunks: Sequence[ChunkStorageMetadata]) -> None:
        self._sorted = sorted(chunks, key=_first)
        self._starts = [_first(chunk) for chunk in self._sorted]
        self._longest = max((chunk.sizes[0] for chunk in chunks if chunk.sizes), default=0)

    def near(self, offset: Sequence[int], size: Sequence[int]) -> Sequence[ChunkStorageMetadata]:
        """Those that may hold something of a rectangle."""
        if not offset:
            return self._sorted
        low = bisect_left(self._starts, offset[0] - self._longest + 1)
        return self._sorted[low : bisect_left(self._starts, offset[0] + size[0])]


def _first(chunk: ChunkStorageMetadata) -> int:
    return chunk.offsets[0] if chunk.offsets else 0


class _Part:
    """A part of a file as a file, for `zipfile`."""

    def __init__(self, file: Any, start: int, length: int) -> None:
        self._file, self._start, self._length = file, start, length
        self._file.seek(start)

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return cast(int, self._file.tell()) - self._start

    def seek(self, at: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self.tell(), os.SEEK_END: self._length}[whence]
        self._file.seek(self._start + base + at)
        return self.tell()

    def read(self, count: int = -1) -> bytes:
        left = self._length - self.tell()
        return cast(bytes, self._file.read(left if count < 0 else min(count, left)))


def _data_of(part: _Part, size: int) -> int:
    """Where the elements begin in what `torch.save` wrote of one contiguous tensor."""
    with zipfile.ZipFile(cast(Any, part)) as archive:
        (record,) = (one for one in archive.infolist() if one.filename.endswith("/data/0"))
    if record.compress_type != zipfile.ZIP_STORED or record.file_size != size:
        raise ValueError(f"{record.file_size} bytes where a tensor has {size}")
    part.seek(record.header_offset + 26)  # lengths of the name and of the padding, in front of both
    lengths = part.read(4)
    return record.header_offset + 30 + int.from_bytes(lengths[:2], "little") + int.from_bytes(lengths[2:], "little")


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(1).view(torch.uint8) if tensor.dim() == 0 else tensor.view(torch.uint8)


def _as_bytes_of(blob: Tensor, chunk: Chunk) -> Tensor:
    if not chunk.size:
        return blob
    return blob.view(*chunk.size[:-1], chunk.size[-1] * chunk.dtype.itemsize)


def _in_bytes(rectangle: Sequence[slice], itemsize: int) -> tuple[slice, ...]:
    """The same rectangle where the last dimension is counted in bytes."""
    if not rectangle:
        return ()
    last = rectangle[-1]
    return (*rectangle[:-1], slice(last.start * itemsize, last.stop * itemsize))
