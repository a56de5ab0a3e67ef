"""What the loop asks of a rollout engine. Token ids in, token ids out."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from torch import Tensor

from megatron_rl.errors import UserError
from megatron_rl.resharding.slices import Slices
from megatron_rl.types import Response

POLL_S = 1.0
"""How long `generate` waits for the next response before it asks again."""


class EngineLost(UserError):
    """An engine has died, or hangs; says why. `restart` replaces it; where nobody does, the run ends with this line."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt and the seeds of the responses that are wanted of it."""

    prompt_ids: tuple[int, ...]
    seeds: tuple[int, ...]
    """One for each response; its length is the number of responses."""

    max_tokens: int
    """Longest response, in tokens, what is begun included."""

    begun: tuple[int, ...] = ()
    """Ids that the response has already, sampled before; it goes on after them. Then there is one seed."""

    def __post_init__(self) -> None:
        if self.begun and (len(self.seeds) != 1 or len(self.begun) >= self.max_tokens):
            raise ValueError(
                f"a response that goes on has one seed and room: {len(self.seeds)} seeds, {len(self.begun)} of "
                f"{self.max_tokens} tokens"
            )

    @property
    def room(self) -> int:
        """The most tokens that may still be sampled for each response."""
        return self.max_tokens - len(self.begun)


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are drawn. Log-probs are those of the whole distribution at `temperature`, also when greedy or cut."""

    temperature: float = 1.0
    greedy: bool = False
    """Take the most likely token instead of drawing."""

    top_p: float = 1.0
    """Draw from the smallest set of most likely tokens that have at least this probability together."""


Answer = tuple[int, int, Response]
"""Key of the request, number of the sample, and what was sampled: of a response that goes on only what is new."""


class Generates(Protocol):
    """All that sampling asks of an engine."""

    def submit(self, key: int, request: Request, sampling: Sampling) -> None:
        """Take a request; its responses come from `poll`. No other request of this key may be under way.

        Raises:
            EngineLost: it is known to have died.
            RuntimeError: it has no weights to sample with.
        """

    def poll(self, wait_s: float) -> list[Answer]:
        """What has completed, in any order; waits about `wait_s` at most for the first. None is under way: none comes.

        Raises:
            EngineLost: the engine died, or hangs; what was under way is lost.
        """

    def abort(self) -> list[Answer]:
        """End everything under way: what has completed, and the rest, with `abort` for a reason, as far as it came.

        A lost engine is not told here; of what it had, nothing has come.
        """


class Engine(Generates, Protocol):
    """A rollout engine, seen from the ranks that share it. Only the one that leads it generates, scores and restarts;
    the other calls are made on all of them, in the same order.

    A step: `wake`, `update_weights`, `resume`, then requests and scores, then `sleep`. Between `wake` and the end of
    `update_weights` its parameters are undefined. Both, and `sleep`, drop what is under way: `abort` it before.
    """

    def start(self) -> None:
        """Become able to take weights. Raises RuntimeError with the reason if it can't."""

    def score(self, sequences: Sequence[tuple[int, ...]]) -> list[tuple[float, ...]]:
        """Log-probabilities, at temperature 1, of each token after the first, given those before it."""

    def update_weights(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Replace all weights by whole tensors in HF names, and forget every key and value of the old ones."""

    def begin_update(self) -> None:
        """Before new weights come by `load`, bucket after bucket; the engine is awake."""

    def buffer(self, size: int) -> Tensor:
        """So many bytes that `load` can be given: of memory that the engine can read."""

    def load(self, slices: Slices, *, read_back: bool) -> Tensor:
        """Write slices into the parameters of this rank.

        Returns:
            The digest of each, as it is in the parameter now, `[slices]`; `[0]` if they aren't wanted.
        """

    def digests(self, names: Sequence[str]) -> list[int]:
        """Those of whole parameters of this rank."""

    def end_update(self, version: int) -> None:
        """After the last bucket: all weights are new; forget every key and value of the old ones."""

    def sleep(self) -> None:
        """Give back the memory of weights and cache. Again does nothing."""

    def wake(self) -> None:
        """Take memory for the weights again; they are undefined until updated. Again does nothing."""

    def resume(self) -> None:
        """Take memory for keys and values too, when weights are updated, and generate from then on. Again: nothing."""

    def health(self) -> bool:
        """Whether it can generate now."""

    def restart(self) -> None:
        """Begin to replace an engine that was lost, and don't wait for it; in the main thread. What it had is gone.

        `sleep` and `wake` wait for it; it has weights again after the next `wake`, `update_weights` and `resume`.
        Nothing if it is being replaced already, as `sleep` and `wake` do it with one that they find lost.

        Raises:
            UserError: it was started again `rollout.engine_restarts` times already, or can't be. Then it is lost for
                good: it takes part in the other calls, generates nothing, and says so here again.
        """

    @property
    def losses(self) -> int:
        """How often it was lost since it was made."""

    def stop(self) -> None:
        """End it. Again does nothing."""


def generate(engine: Generates, requests: Sequence[Request], sampling: Sampling) -> Iterator[Answer]:
    """All responses to `requests`, as they complete; their keys are their numbers. Nothing else may be under way.

    Raises:
        EngineLost: the engine died, or hangs.
    """
    for number, request in enumerate(requests):
        engine.submit(number, request, sampling)
    left = sum(len(request.seeds) for request in requests)
    while left > 0:
        for answer in engine.poll(POLL_S):
            left -= 1
            yield answer


def response_seed(*path: int) -> int:
    """The 64-bit seed of one response, from its place in the run: (run seed, stream, position, sample)."""
    return int(np.random.SeedSequence(path).generate_state(1, np.uint64)[0])
