"""Device memory that is lent out for a while: what lies in it waits in one block of host memory.

A tensor is not replaced: its storage is emptied and filled again, so that every view of it (Megatron's buffers hold
parameters and shards as views) is what it was.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch
from torch import Tensor

from megatron_rl.training import cpu

Storage = torch.UntypedStorage
_ALIGNMENT = 256  # bytes; what CUDA's copies like


class HostArena:
    """Room on the host for tensors of this rank; page-locked with a GPU."""

    def __init__(self) -> None:
        self._room = torch.empty(0, dtype=torch.uint8)
        self._kept: dict[Storage, slice] = {}

    @property
    def bytes_kept(self) -> int:
        """Bytes that wait here now."""
        return sum(place.stop - place.start for place in self._kept.values())

    def take(self, tensors: Iterable[Tensor]) -> int:
        """Copy the storages of device tensors here and empty them. Those that are here already stay.

        Returns:
            Bytes that the device got back.
        """
        places: dict[Storage, slice] = {}
        start = max((place.stop for place in self._kept.values()), default=0)
        for storage in storages(tensors):
            if storage not in self._kept and storage.nbytes():
                start = _aligned(start)
                places[storage] = slice(start, start + storage.nbytes())
                start += storage.nbytes()
        self._reserve(start)
        for storage, place in places.items():
            self._room[place].copy_(_bytes(storage), non_blocking=True)
        if cpu.has_cuda():
            torch.cuda.synchronize()
        freed = empty(places)
        self._kept |= places
        return freed

    def give_back(self, tensors: Iterable[Tensor]) -> int:
        """Fill the storages of these tensors with what was in them, bit by bit. Those that are not here stay.

        Returns:
            Bytes that the device lent.
        """
        back = {s: self._kept.pop(s) for s in storages(tensors) if s in self._kept}
        for storage, place in back.items():
            storage.resize_(place.stop - place.start)
            _bytes(storage).copy_(self._room[place], non_blocking=True)
        if cpu.has_cuda():
            torch.cuda.synchronize()
        return sum(place.stop - place.start for place in back.values())

    def reserve(self, tensors: Iterable[Tensor]) -> None:
        """Make room for all of these at once: page-locking takes seconds, and growing later copies."""
        self._reserve(sum(_aligned(storage.nbytes()) for storage in storages(tensors)))

    def _reserve(self, size: int) -> None:
        if size > len(self._room):
            before = self._room if self._kept else self._room[:0]
            self._room = before  # let go of it first, if nothing is in it
            self._room = page_locked(size)
            self._room[: len(before)] = before


def storages(tensors: Iterable[Tensor]) -> list[Storage]:
    """The storages of tensors on this rank's device, each once, in order."""
    device = cpu.device().type
    return list(dict.fromkeys(t.untyped_storage() for t in tensors if t.device.type == device))


def page_locked(size: int) -> Tensor:
    """Bytes of host memory that a GPU copies from and to without a detour; without a GPU ordinary ones.

    Not by torch's `pin_memory`, which takes the next power of two and keeps what is freed.
    """
    room = torch.empty(size, dtype=torch.uint8)
    if cpu.has_cuda() and size:
        cudart = torch.cuda.cudart()
        torch.cuda.check_error(cudart.cudaHostRegister(room.data_ptr(), size, 0))
        weakref.finalize(room.untyped_storage(), cudart.cudaHostUnregister, room.data_ptr())
    return room


def empty(places: Iterable[Storage]) -> int:
    """Give back the memory of these storages, to the device too, for an engine in another process; returns bytes."""
    freed = 0
    for storage in places:
        freed += storage.nbytes()
        storage.resize_(0)
    if cpu.has_cuda():
        torch.cuda.empty_cache()
    return freed


def _bytes(storage: Storage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
