"""What a step draws, which engine samples it, what is kept, and when the step is over. Pure.

Every leader keeps a ledger of its own and applies the same events in the same order, so all of them hold the same one
and decide alike, without asking each other. A step is over when its batch is certain: the first kept groups *in prompt
order*. What is finished first is never taken first, for that would be the short answers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from megatron_rl.types import FinishReason, Prompt

Summary = tuple[int, FinishReason, float]
"""Length, finish reason and score of a response."""

TRAINING_STREAM, EVALUATION_STREAM = 0, 1
"""Training and evaluation never share seeds."""

MOST_DRAWN = 4
"""Batches that are drawn at once, at most: where next to nothing is kept, the next round knows better. (DAPO's script
draws 3.)"""

FORGET = 0.75
"""What the rates remember of the steps before, each step."""


@dataclass(frozen=True, kw_only=True)
class Draw:
    """A prompt to be sampled, and its place in the run."""

    stream: int
    """Which stream of prompts it comes from; with the position it seeds the responses, whenever they are sampled."""

    position: int
    """In that stream; one draw has it."""

    prompt: Prompt
    step: int = 0
    """The rollout step that drew it."""


@dataclass(frozen=True, kw_only=True)
class Completed:
    """Event: a group is sampled and graded."""

    number: int
    """Of the draw, in prompt order."""

    engine: int
    answers: tuple[Summary, ...]
    kept: bool


@dataclass(frozen=True, kw_only=True)
class Lost:
    """Event: an engine can sample no more in this phase."""

    engine: int
    final: str = ""
    """Why the run must end, if it must."""


Event = Completed | Lost


@dataclass(frozen=True, kw_only=True)
class Carried:
    """A draw that the step before left to this one."""

    draw: Draw
    engine: int = -1
    """Whose leader holds what there is of it; −1: there is nothing."""

    done: Completed | None = None
    """How it ended, if it has; its number is of the step before."""


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What the steps so far teach of the next: how many groups are kept, how long answers are."""

    kept: float = 0.0
    sampled: float = 0.0
    tokens: float = 0.0
    answers: float = 0.0

    def after(self, groups: Iterable[Completed]) -> Rates:
        """With the groups of a further step."""
        groups = list(groups)
        return Rates(
            kept=FORGET * self.kept + sum(group.kept for group in groups),
            sampled=FORGET * self.sampled + len(groups),
            tokens=FORGET * self.tokens + sum(answer[0] for group in groups for answer in group.answers),
            answers=FORGET * self.answers + sum(len(group.answers) for group in groups),
        )

    @property
    def keep(self) -> float:
        """Share of groups that is kept, above 0; 1 as long as nothing is known."""
        return max(self.kept, 0.5) / self.sampled if self.sampled else 1.0

    @property
    def length(self) -> float:
        """Mean length of an answer, in tokens; 1 as long as nothing is known."""
        return self.tokens / self.answers if self.answers else 1.0


