"""Parity: after every update trainer and engines score a fixed probe. Wrong or stale weights end the run at once.

All figures are about |Δ|, the absolute difference of the log-probs that both sides give to a token, in nats.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from megatron_rl.config import Config
from megatron_rl.errors import UserError
from megatron_rl.rollout.engine import Engine, EngineLost
from megatron_rl.rollout.sampler import SamplingEndedError
from megatron_rl.rollout.waiting import EngineWait
from megatron_rl.telemetry.metrics import MeanMetrics
from megatron_rl.types import Prompt, Response

Scores = Sequence[tuple[float, ...]]
"""Of each sequence of the probe: log-probs, at temperature 1, of its tokens after the first."""

LIMITS = {"float32": 1e-3, "bfloat16": 0.05}
"""Largest mean |Δ| by the trainer's dtype. Two right implementations differ by rounding: about 1e-6 in float32 (1e-4
through many layers on a GPU), 0.005 to 0.02 in bfloat16, whose 8 bits round every activation. Wrong weights differ by
tenths to whole nats."""

PROBE_PROMPTS, PROBE_TOKENS = 4, 128
"""Enough tokens for a mean, few enough to cost nothing beside a rollout."""


def choose_probe(prompts: Sequence[Prompt], vocabulary: int) -> tuple[tuple[int, ...], ...]:
    """The first prompts of the data that can be scored, cut at `PROBE_TOKENS`.

    Args:
        prompts: of the training data, at least one.
        vocabulary: ids from here on have no probability, so they aren't scored.

    Returns:
        1 to `PROBE_PROMPTS` sequences of at least 2 tokens each.
    """
    usable = [prompt.ids[:PROBE_TOKENS] for prompt in prompts if len(prompt.ids) > 1 and max(prompt.ids) < vocabulary]
    if not usable:  # prompts of one token: after one another, and twice, as there may be a single one
        tokens = [token for prompt in prompts[:PROBE_TOKENS] for token in prompt.ids if token < vocabulary] or [0]
        usable = [(*tokens, *tokens)[:PROBE_TOKENS]]
    return tuple(usable[:PROBE_PROMPTS])


@dataclass(frozen=True, kw_only=True)
class Distance:
    """How far two scorings of the probe are apart, over all its tokens."""

    max: float
    mean: float
    mean_exp: float
    """Mean of exp|Δ|: 1 where they agree; a few tokens that are far off show here first."""


def distance(a: Scores, b: Scores) -> Distance:
    """Of two scorings of the same sequences. A score that is not finite is infinitely far off.

    Raises:
        RuntimeError: they aren't of the same sequences.
    """
    if list(map(len, a)) != list(map(len, b)):
        raise RuntimeError(f"parity: scores of {list(map(len, a))} and of {list(map(len, b))} tokens can't be compared")
    gaps = [abs(x - y) for one, other in zip(a, b, strict=True) for x, y in zip(one, other, strict=True)]
    gaps = [gap if math.isfinite(gap) else math.inf for gap in gaps]
    exps = [math.exp(gap) if gap < 700 else math.inf for gap in gaps]  # beyond that a float overflows
    return Distance(max=max(gaps), mean=sum(gaps) / len(gaps), mean_exp=sum(exps) / len(exps))


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How one engine stands to the trainer after an update, and to the trainer of the update before."""

    engine: int
    current: Distance
    previous: float = math.inf
    """Mean |Δ| to the trainer's scores of the update before; infinite if there was none."""

    moved: float = 0.0
    """Mean |Δ| of the trainer's own scores, from the update before to this one."""

    stuck: bool = False
    """The engine's scores are bit by bit those of the update before, and most of the trainer's are not."""


