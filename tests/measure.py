"""Bytes that are really there, to hold against `megatron_rl.training.memory`."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from megatron_rl.training import cpu
from megatron_rl.training.optimizer import make_adam_state, state_tensors
from megatron_rl.training.trainer import Trainer


def storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Bytes of each storage behind these tensors, by its address."""
    return {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}


def state_bytes(trainer: Trainer) -> dict[str, int]:
    """Of parameters, gradients and the optimizer's state, where it is no view of the parameters."""
    make_adam_state(trainer.optimizer)
    parameters = storages(trainer.parameters())
    optimizer = storages(state_tensors(trainer.optimizer))
    return {
        "parameters": sum(parameters.values()),
        "gradients": gradient_bytes(trainer),
        "optimizer": sum(size for address, size in optimizer.items() if address not in parameters),
    }


def gradient_bytes(trainer: Trainer) -> int:
    """Of the buffers that gradients are summed in."""
    return sum(storages(buffer.grad_data for chunk in trainer.chunks for buffer in chunk.buffers).values())


@contextmanager
def kept_for_backward(trainer: Trainer) -> Iterator[dict[int, int]]:
    """Storages that one forward pass inside keeps, parameters excepted; filled while it runs."""
    parameters, kept = storages(trainer.parameters()), dict[int, int]()

    def pack(tensor: Tensor) -> Tensor:
        if torch._C._current_graph_task_id() == -1:  # not what backward computes again, and keeps for a moment
            kept.update((place, size) for place, size in storages([tensor]).items() if place not in parameters)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield kept


def reset_peak() -> None:
    """Measure this process's peak from now on: on its device, which may be the CPU."""
    if cpu.has_cuda():
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5")


def peak() -> int:
    """Bytes of this process on its device at most since `reset_peak`."""
    return torch.cuda.max_memory_allocated() if cpu.has_cuda() else resident("VmHWM")


def in_memory() -> int:
    """Bytes of this process on its device now."""
    return torch.cuda.memory_allocated() if cpu.has_cuda() else resident()


def resident(kind: str = "VmRSS") -> int:
    """Bytes of this process in memory now, or (`VmHWM`) at most since `reset_peak`."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status[kind].split()[0]) * 1024
