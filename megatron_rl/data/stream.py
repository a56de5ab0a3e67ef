"""The order of prompts: a new permutation each epoch, from the seed; resumable by one number."""

from collections.abc import Sequence

import numpy as np

from megatron_rl.types import Prompt


class PromptStream:
    """An endless stream over a data set. `position` counts the prompts drawn; it is all the state there is."""

    def __init__(self, prompts: Sequence[Prompt], seed: int) -> None:
        self.prompts, self.seed, self.position = prompts, seed, 0
        self._epoch, self._order = -1, np.empty(0, dtype=np.int64)

    @property
    def epoch(self) -> int:
        """Epochs begun before the next draw, counted from 0."""
        return self.position // len(self.prompts)

    def draw(self, count: int) -> list[tuple[int, Prompt]]:
        """The next `count` prompts, each with its position in the stream."""
        drawn = []
        for _ in range(count):
            if self._epoch != self.epoch:
                self._epoch = self.epoch
                self._order = np.random.default_rng((self.seed, self.epoch)).permutation(len(self.prompts))
            drawn.append((self.position, self.prompts[self._order[self.position % len(self.prompts)]]))
            self.position += 1
        return drawn
