"""The reference policy: the weights that a run began with, in host memory, in place of the current ones for a while."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from megatron_rl.training import cpu


class ReferencePolicy:
    """This rank's shards of the reference weights."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Copy the weights as they are now."""
        self._parameters = list(parameters)
        self._weights = [parameter.detach().to("cpu", copy=True) for parameter in self._parameters]
        if cpu.has_cuda():
            self._weights = [weights.pin_memory() for weights in self._weights]

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
