"""Engines that speak the Engine protocol on a virtual clock, and the leaders of all of them in one thread.

A response's length and tokens follow from its seed. An engine decodes all that runs together, a token of each in
`a + b·running` seconds, as a GPU that reads its weights once for all of them.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from megatron_rl.rewards.grade import Grade
from megatron_rl.rollout.engine import EngineLost, Request, Sampling
from megatron_rl.rollout.groups import EngineGroup
from megatron_rl.rollout.leader import Begun, Board, Leader, Task, Work
from megatron_rl.rollout.ledger import Event, Ledger
from megatron_rl.rollout.sampler import Sampled, together
from megatron_rl.types import FinishReason, Graded, Group, Prompt, Response


@dataclass
class Clock:
    """Seconds of the simulation."""

    now: float = 0.0


Length = Callable[[int, int], int]
"""Of a response, from its seed and the longest."""


def lognormal(median: float, sigma: float) -> Length:
    """Lengths as of long reasoning."""

    def length(seed: int, longest: int) -> int:
        drawn = float(np.random.default_rng(seed).lognormal(math.log(median), sigma))
        return min(longest, max(1, round(drawn)))

    return length


@dataclass
class _Running:
    key: int
    sample: int
    begun: int
    total: int
    reason: FinishReason
    seed: int
    first_tick: int


@dataclass
class FakeEngine:
    """An engine. `dies_at`: it is lost from then on, until it is restarted."""

    clock: Clock
    length: Length
    step_s: Callable[[int], float] = lambda running: 0.01
    places: int = 10**9
    """How many responses run at once; others wait in the order in which they came."""

    version: int = 0
    dies_at: float = math.inf
    usable: bool = True
    losses: int = 0
    asked: list[Request] = field(default_factory=list)
    history: list[tuple[float, int]] = field(default_factory=list)
    """(second, how many run from then on)."""

    _time: float = 0.0
    _tick: int = 0
    _running: dict[int, _Running] = field(default_factory=dict)
    _waiting: deque[_Running] = field(default_factory=deque)
    _ends: list[tuple[int, int]] = field(default_factory=list)
    _found: list[tuple[int, int, Response]] = field(default_factory=list)
    _count: int = 0

    def submit(self, key: int, request: Request, sampling: Sampling) -> None:
        self._advance()
        self.asked.append(request)
        for sample, seed in enumerate(request.seeds):
            total = self.length(seed, request.max_tokens)
            reason: FinishReason = "length" if total >= request.max_tokens else "stop"
            self._waiting.append(_Running(key, sample, len(request.begun), total, reason, seed, self._tick))
        self._let_in()

    def poll(self, wait_s: float) -> list[tuple[int, int, Response]]:
        self._advance()
        if self.clock.now >= self.dies_at:
            self._forget()
            self.losses += 1
            raise EngineLost("it was killed")
        found, self._found = self._found, []
        return found

    def abort(self) -> list[tuple[int, int, Response]]:
        found = self.poll(0)
        for one in self._running.values():
            found.append((one.key, one.sample, self._response(one, self._tick - one.first_tick, "abort")))
        found += [(one.key, one.sample, self._response(one, 0, "abort")) for one in self._waiting]
        self._forget()
        return found

    def _forget(self) -> None:
        self._running.clear()
        self._waiting.clear()
        self._ends.clear()
        self._found.clear()
        self._note()

    def restart(self) -> None:
        self.usable, self.dies_at = False, math.inf

    def stop(self) -> None:
        self.usable = False

    def next_event(self) -> float:
        """When something completes, if nothing else is asked of it."""
        if not self._ends:
            return math.inf
        return self._time + (self._ends[0][0] - self._tick) * self.step_s(len(self._running))

    def _advance(self) -> None:
        while self._ends:
            step, ticks = self.step_s(len(self._running)), self._ends[0][0] - self._tick
            ticks = min(ticks, math.floor((self.clock.now - self._time) / step + 1e-9))
            self._tick += ticks
            self._time += ticks * step
            if self._tick < self._ends[0][0]:
                return
            while self._ends and self._ends[0][0] == self._tick:
                one = self._running.pop(heapq.heappop(self._ends)[1])
                self._found.append((one.key, one.sample, self._response(one, one.total - one.begun, one.reason)))
            self._let_in()
        self._time = self.clock.now

    def _let_in(self) -> None:
        while self._waiting and len(self._running) < self.places:
            one = self._waiting.popleft()
            one.first_tick = self._tick
            self._running[self._count] = one
            heapq.heappush(self._ends, (self._tick + one.total - one.begun, self._count))
            self._count += 1
        self._note()

    def _note(self) -> None:
        self.history.append((self._time, len(self._running)))

    def occupied(self, begun: float, ended: float) -> float:
        """Integral of how many ran, over that time."""
        total = 0.0
        for (at, running), (until, _) in pairwise([*self.history, (ended, 0)]):
            total += running * max(0.0, min(until, ended) - max(at, begun))
        return total

    def _response(self, one: _Running, tokens: int, reason: FinishReason) -> Response:
        first = one.seed % 1000 + one.begun
        return Response(
            ids=tuple(range(first, first + tokens)),
            logprobs=(-1.0,) * tokens,
            finish_reason=reason,
            weight_versions=(self.version,) * tokens,
        )


@dataclass
class SlowGrades:
    """Graders that take a while for each group; right or wrong by the prompt and the number of the sample."""

    clock: Clock
    grade: Callable[[Prompt, int], float]
    seconds: Callable[[Prompt], float] = lambda prompt: 0.0
    _pending: list[tuple[float, int, list[Grade]]] = field(default_factory=list)

    def submit(self, key: int, prompt: Prompt, answers: Sequence[tuple[str, bool]]) -> None:
        grades = [Grade(score=self.grade(prompt, sample)) for sample in range(len(answers))]
        heapq.heappush(self._pending, (self.clock.now + self.seconds(prompt), key, grades))

    def poll(self) -> list[tuple[int, list[Grade]]]:
        found = []
        while self._pending and self._pending[0][0] <= self.clock.now:
            _, key, grades = heapq.heappop(self._pending)
            found.append((key, grades))
        return found

    def forget(self) -> None:
        self._pending.clear()

    def next_event(self) -> float:
        return self._pending[0][0] if self._pending else math.inf


class ListBoard:
    """A leader's view of a list that all share."""

    def __init__(self, events: list[Event]) -> None:
        self.events, self.read = events, 0

    def post(self, event: Event) -> None:
        self.events.append(event)

    def news(self) -> Iterable[Event]:
        while self.read < len(self.events):
            self.read += 1
            yield self.events[self.read - 1]