def prompts_needed(missing: float, keep: float) -> int:
    """How many groups to sample so that `missing` are kept, one standard deviation of bad luck allowed for."""
    if missing <= 0:
        return 0
    # n·p − √(n·p·(1−p)) = missing, solved for √n
    spread = math.sqrt(keep * (1 - keep))
    root = (spread + math.sqrt(spread * spread + 4 * keep * missing)) / (2 * keep)
    return math.ceil(root * root - 1e-9)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is asked of a ledger."""

    wanted: int | None
    """Groups in the batch; None: every draw is sampled, and that is all (evaluation)."""

    dynamic: bool = True
    """Whether groups are left out by their scores; else all that are drawn are expected to be kept."""

    max_rounds: int = 1
    """How many times prompts may be drawn."""

    when_short: Literal["raise", "continue", "train_partial"] = "train_partial"
    """What comes after them, when the batch is not full: further rounds, or nothing."""

    max_ungraded: float = 1.0
    """Share of answers without a score above which no further round is drawn: the run is to end."""

    surplus: Literal["cancel", "finish", "pause"] = "cancel"
    """What becomes of draws behind the batch when that is certain: not sampled on; sampled to their end before the step
    is over; left as they are for the next step."""

    batches_ahead: float = 0.0
    """With `pause`: for so much more than a batch prompts are drawn at once, so that engines stay full while the last
    answers of the batch are sampled."""

    engines: int = 1
    responses: int = 1
    """Size of a group."""


@dataclass
class _Entry:
    number: int
    draw: Draw
    engine: int = -1
    done: Completed | None = None
    cost: int = 0


@dataclass
class Ledger:
    """The draws of one step, in prompt order."""

    plan: Plan
    rates: Rates
    draw: Callable[[int], Sequence[Draw]]
    """Draws so many further prompts; called alike on every leader."""

    rounds: int = 0
    """That were drawn; not 0 at the beginning of a step that is begun again with all its draws."""

    over: bool = False
    failure: str = ""
    """Why it is over before its time."""

    entries: list[_Entry] = field(default_factory=list)
    lost: set[int] = field(default_factory=set)
    passed: int = 0
    """How many draws the step is done with, when it is over: the batch, and what was left out before its last group."""

    _loads: list[int] = field(default_factory=list)  # whole tokens: what is added and taken again leaves nothing
    _open: list[dict[int, None]] = field(default_factory=list)  # by engine: numbers, in order
    _ended: int = 0  # draws at the front that have ended
    _kept: list[int] = field(default_factory=list)  # of these
    _kept_so_far: int = 0  # of all

    def begin(self, carried: Sequence[Carried] = (), draws: Sequence[Draw] = ()) -> None:
        """Start with what is carried over from the step before and `draws`, in prompt order, and the first round."""
        self._loads = [0] * self.plan.engines
        self._open = [{} for _ in range(self.plan.engines)]
        for one in carried:
            entry = _Entry(number=len(self.entries), draw=one.draw, done=one.done)
            self.entries.append(entry)
            self._kept_so_far += one.done is not None and one.done.kept
            if one.done is None and one.engine >= 0:
                self._assign(entry, one.engine)
        for entry in self.entries:
            if entry.done is None and entry.engine < 0:
                self._route(entry)
        self._take(draws)
        if self.plan.wanted is not None and not self.rounds:
            self._draw_round()
        self._advance()

    def apply(self, event: Event) -> None:
        """Take note of an event. What comes after the step is over changes nothing."""
        if self.over:
            return
        if isinstance(event, Lost):
            self.lost.add(event.engine)
            self.failure, self.over = event.final, bool(event.final)
            self._reassign([event.engine])
            return
        entry = self.entries[event.number]
        if entry.done is None:  # else an engine that was given up had finished it after all
            self._loads[entry.engine] -= entry.cost
            del self._open[entry.engine][entry.number]
            entry.done = event
            self._kept_so_far += event.kept
            self._advance()

    def revive(self) -> None:
        """All engines sample again."""
        self.lost.clear()
        self._loads = [0] * self.plan.engines
        self._reassign(range(self.plan.engines))

    @property
    def stalled(self) -> bool:
        """Whether there is work, and no engine left that could do it."""
        return not self.over and len(self.lost) == self.plan.engines

    def open_for(self, engine: int) -> list[int]:
        """Numbers of the draws that an engine has to sample, in prompt order."""
        return list(self._open[engine])

    @property
    def batch(self) -> list[int]:
        """Numbers of the kept draws of the batch, when the step is over."""
        return [number for number in self._kept if number < self.passed]

    def completed(self, first: int = 0, last: int | None = None) -> list[Completed]:
        """How the draws from `first` to before `last` ended, those that have."""
        return [one.done for one in self.entries[first:last] if one.done is not None]

    def _advance(self) -> None:
        """Look whether the step is over; draw the next round when all is sampled and the batch is not full."""
        while self._ended < len(self.entries) and (done := self.entries[self._ended].done):
            self._kept += [self._ended] if done.kept else []
            self._ended += 1
        wanted, all_ended = self.plan.wanted, self._ended == len(self.entries)
        if wanted is not None and len(self._kept) >= wanted:
            self.passed = self._kept[wanted - 1] + 1
            self.over = self.plan.surplus != "finish" or all_ended
        elif all_ended:
            another = self.rounds < self.plan.max_rounds or self.plan.when_short == "continue"
            if wanted is None or not another or self._too_many_ungraded():
                self.passed, self.over = self._ended, True
            else:
                self._draw_round()

    def _too_many_ungraded(self) -> bool:
        scores = [score for one in self.completed() for _, _, score in one.answers]
        return sum(map(math.isnan, scores)) > self.plan.max_ungraded * len(scores)

    def _draw_round(self) -> None:
        assert self.plan.wanted is not None
        keep = 1.0
        if self.plan.dynamic:
            keep = (self.rates.after(self.completed()) if self.rounds else self.rates).keep
        batches = 1 + (self.plan.batches_ahead if self.plan.surplus == "pause" else 0)
        target = batches * self.plan.wanted
        self.rounds += 1
        needed = prompts_needed(target - self._expected(keep), keep)
        self._take(self.draw(min(needed, round(MOST_DRAWN * target))))

    def _expected(self, keep: float) -> float:
        """How many of all draws will be kept, if those that are open are kept at that rate."""
        return self._kept_so_far + sum(map(len, self._open)) * keep

    def _take(self, draws: Sequence[Draw]) -> None:
        for draw in draws:
            entry = _Entry(number=len(self.entries), draw=draw)
            self.entries.append(entry)
            self._route(entry)

    def _route(self, entry: _Entry) -> None:
        """Give a draw, its whole group for the cache's sake, to the engine with the fewest tokens to come."""
        alive = [engine for engine in range(self.plan.engines) if engine not in self.lost]
        if alive:
            self._assign(entry, min(alive, key=lambda engine: self._loads[engine]))

    def _assign(self, entry: _Entry, engine: int) -> None:
        entry.engine = engine
        entry.cost = len(entry.draw.prompt.ids) + round(self.plan.responses * self.rates.length)
        self._loads[engine] += entry.cost
        self._open[engine][entry.number] = None

    def _reassign(self, engines: Iterable[int]) -> None:
        """Give what these have to others; to nobody if there are none."""
        for number in sorted(number for engine in engines for number in self._open[engine]):
            entry = self.entries[number]
            if len(self.lost) < self.plan.engines:
                del self._open[entry.engine][number]
                self._route(entry)
