"""The reference policy: the weights that a run began with, in host memory, in place of the current ones for a while."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from megatron_rl.training.host_arena import page_locked


class ReferencePolicy:
    """This rank's shards of the reference weights."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Copy the weights as they are now."""
        self._parameters = list(parameters)
        sizes = [parameter.nbytes for parameter in self._parameters]
        room = page_locked(sum(sizes)).split(sizes)
        self._weights = [
            part.view(parameter.dtype).view(parameter.shape)
            for part, parameter in zip(room, self._parameters, strict=True)
        ]
        for weights, parameter in zip(self._weights, self._parameters, strict=True):
            weights.copy_(parameter.detach())

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The model computes with the reference weights inside, and with the current ones, bit by bit, after it."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        """Exchange the two, a parameter at a time: no second copy of the model."""
        for parameter, weights in zip(self._parameters, self._weights, strict=True):
            held = parameter.clone()
            parameter.copy_(weights)
            weights.copy_(held)