class SimulatedWait:
    """As much of EngineWait as a collector looks at."""

    def __init__(self, engines: int) -> None:
        self.group = EngineGroup(rank=0, size=1, world=engines)


class SimulatedSampler:
    """In GroupSampler's place: all leaders in one thread; their ledgers must agree in the end."""

    def __init__(
        self, clock: Clock, engines: Sequence[FakeEngine], grades: Sequence[SlowGrades], seed: int = 0
    ) -> None:
        self.clock, self.engines, self.grades = clock, list(engines), list(grades)
        self.wait = SimulatedWait(len(engines))
        self.ledger: Ledger | None = None
        self.order = np.random.default_rng(seed)  # in which leaders take their turns
        self.rollouts_s: list[float] = []
        self.pause_s = 0.0  # of leaders, between two looks
        self.make_board: Callable[[list[Event]], Board] = ListBoard

    def begin(
        self,
        ledger: Ledger,
        task: Task,
        *,
        keeps: Callable[[Group], bool],
        held: Mapping[int, Group] | None = None,
        begun: Mapping[int, Begun] | None = None,
    ) -> None:
        self.ledger, self._held = ledger, dict(held or {})
        drawn: list[object] = []
        original = ledger.draw
        ledger.draw = lambda count: self._draw(0, drawn, original, count)
        self._ledgers = [ledger]
        self._taken = [0] * len(self.engines)
        for number in range(1, len(self.engines)):
            self._ledgers.append(_copy(ledger, lambda count, number=number: self._draw(number, drawn, original, count)))
        self._leaders = [
            Leader(
                number,
                rank=number,
                engine=engine,  # type: ignore[arg-type]
                grades=self.grades[number],
                decode=lambda ids: f"{ids[0]} {len(ids)}",
                keeps=keeps,
                task=task,
                begun={} if begun is None else {p: b for p, b in begun.items() if self._has(number, p)},
            )
            for number, engine in enumerate(self.engines)
        ]

    def busy(self) -> Ledger:
        assert self.ledger is not None
        return self.ledger

    def _has(self, number: int, position: int) -> bool:
        assert self.ledger is not None
        return any(one.draw.position == position and one.engine == number for one in self.ledger.entries)

    def _draw(self, number: int, drawn: list, original: Callable, count: int) -> list:
        first = self._taken[number]
        self._taken[number] += count
        if len(drawn) < self._taken[number]:
            drawn += original(self._taken[number] - len(drawn))
        return drawn[first : self._taken[number]]

    def go_on(self) -> bool:
        assert self.ledger is not None
        begun = self.clock.now
        if self.ledger.stalled:
            for engine, ledger in zip(self.engines, self._ledgers, strict=True):
                engine.usable = True
                ledger.revive()
        events: list[Event] = []
        for leader, engine in zip(self._leaders, self.engines, strict=True):
            leader.meet(self.make_board(events), lambda response, aborted_ok: None, usable=engine.usable)
        while not all(ledger.over or ledger.stalled for ledger in self._ledgers):
            moved = False
            for number in self.order.permutation(len(self._leaders)).tolist():
                ledger = self._ledgers[number]
                if not (ledger.over or ledger.stalled):
                    moved = self._leaders[number].step(ledger, 0.0) or moved
            if not moved:
                times = [engine.next_event() for engine in self.engines if engine.usable]
                times += [grades.next_event() for grades in self.grades]
                times += [engine.dies_at for engine in self.engines]
                # An idle engine may have died unnoticed: what is past moves nobody.
                following = min((at for at in times if at > self.clock.now), default=math.inf)
                assert following < math.inf, "nothing will ever happen"
                self.clock.now = max(self.clock.now + self.pause_s, following)
        self.rollouts_s.append(self.clock.now - begun)
        first, *others = (_state(ledger) for ledger in self._ledgers)
        assert all(other == first for other in others)
        return not self.ledger.stalled

    def end(self, *, pause: bool = False) -> Sampled:
        assert self.ledger is not None
        begun: dict[int, Begun] = {}
        works: list[Work | None] = []
        for leader in self._leaders:
            begun |= leader.end(self.ledger, pause=pause)
            works.append(leader.work)
        groups = {}
        for number, one in enumerate(self.ledger.entries):
            if one.done:
                groups[number] = self._leaders[one.done.engine].groups.get(number) or self._held[one.draw.position]
        self.ledger = None
        return Sampled(groups=groups, begun=begun, work=together(works))


def _copy(ledger: Ledger, draw: Callable) -> Ledger:
    """A ledger that begins alike, of another rank."""
    from copy import deepcopy

    kept, ledger.draw = ledger.draw, None  # type: ignore[assignment]
    copy = deepcopy(ledger)
    ledger.draw, copy.draw = kept, draw
    return copy


def _state(ledger: Ledger) -> object:
    entries = [(one.draw.position, one.draw.step, one.engine, one.done) for one in ledger.entries]
    return entries, ledger.passed, ledger.batch, ledger.rounds, ledger.over, ledger.lost


def graded(answer: Graded) -> tuple[int, float]:
    """What tells a response: its first id and score."""
    assert answer.response is not None
    return (answer.response.ids[0] if answer.response.ids else -1), answer.score