def read(engine: int, trainer: Scores, scores: Scores, before: tuple[Scores, Scores] | None) -> Reading:
    """Compare an engine with the trainer.

    Args:
        engine: its number.
        trainer: the trainer's scores.
        scores: the engine's.
        before: both at the update before.
    """
    current = distance(trainer, scores)
    if before is None:
        return Reading(engine=engine, current=current)
    old_trainer, old_scores = before
    changed = [x != y for pair in zip(trainer, old_trainer, strict=True) for x, y in zip(*pair, strict=True)]
    return Reading(
        engine=engine,
        current=current,
        previous=distance(old_trainer, scores).mean,
        moved=distance(old_trainer, trainer).mean,
        stuck=list(scores) == list(old_scores) and 2 * sum(changed) > len(changed),
    )


class Alarms:
    """When readings end the run, and when they are warned of. Pure."""

    WINDOW, GROWTH = 10, 3.0
    """Trend: the mean over the last 10 updates against `GROWTH` times that over the first 10."""

    def __init__(self, limit: float) -> None:
        """Alarm above `limit`, a mean |Δ|; a trend below a hundredth of it is rounding."""
        self.limit = limit
        self._usual = 0.0  # the largest mean |Δ| of a right update so far: below it nothing can be told apart
        self._first: list[float] = []
        self._last: deque[float] = deque(maxlen=self.WINDOW)
        self._bound = math.inf  # of the trend

    def state(self) -> dict[str, Any]:
        """What is usual in this run, for checkpoints."""
        return {"usual": self._usual, "first": self._first, "last": list(self._last), "bound": self._bound}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`."""
        self._usual, self._first, self._bound = state["usual"], list(state["first"]), state["bound"]
        self._last = deque(state["last"], maxlen=self.WINDOW)

    def check(self, step: int, readings: Sequence[Reading], *, again: bool = False) -> str | None:
        """Judge the readings of all engines after an update; a warning, if there is one.

        Args:
            step: of the run.
            readings: of all engines.
            again: the update was judged before the run was resumed, and counts in the trend already.

        Raises:
            UserError: an engine has the weights of the update before, or others than the trainer's.
        """
        worst = max(readings, key=lambda reading: reading.current.mean)
        for reading in readings:
            if self._stale(reading):
                raise UserError(
                    f"parity: step {step}: engine {reading.engine} has the weights of the update before: its log-probs "
                    f"are {reading.previous:.2g} nats from the trainer's of then and {reading.current.mean:.2g} from "
                    "those of now (mean over the probe); nothing is lost, the last checkpoint stays"
                )
        if worst.current.mean > self.limit:
            raise UserError(
                f"parity: step {step}: log-probs of engine {worst.engine} and of the trainer differ by "
                f"{worst.current.mean:.2g} nats (mean over the probe; rollout.parity_limit is {self.limit:g}): the "
                "engine does not have the trainer's weights, or their kernels differ; nothing is lost, the last "
                "checkpoint stays"
            )
        self._usual = max(self._usual, worst.current.mean)
        return None if again else self._trend(step, worst.current.mean)

    def _stale(self, reading: Reading) -> bool:
        """Stuck, or clearly nearer to the update before, where the two updates can be told apart."""
        nearer = reading.previous < reading.current.mean / 2 and reading.moved > self._usual
        return reading.stuck or nearer

    def _trend(self, step: int, mean: float) -> str | None:
        self._last.append(mean)
        if len(self._first) < self.WINDOW:
            self._first.append(mean)
            self._bound = self.GROWTH * max(sum(self._first) / len(self._first), self.limit / 100)
            return None
        recent = sum(self._last) / len(self._last)
        if recent <= self._bound:
            return None
        while recent > self._bound:
            self._bound *= self.GROWTH
        first = sum(self._first) / len(self._first)
        return (
            f"warning: parity: step {step}: log-probs of engine and trainer differ by {recent:.2g} nats (mean over the "
            f"last {self.WINDOW} updates), {first:.2g} over the first {self.WINDOW}; the run ends above {self.limit:g}"
        )


class Parity:
    """The probe of a run, scored by both sides after every update."""

    def __init__(
        self,
        probe: Sequence[tuple[int, ...]],
        engine: Engine,
        wait: EngineWait,
        alarms: Alarms,
        say: Callable[[str], None],
        everyone: dist.ProcessGroup | None = None,
    ) -> None:
        """Compare `engine`, that of this rank's group, with the trainer; `say` is told warnings, on every rank."""
        self.probe, self.engine, self.wait, self.alarms, self.say = tuple(probe), engine, wait, alarms, say
        self.group, self.everyone = wait.group, everyone
        self.version = -1
        self._told_before = -1
        self._expected: Scores | None = None
        self._before: tuple[Scores, Scores] | None = None

    def state(self, told: int) -> dict[str, Any]:
        """For checkpoints: what is usual, and the update whose figures stand in a row and come no more (−1: none)."""
        return {"alarms": self.alarms.state(), "told": told}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`: engines get the same weights once more, which is checked, but no row says it again."""
        self._told_before = state["told"]
        self.alarms.restore(state["alarms"])

    def expect(self, scores: Scores, version: int) -> None:
        """Weights were pushed: what the trainer says of the probe with them, and the optimizer steps behind them."""
        self._expected, self.version = scores, version

    def check(self, step: int) -> MeanMetrics:
        """Have the engines score the probe, once after each update; worst figures of all engines. A collective.

        Raises:
            UserError: on every rank, an engine has wrong or stale weights (see `Alarms`).
            SamplingEndedError: on every rank, an engine was lost too often.
        """
        if self._expected is None:
            return MeanMetrics()
        mine: Reading | UserError | None = None
        with self.wait.until_all_are_done():
            if self.group.leads:
                try:
                    # One that was lost since it fell asleep may have no weights; the others sample without it.
                    mine = self._read(self._expected) if self.engine.health() else self._started_again()
                except EngineLost:
                    mine = self._started_again()
        self._expected = None
        gathered: list[Reading | UserError | None] = [None] * self.group.world
        dist.all_gather_object(gathered, mine, group=self.everyone)  # so that all ranks judge by the same numbers
        for refused in gathered:
            if isinstance(refused, UserError):
                raise SamplingEndedError(str(refused))
        readings = [reading for reading in gathered if isinstance(reading, Reading)]
        if not readings:
            return MeanMetrics()
        again = self.version == self._told_before
        warning = self.alarms.check(step, readings, again=again)
        if again:
            return MeanMetrics()
        if warning:
            self.say(warning)
        found = [reading.current for reading in readings]
        metrics = MeanMetrics()
        metrics.add("parity/max", max(one.max for one in found))
        metrics.add("parity/mean", max(one.mean for one in found))
        metrics.add("parity/mean_exp", max(one.mean_exp for one in found))
        return metrics

    def _started_again(self) -> UserError | None:
        """Start the engine again; why it may not be."""
        try:
            self.engine.restart()
        except UserError as error:
            self.engine.stop()
            return error
        return None

    def _read(self, trainer: Scores) -> Reading:
        scores = self.engine.score(self.probe)
        reading = read(self.group.number, trainer, scores, self._before)
        self._before = (trainer, scores)
        return reading

    def check_response(self, response: Response, aborted_ok: bool) -> None:
        """Refuse a response of other weights than were pushed, or of which there is only a part.

        Args:
            response: what was sampled since the last update; of a response that goes on only what is new.
            aborted_ok: it was aborted on purpose, perhaps.

        Raises:
            RuntimeError: a token's weights are of another update, or it was aborted.
        """
        other = set(response.weight_versions) - {self.version}
        if other:
            raise RuntimeError(
                f"engine {self.group.number} sampled with weights of version {max(other)}; version {self.version} "
                "was pushed"
            )
        if response.finish_reason == "abort" and not aborted_ok:
            raise RuntimeError(f"engine {self.group.number} aborted a response after {len(response.ids)} tokens")


def make_parity(
    config: Config,
    prompts: Sequence[Prompt],
    vocabulary: int,
    engine: Engine,
    wait: EngineWait,
    say: Callable[[str], None],
    everyone: dist.ProcessGroup | None = None,
) -> Parity:
    """The parity check of a run."""
    limit = config.rollout.parity_limit or LIMITS[config.trainer.dtype]
    return Parity(choose_probe(prompts, vocabulary), engine, wait, Alarms(limit), say, everyone)
