"""What the rank that leads an engine does while all sample: feeds it, has answers graded, and tells the others."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from megatron_rl.errors import UserError
from megatron_rl.rewards.grade import Grade
from megatron_rl.rollout.engine import Engine, EngineLost, Request, Sampling, response_seed
from megatron_rl.rollout.ledger import Completed, Draw, Event, Ledger, Lost
from megatron_rl.types import Graded, Group, Prompt, Response

log = logging.getLogger(__name__)

Begun = list[Response | None]
"""Of each sample of a group what there is of it: all, a part (its finish reason is `abort`), or nothing."""


class Board(Protocol):
    """Events in one order for all leaders."""

    def post(self, event: Event) -> None:
        """Tell it to all, also to oneself."""

    def news(self) -> Iterable[Event]:
        """Events since the last call, in order."""


class Grades(Protocol):
    """Grades groups while their leader does something else."""

    def submit(self, key: int, prompt: Prompt, answers: Sequence[tuple[str, bool]]) -> None:
        """Take the texts of a group, each with whether it ended by itself."""

    def poll(self) -> list[tuple[Any, list[Grade]]]:
        """Groups whose answers are all graded since the last call; does not wait."""

    def forget(self) -> None:
        """Grade nothing more of what was taken."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is asked of every draw."""

    responses: int
    """Size of a group."""

    max_tokens: int
    """Longest response."""

    sampling: Sampling
    seed: int
    """Of the run."""


@dataclass
class Work:
    """What a leader has done; figures of one rank."""

    tokens: int = 0
    """Sampled, whatever became of them."""

    samples: int = 0
    """Responses begun."""

    continued: int = 0
    """Responses that were begun in a step before."""

    aborted: int = 0
    """Responses that were stopped on their way."""

    engines_lost: int = 0
    """How often the engine was lost since the run began, whoever noticed."""

    ungraded: dict[str, int] = field(default_factory=dict)
    """Answers without a grade, by reason."""


@dataclass
class _InWork:
    draw: Draw
    answers: Begun
    missing: int


