"""What the loop asks of a rollout engine. Token ids in, token ids out."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from torch import Tensor

from megatron_rl.types import Response


@dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt and the seeds of the responses that are wanted of it."""

    prompt_ids: tuple[int, ...]
    seeds: tuple[int, ...]
    """One for each response; its length is the number of responses."""

    max_tokens: int
    """Longest response, in tokens."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are drawn. Log-probs are those of the whole distribution at `temperature`, also when greedy or cut."""

    temperature: float = 1.0
    greedy: bool = False
    """Take the most likely token instead of drawing."""

    top_p: float = 1.0
    """Draw from the smallest set of most likely tokens that have at least this probability together."""


class Generates(Protocol):
    """All that sampling asks of an engine."""

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[tuple[int, int, Response]]:
        """Sample; yields (request number, sample number, response) as responses complete, in any order."""


class Engine(Generates, Protocol):
    """A rollout engine, seen from the ranks that share it. Only the one that leads it generates and scores; the other
    calls are made on all of them, in the same order.

    A step: `wake`, `update_weights`, `resume`, then `generate` and `score`, then `sleep`. Between `wake` and the end of
    `update_weights` its parameters are undefined.
    """

    def start(self) -> None:
        """Become able to take weights. Raises RuntimeError with the reason if it can't."""

    def score(self, sequences: Sequence[tuple[int, ...]]) -> list[tuple[float, ...]]:
        """Log-probabilities, at temperature 1, of each token after the first, given those before it."""

    def update_weights(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Replace all weights by whole tensors in HF names, and forget every key and value of the old ones."""

    def sleep(self) -> None:
        """Give back the memory of weights and cache. Again does nothing."""

    def wake(self) -> None:
        """Take memory for the weights again; they are undefined until updated. Again does nothing."""

    def resume(self) -> None:
        """Take memory for keys and values too, when weights are updated, and generate from then on. Again: nothing."""

    def health(self) -> bool:
        """Whether it can generate now."""

    def stop(self) -> None:
        """End it. Again does nothing."""


def response_seed(*path: int) -> int:
    """The 64-bit seed of one response, from its place in the run: (run seed, stream, step, draw, sample)."""
    return int(np.random.SeedSequence(path).generate_state(1, np.uint64)[0])
