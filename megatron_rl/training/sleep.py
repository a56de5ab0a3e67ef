"""The trainer's memory while it does not train: gradients dropped, the rest on the host, brought back bit by bit."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from megatron.core import parallel_state as mpu
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor

from megatron_rl.training.host_arena import HostArena, Storage, empty, storages
from megatron_rl.training.optimizer import state_tensors

GB = 1e9


class TrainerMemory:
    """What this rank's trainer holds on its device, and where it is."""

    def __init__(self, chunks: Sequence[DistributedDataParallel], optimizer: MegatronOptimizer) -> None:
        self._chunks, self._optimizer = chunks, optimizer
        self._arena = HostArena()
        self._dropped: dict[Storage, int] = {}
        self._figures: dict[str, float] = {}

    def sleep(self, *, keep_parameters: bool = False) -> None:
        """Drop the gradients and move the optimizer's state and the parameters to the host; again does nothing.

        Args:
            keep_parameters: these stay, as engines are about to read them.
        """
        begun = time.perf_counter()
        parameters, state = list(self._parameters()), list(state_tensors(self._optimizer))
        self._arena.reserve([*parameters, *state])
        grads = [storage for storage in storages(self._gradients()) if storage.nbytes()]
        sizes = {storage: storage.nbytes() for storage in grads}
        dropped = empty(grads)
        self._dropped |= sizes
        self._forget_caches()
        of_parameters = set(storages(parameters))
        moved = self._arena.take(one for one in state if one.untyped_storage() not in of_parameters)
        if not keep_parameters:
            moved += self._arena.take(parameters)
        self._count("seconds/offload", time.perf_counter() - begun)
        self._count("memory/offloaded_gb", moved / GB)
        self._count("memory/dropped_gb", dropped / GB)

    def wake(self) -> None:
        """Bring back what `sleep` moved, bit by bit, and make room for gradients (undefined); again does nothing."""
        begun = time.perf_counter()
        self._arena.give_back([*self._parameters(), *state_tensors(self._optimizer)])
        for storage, size in self._dropped.items():
            storage.resize_(size)
        self._dropped.clear()
        self._count("seconds/reload", time.perf_counter() - begun)

    def take_figures(self) -> dict[str, float]:
        """Seconds and GB since the last call, by the names of metrics."""
        figures, self._figures = self._figures, {}
        return figures

    def _count(self, name: str, value: float) -> None:
        self._figures[name] = self._figures.get(name, 0.0) + value

    def _forget_caches(self) -> None:
        """Tensors that Megatron and Transformer Engine keep to use again: they make them again."""
        mpu.get_global_memory_buffer().buffer.clear()
        RotaryEmbedding.forward.cache_clear()
        for chunk in self._chunks:
            for module in chunk.modules():
                getattr(module, "_fp8_workspaces", {}).clear()

    def _parameters(self) -> Iterator[Tensor]:
        return (parameter.data for chunk in self._chunks for parameter in chunk.parameters())

    def _gradients(self) -> Iterator[Tensor]:
        return (buffer.grad_data for chunk in self._chunks for buffer in chunk.buffers)
