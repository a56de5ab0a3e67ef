"""What the loop asks of a rollout engine. Token ids in, token ids out."""

from collections.abc import Iterable, Sequence
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
    """Longest response, in tokens, what is begun of it included."""

    begun: tuple[int, ...] = ()
    """Ids that the response has already; it goes on after them. Then there is one seed."""


class EngineLost(Exception):
    """An engine has died or hung; says why on one line. `Engine.restart` replaces it."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are drawn. Log-probs are those of the whole distribution at `temperature`, also when greedy or cut."""

    temperature: float = 1.0
    greedy: bool = False
    """Take the most likely token instead of drawing."""

    top_p: float = 1.0
    """Draw from the smallest set of most likely tokens that have at least this probability together."""


class Generates(Protocol):
    """All that sampling asks of an engine. Responses hold only what is new to them, if they were begun before."""

    def submit(self, key: int, request: Request, sampling: Sampling) -> None:
        """Take a request; its responses come from `poll`. Keys are unique among those under way."""

    def poll(self, wait_s: float) -> list[tuple[int, int, Response]]:
        """(key, sample number, response) of what has completed; waits about so long for the first.

        Raises:
            EngineLost: the engine has died or hung.
        """

    def abort(self) -> list[tuple[int, int, Response]]:
        """End all that is under way: what has completed, and of the rest, with finish reason `abort`, what there is.

        Raises: as `poll`.
        """


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

    def restart(self) -> None:
        """Begin to replace an engine that was lost, and don't wait for it; it gets its weights with the others.

        Raises:
            UserError: it was started again too often (`rollout.engine_restarts`).
        """

    def health(self) -> bool:
        """Whether it can generate now."""

    def stop(self) -> None:
        """End it. Again does nothing."""


def response_seed(*path: int) -> int:
    """The 64-bit seed of one response, from its place in the run: (run seed, stream, position, sample)."""
    return int(np.random.SeedSequence(path).generate_state(1, np.uint64)[0])