class Leader:
    """Leads one engine through one rollout. Nothing in it waits long: `step` is called again and again."""

    def __init__(
        self,
        number: int,
        *,
        rank: int,
        engine: Engine,
        grades: Grades,
        decode: Callable[[Sequence[int]], str],
        keeps: Callable[[Group], bool],
        task: Task,
        begun: Mapping[int, Begun],
        final: str = "",
    ) -> None:
        """Lead engine `number`.

        Args:
            number: of the engine.
            rank: the process's.
            engine: it.
            grades: this rank's graders.
            decode: token ids to text.
            keeps: whether a group is trained on; a UserError that it raises ends the run on every rank.
            task: what is asked of every draw.
            begun: by position of a draw, what a step before left here of its answers.
            final: the `final` of this engine's leader of the step before.
        """
        self.number, self.rank, self.engine, self.grades = number, rank, engine, grades
        self.decode, self.keeps, self.task, self.begun = decode, keeps, task, dict(begun)
        self.final = final
        """Why the run must end. Told each time: a step that was over just before it took no note of it."""

        self.work = Work()
        self.groups: dict[int, Group] = {}
        """By number in the ledger: groups that were completed here, whole."""

        self._completed: list[Completed] = []  # what was told of them
        self._in_work: dict[int, _InWork] = {}
        self._asked: dict[int, tuple[int, dict[int, int]]] = {}  # by key: draw, and which of its samples are awaited
        self._last_key = 0
        self._lost = False

    def meet(self, board: Board, check: Callable[[Response, bool], None], *, usable: bool) -> None:
        """Begin, or go on after all engines were lost and came back.

        Args:
            board: all leaders'.
            check: refuses responses of other weights than all engines should have, and aborted ones unless they may be.
            usable: whether this engine has weights.
        """
        self._board, self._check, self._lost = board, check, bool(self.final) or not usable
        for event in self._completed:  # again: nobody read what came behind the loss of the last engine
            board.post(event)
        if self._lost:
            board.post(Lost(engine=self.number, final=self.final))

    def step(self, ledger: Ledger, wait_s: float) -> bool:
        """Look at everything once, and wait about so long for the engine; whether anything happened."""
        moved = False
        for event in self._board.news():
            moved = True
            ledger.apply(event)
            if ledger.over or ledger.stalled:
                return True
        for number, grades in self.grades.poll():
            moved = True
            self._complete(number, grades)
        if self._lost:
            time.sleep(0.0 if moved else wait_s)
            return moved
        try:
            for number in ledger.open_for(self.number):
                if number not in self._in_work and number not in self.groups:
                    moved = True
                    self._begin(number, ledger.entries[number].draw)
            return self._listen(0.0 if moved else wait_s) or moved
        except EngineLost as lost:
            self.report_lost(str(lost))
            return True

    def report_lost(self, reason: str) -> None:
        """The engine can't sample in this phase."""
        log.warning("engine %d was lost: %s", self.number, reason.partition("\n")[0])  # the engine says more
        self._lost = True
        self._asked.clear()
        for number in [number for number, one in self._in_work.items() if one.missing]:  # others repeat them
            self._keep_begun(number)
        try:
            self.engine.restart()
        except UserError as error:
            self.final = str(error)
            self.engine.stop()
        self._board.post(Lost(engine=self.number, final=self.final))

    def end(self, ledger: Ledger, *, pause: bool) -> dict[int, Begun]:
        """Stop sampling what `ledger` says.

        Returns:
            By number in the ledger, if it is to `pause`: what there is of the groups that are not completed.
        """
        if self._asked and not self._lost:
            for key, sample, response in self.engine.abort():
                self._check(response, True)
                self._take(key, sample, response)
        self.work.engines_lost = self.engine.losses
        self.grades.forget()  # after that: what was completed just now would be graded
        left = {number: self._what_there_is(number, ledger) for number in ledger.open_for(self.number) if pause}
        return {number: answers for number, answers in left.items() if any(answers)}

    def _what_there_is(self, number: int, ledger: Ledger) -> Begun:
        """Of the answers to a draw that the ledger takes for open."""
        if number in self.groups:  # completed, but the step was over before all knew
            return [answer.response for answer in self.groups[number].responses]
        if number in self._in_work:
            return self._in_work[number].answers
        return self.begun.get(ledger.entries[number].draw.position, [])  # its turn has not come in this step

    def _begin(self, number: int, draw: Draw) -> None:
        """Ask the engine for what a group lacks; answers that were begun go on, the others share one request.

        One that has no room left (the run was resumed with a smaller budget) is as long as it may be.
        """
        answers = list(self.begun.pop(draw.position, ()))
        answers += [None] * (self.task.responses - len(answers))
        self._in_work[number] = _InWork(draw, answers, missing=0)
        fresh = [sample for sample, answer in enumerate(answers) if answer is None]
        if fresh:
            self._ask(number, draw, fresh, ())
        for sample, answer in enumerate(answers):
            if answer is None or answer.finish_reason != "abort":
                continue
            if len(answer.ids) < self.task.max_tokens:
                self._ask(number, draw, [sample], answer.ids)
            else:
                answers[sample] = replace(answer, finish_reason="length")
        if not self._in_work[number].missing:  # only its grades were missing
            self._grade(number)

    def _ask(self, number: int, draw: Draw, samples: Sequence[int], begun: tuple[int, ...]) -> None:
        seeds = tuple(response_seed(self.task.seed, draw.stream, draw.position, sample) for sample in samples)
        self._last_key += 1
        self._asked[self._last_key] = number, dict(enumerate(samples))
        self._in_work[number].missing += len(samples)
        request = Request(prompt_ids=draw.prompt.ids, seeds=seeds, max_tokens=self.task.max_tokens, begun=begun)
        self.engine.submit(self._last_key, request, self.task.sampling)

    def _listen(self, wait_s: float) -> bool:
        """Take what the engine has; whether it had anything."""
        if not self._asked:
            time.sleep(wait_s)
            return False
        found = self.engine.poll(wait_s)
        for key, sample, response in found:
            self._check(response, False)
            self._take(key, sample, response)
        return bool(found)

    def _take(self, key: int, sample: int, response: Response) -> None:
        """A response, or a part of one, that an engine gave."""
        number, awaited = self._asked[key]
        one, place = self._in_work[number], awaited.pop(sample)
        if not awaited:
            del self._asked[key]
        if response.ids:  # else it waited in the engine's queue
            self.work.tokens += len(response.ids)
            self.work.samples += one.answers[place] is None
            self.work.continued += one.answers[place] is not None
            self.work.aborted += response.finish_reason == "abort"
        if response.ids or response.finish_reason != "abort":
            one.answers[place] = joined(one.answers[place], response)
        if response.finish_reason != "abort":
            one.missing -= 1
            if not one.missing:
                self._grade(number)

    def _grade(self, number: int) -> None:
        one = self._in_work[number]
        answers = [answer for answer in one.answers if answer is not None]
        texts = [(self.decode(answer.ids), answer.finish_reason == "stop") for answer in answers]
        self.grades.submit(number, one.draw.prompt, texts)

    def _complete(self, number: int, grades: Sequence[Grade]) -> None:
        one = self._in_work.pop(number)
        graded = []
        for answer, grade in zip(one.answers, grades, strict=True):
            assert answer is not None
            text = self.decode(answer.ids)
            graded.append(Graded.of(answer, text=text, score=grade.score, details=grade.details, home=self.rank))
            if grade.error:
                self._note_ungraded(one.draw.prompt, grade.error)
        group = Group(prompt=one.draw.prompt, responses=tuple(graded))
        self.groups[number] = group
        answers = tuple((one.length, one.finish_reason, one.score) for one in graded)
        try:
            kept = self.keeps(group)
        except UserError as error:  # told to all, so that none waits for this rank
            self.final = str(error)
            self._board.post(Lost(engine=self.number, final=self.final))
            return
        event = Completed(number=number, engine=self.number, answers=answers, kept=kept)
        self._completed.append(event)
        self._board.post(event)

    def _note_ungraded(self, prompt: Prompt, error: str) -> None:
        if error not in self.work.ungraded:
            log.warning("the prompt of row %d: an answer is ungraded: %s", prompt.index, error)
        self.work.ungraded[error] = self.work.ungraded.get(error, 0) + 1

    def _keep_begun(self, number: int) -> None:
        one = self._in_work.pop(number)
        if any(one.answers):
            self.begun[one.draw.position] = one.answers


def joined(begun: Response | None, more: Response) -> Response:
    """A response that was begun, and what came after."""
    if begun is None:
        return more
    return Response(
        ids=begun.ids + more.ids,
        logprobs=begun.logprobs + more.logprobs,
        finish_reason=more.finish_reason,
        weight_versions=begun.weight_versions + more.weight_versions,
    )
