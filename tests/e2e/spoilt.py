"""`megatron-rl` with an embedded engine that does one thing wrong: `python -m tests.e2e.spoilt WHAT WHEN train ...`.

It is the real engine; what is wrong is done to its parameters when they have come, and only in its WHEN-th update.
"""

import os
import sys

import torch
from torch import Tensor

from megatron_rl.cli import main
from megatron_rl.rollout import embedded

GATE, UP = (f"model.layers.0.mlp.{name}_proj.weight" for name in ("gate", "up"))


class Spoilt(embedded.EmbeddedEngine):
    """An engine whose weights go wrong, and whose parameters are NaN when it wakes."""

    what, when = "nothing", 0

    def start(self) -> None:
        """Remember the initialisation: the weights of the update before the first."""
        super().start()
        self.updates = 0
        self.old = {name: parameter.data.clone() for name, parameter in self._running().named_parameters()}

    def wake(self) -> None:
        """What is undefined could be right by chance; NaN can't."""
        super().wake()
        for parameter in self._running().parameters():
            parameter.data.fill_(torch.nan)

    def end_update(self, version: int) -> None:
        """Spoil the update, or not, and say whether all weights are finite."""
        self.updates += 1
        parameters = dict(self._running().named_parameters())
        new = {name: parameter.data.clone() for name, parameter in parameters.items()}
        if self.updates == self.when:
            for name, tensor in self._spoilt(new).items():
                parameters[name].data.copy_(tensor)
        self.old = new
        super().end_update(version)
        finite = all(bool(parameter.isfinite().all()) for parameter in parameters.values())
        sys.stdout.write(f"rank {os.environ.get('RANK', 0)}, update {self.updates}: finite {finite}\n")  # at once
        sys.stdout.flush()

    def _spoilt(self, new: dict[str, Tensor]) -> dict[str, Tensor]:
        if self.what == "ignores the update":
            return self.old
        if self.what == "skips a tensor":
            return {**new, GATE: self.old[GATE]}
        assert self.what == "swaps gate and up"
        return {**new, GATE: new[UP], UP: new[GATE]}


if __name__ == "__main__":
    Spoilt.what, Spoilt.when = sys.argv[1], int(sys.argv[2])
    embedded.EmbeddedEngine = Spoilt  # type: ignore[misc]  # before the program imports it
    sys.argv[1:] = sys.argv[3:]
    main()
