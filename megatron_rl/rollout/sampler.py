"""Graded groups, sampled by all engines together.

Every rank gets the same groups, as summaries: lengths, finish reasons, scores. Tokens and texts stay with the rank that
leads their engine and parsed them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields

import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from megatron_rl.errors import UserError
from megatron_rl.rollout.board import StoreBoard
from megatron_rl.rollout.engine import Engine
from megatron_rl.rollout.leader import Begun, Grades, Leader, Task, Work
from megatron_rl.rollout.ledger import Event, Ledger
from megatron_rl.rollout.waiting import EngineWait, pause_s
from megatron_rl.types import Graded, Group, Response


class SamplingEndedError(UserError):
    """Sampling can't go on: engines or graders fail too often, a filter of the user's does, or a batch stays short that
    must not. Raised on every rank, between two collectives: the run can still be saved."""


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """What came of a ledger, on one rank."""

    groups: dict[int, Group]
    """By number in the ledger, those that are completed; on their home with tokens and texts."""

    begun: dict[int, Begun] = field(default_factory=dict)
    """By number, what this rank has of others."""

    work: Work
    """Of all leaders together."""


class GroupSampler:
    """One rank's part in sampling: `begin`, `go_on` until all is done, `end`. Collectives over all ranks."""

    def __init__(
        self,
        engine: Engine,
        wait: EngineWait,
        grades: Grades,
        tokenizer: PreTrainedTokenizerBase,
        check: Callable[[Response, bool], None],
        everyone: dist.ProcessGroup | None = None,
    ) -> None:
        """Sample with `engine`, that of this rank's group.

        Args:
            engine: it.
            wait: how the ranks wait for each other.
            grades: this rank's graders.
            tokenizer: of the model.
            check: refuses responses of other weights than were pushed, and aborted ones unless they may be.
            everyone: all ranks of the run; None: the default group.
        """
        self.everyone = everyone
        self.engine, self.wait, self.grades, self.tokenizer, self.check = engine, wait, grades, tokenizer, check
        self.ledger: Ledger | None = None
        """Of the groups that are sampled now; the same on every rank between two calls."""

        self._leader: Leader | None = None
        self._held: dict[int, Group] = {}
        self._final = ""  # the leader's, from step to step

    def begin(
        self,
        ledger: Ledger,
        task: Task,
        *,
        keeps: Callable[[Group], bool],
        held: Mapping[int, Group] | None = None,
        begun: Mapping[int, Begun] | None = None,
    ) -> None:
        """Sample what `ledger` says, from the next `go_on` on.

        Args:
            ledger: begun, and the same on every rank.
            task: what is asked of every draw.
            keeps: whether a group is trained on.
            held: by position, groups that a step before completed on this rank.
            begun: by position, answers that a step before began on this rank.
        """
        group = self.wait.group
        self.ledger, self._held = ledger, dict(held or {})
        if group.leads:
            self._leader = Leader(
                group.number,
                rank=group.rank,
                engine=self.engine,
                grades=self.grades,
                decode=self.decode,
                keeps=keeps,
                task=task,
                begun=begun or {},
                final=self._final,
            )

    def go_on(self) -> bool:
        """Sample until the ledger is over; False if all engines were lost before: bring them weights, and go on.

        Raises:
            UserError: a leader has hung.
            SamplingEndedError: an engine was lost too often, or `keeps` raised.
        """
        ledger, leader, wait = self.busy(), self._leader, self.wait
        if ledger.stalled:
            ledger.revive()
        events: list[Event] = []
        with wait.until_all_are_done() as look:
            if leader:
                board = StoreBoard(wait.store, f"rollout/{wait.number}/events")
                leader.meet(board, self.check, usable=self.engine.health())
                moved = time.monotonic()
                while not (ledger.over or ledger.stalled):
                    if leader.step(ledger, pause_s(time.monotonic() - moved)):
                        moved = time.monotonic()
                    look()
                events = board.read
        message = [events]
        dist.broadcast_object_list(message, src=wait.group.leader_of(0), group=self.everyone)
        if leader:
            board.clear()
        else:
            for event in message[0]:
                ledger.apply(event)
        if ledger.failure:
            raise SamplingEndedError(ledger.failure)
        return not ledger.stalled

    def end(self, *, pause: bool = False) -> Sampled:
        """What came of it. What is still under way is stopped, and thrown away unless it is to `pause`."""
        ledger, leader = self.busy(), self._leader
        begun = leader.end(ledger, pause=pause) if leader else {}
        self._final = leader.final if leader else ""
        works: list[Work | None] = [None] * self.wait.group.world
        dist.all_gather_object(works, leader.work if leader else None, group=self.everyone)
        groups = {number: self._group(number) for number, one in enumerate(ledger.entries) if one.done}
        self.ledger = self._leader = None
        return Sampled(groups=groups, begun=begun, work=together(works))

    def decode(self, ids: Sequence[int]) -> str:
        """The text of a response, without special tokens."""
        return self.tokenizer.decode(ids, skip_special_tokens=True)

    def busy(self) -> Ledger:
        """The ledger of what is sampled now. Raises RuntimeError if nothing is."""
        if self.ledger is None:
            raise RuntimeError("nothing is sampled; begin first")
        return self.ledger

    def _group(self, number: int) -> Group:
        """A completed group; elsewhere than on its home what every rank knows of it."""
        assert self.ledger is not None
        entry = self.ledger.entries[number]
        assert entry.done is not None
        if self._leader and entry.done.engine == self.wait.group.number:
            return self._leader.groups.get(number) or self._held[entry.draw.position]
        home = self.wait.group.leader_of(entry.done.engine)
        known = (
            Graded(length=length, finish_reason=reason, score=score, home=home)
            for length, reason, score in entry.done.answers
        )
        return Group(prompt=entry.draw.prompt, responses=tuple(known))


def together(works: Sequence[Work | None]) -> Work:
    """The work of several leaders, summed; ranks that lead nothing have none."""
    total = Work()
    for work in works:
        if work is None:
            continue
        for one in fields(Work):
            if one.name != "ungraded":
                setattr(total, one.name, getattr(total, one.name) + getattr(work, one.name))
        for reason, count in work.ungraded.items():
            total.ungraded[reason] = total.ungraded.get(reason, 0) + count
    return total
