"""What leaders tell one another when it comes at a bad moment."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megatron_rl.rollout.engine import Sampling
from megatron_rl.rollout.leader import Leader, Task
from megatron_rl.rollout.ledger import Draw, Event, Ledger, Plan, Rates
from megatron_rl.types import Group, Prompt
from tests.simulated import Clock, FakeEngine, ListBoard, SlowGrades

TASK = Task(responses=2, max_tokens=90, sampling=Sampling(), seed=0)


class Leaders:
    """A leader for each of two engines, which have a group each."""

    def __init__(self, keeps: Callable[[Group], bool]) -> None:
        self.clock = Clock()
        engines = [FakeEngine(self.clock, lambda seed, longest: 10) for _ in range(2)]
        grades = [SlowGrades(self.clock, lambda prompt, sample: float(sample), lambda prompt: 1.0) for _ in range(2)]
        self.leaders = [
            Leader(
                number,
                rank=number,
                engine=engines[number],  # type: ignore[arg-type]
                grades=grades[number],
                decode=lambda ids: "",
                keeps=keeps,
                task=TASK,
                begun={},
            )
            for number in range(2)
        ]
        prompts = [Prompt(index=n, text="", ids=(1,), answer="") for n in range(2)]
        draws = [Draw(stream=0, position=n, prompt=prompt) for n, prompt in enumerate(prompts)]
        plan = Plan(wanted=None, engines=2, responses=2)
        self.ledgers = [Ledger(plan=plan, rates=Rates(), draw=lambda count: ()) for _ in range(2)]
        for ledger in self.ledgers:
            ledger.begin(draws=draws)

    def meet(self) -> None:
        """On a board of its own, as each time."""
        events: list[Event] = []
        for leader in self.leaders:
            leader.meet(ListBoard(events), lambda response, aborted_ok: None, usable=True)

    def look(self, until: float, numbers: Sequence[int] = (0, 1)) -> None:
        """Let these look again and again until it is so late."""
        while self.clock.now < until:
            self.clock.now += 0.05
            for number in numbers:
                ledger = self.ledgers[number]
                if not (ledger.over or ledger.stalled):
                    self.leaders[number].step(ledger, 0.0)


def test_a_group_that_is_completed_behind_the_loss_of_the_last_engine_is_told_again() -> None:
    lose_the_other: list[Callable[[], None]] = []

    def keeps(group: Group) -> bool:
        while lose_the_other:  # between this leader's look at the board and what it posts
            lose_the_other.pop()()
        return True

    two = Leaders(keeps)
    two.meet()
    two.look(until=0.5, numbers=[0])  # the first group is with its grader
    two.leaders[0].report_lost("it was killed")
    lose_the_other.append(lambda: two.leaders[1].report_lost("it was killed"))
    two.look(until=2.0, numbers=[0])
    two.look(until=2.5)
    assert [ledger.stalled for ledger in two.ledgers] == [True, True]
    assert list(two.leaders[0].groups) == [0]
    for ledger in two.ledgers:
        ledger.revive()
    two.meet()
    two.look(until=9.0)
    for ledger in two.ledgers:
        assert ledger.over
        assert [one.engine for one in ledger.completed()] == [0, 1]
    assert two.leaders[0].work.samples == 2


def test_to_begin_a_group_is_something_that_happened() -> None:
    """What is begun may have all its answers: then it is with its grader at once, and nobody should sleep on it."""
    two = Leaders(lambda group: True)
    two.meet()
    assert [two.leaders[0].step(two.ledgers[0], 0.0) for _ in range(2)] == [True, False]
