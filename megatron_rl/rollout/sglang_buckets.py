"""Weights in the form in which SGLang takes them from another process: a bucket of bytes, and a list of what is in it.

SGLang unpickles a payload with a list of allowed names: its own classes, which this process may not have, and
`types.SimpleNamespace`, which serves. The bytes lie in shared memory (CPU) or are reached by CUDA IPC (GPU), so a
payload is small however large the bucket is.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing import get_sharing_strategy, reductions, set_sharing_strategy

BUCKET_BYTES = 512 * 2**20
"""Large enough that a call's milliseconds don't count beside the copy, small beside a GPU's memory."""

ALIGNMENT = 16
"""Bytes; a tensor of any dtype may begin there."""

_DEVICE = 6
"""Place of the device among the arguments of `rebuild_cuda_tensor`."""


class Buckets:
    """A buffer that is filled with tensors again and again, and what to tell SGLang about it.

    On a GPU it is another one each time: SGLang may reply before its copies are done, and torch keeps memory that was
    sent until its reader, having waited for its own stream, lets go of it.
    """

    def __init__(self, device: torch.device, size: int = BUCKET_BYTES) -> None:
        """Take the memory when the first tensor comes.

        Args:
            device: where the tensors are, and the engine's GPU.
            size: bytes; a larger tensor gets a larger buffer.
        """
        self.device, self.size = device, size
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def fill(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[list[SimpleNamespace], bool]]:
        """Copy tensors into the buffer until it is full.

        Yields:
            (what is in the buffer, whether it is the last); in shared memory it is filled again when the next is asked
            for, so the reply must have come.
        """
        held: list[SimpleNamespace] = []
        end = 0
        for name, tensor in tensors:
            start = -(-end // ALIGNMENT) * ALIGNMENT
            if held and start + tensor.nbytes > self.size:
                yield held, False
                self._let_go()
                held, start = [], 0
            self._reserve(start + tensor.nbytes)
            end = start + tensor.nbytes
            self._buffer[start:end].copy_(tensor.contiguous().view(-1).view(torch.uint8))
            held.append(
                SimpleNamespace(
                    name=name,
                    shape=tensor.shape,
                    dtype=tensor.dtype,
                    start_idx=start,
                    end_idx=end,
                    numel=tensor.nbytes,  # SGLang counts bytes here
                )
            )
        if held:
            yield held, True

    def payload(self, held: list[SimpleNamespace]) -> str:
        """What one TP rank of the engine reads, once, while the buffer stays as it is."""
        return payload({"flattened_tensor": self._buffer, "metadata": held})

    def drop(self) -> None:
        """Give the memory back."""
        self._buffer = torch.empty(0, dtype=torch.uint8)
        if self.device.type == "cuda":
            torch.cuda.ipc_collect()
            torch.cuda.empty_cache()

    def _let_go(self) -> None:
        if self.device.type == "cuda":
            self._buffer = torch.empty(0, dtype=torch.uint8)
            torch.cuda.ipc_collect()

    def _reserve(self, size: int) -> None:
        if size <= self._buffer.nbytes:
            return
        self._buffer = torch.empty(0, dtype=torch.uint8)  # first, or both are there at once
        self._buffer = buffer(self.device, max(size, self.size))


def buffer(device: torch.device, size: int) -> Tensor:
    """So many bytes of memory that another process can read."""
    if device.type == "cpu":
        with _shared_by_name():  # at once: share_memory_() would fill all of it
            return torch.empty(0, dtype=torch.uint8).set_(torch.UntypedStorage._new_shared(size))
    with _plain_allocations():
        return torch.empty(size, dtype=torch.uint8, device=device)


def payload(told: Any) -> str:
    """What SGLang unpickles: tensors, of which only the place travels, in lists, tuples, dicts and SimpleNamespaces."""
    if torch.cuda.is_initialized():
        torch.cuda.current_stream().synchronize()  # the reader doesn't wait for our stream
    file = io.BytesIO()
    pickler = ForkingPickler(file)
    pickler.dispatch_table[torch.Tensor] = _with_uuid
    with _shared_by_name():
        pickler.dump(told)
    return base64.b64encode(file.getbuffer()).decode()


def _with_uuid(tensor: Tensor) -> tuple[Any, ...]:
    """How a tensor is pickled: its GPU by UUID, as the engine may count other GPUs than this process does."""
    rebuild, arguments = reductions.reduce_tensor(tensor)
    if tensor.is_cuda and isinstance(arguments[_DEVICE], int):
        uuid = str(torch.cuda.get_device_properties(arguments[_DEVICE]).uuid)
        arguments = (*arguments[:_DEVICE], uuid, *arguments[_DEVICE + 1 :])
    return rebuild, arguments


@contextmanager
def _shared_by_name() -> Iterator[None]:
    """Share CPU memory by file names: descriptors go only to processes that know our authentication key."""
    before = get_sharing_strategy()
    set_sharing_strategy("file_system")
    try:
        yield
    finally:
        set_sharing_strategy(before)


@contextmanager
def _plain_allocations() -> Iterator[None]:
    """Allocate by cudaMalloc: memory of expandable segments has no CUDA IPC handle."""
    before = torch._C._accelerator_getAllocatorSettings()
    torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
    try:
        yield
    finally:
        torch._C._accelerator_setAllocatorSettings(before or "expandable_segments:False")
