"""Which groups make the batch, who samples them, and when a step is over."""

import math
import random
from dataclasses import replace

import pytest

from megatron_rl.rollout.ledger import Carried, Completed, Draw, Ledger, Lost, Plan, Rates, prompts_needed
from megatron_rl.types import Prompt


class Source:
    """Prompts with lengths of their own."""

    def __init__(self, step: int = 1, first: int = 0) -> None:
        self.step, self.position, self.counts = step, first, list[int]()

    def __call__(self, count: int) -> list[Draw]:
        self.counts.append(count)
        drawn = []
        for _ in range(count):
            ids = (1,) * (3 + self.position % 4)
            prompt = Prompt(index=self.position, text="", ids=ids, answer="")
            drawn.append(Draw(stream=0, position=self.position, prompt=prompt, step=self.step))
            self.position += 1
        return drawn


def ledger(carried: tuple[Carried, ...] = (), rates: Rates | None = None, **plan: object) -> tuple[Ledger, Source]:
    source = Source(step=2, first=len(carried))
    values = {"wanted": 4, "max_rounds": 3, "responses": 2, **plan}
    one = Ledger(plan=Plan(**values), rates=rates or Rates(), draw=source)  # type: ignore[arg-type]
    one.begin(carried)
    return one, source


def ended(number: int, kept: bool = True, engine: int = 0, length: int = 5) -> Completed:
    answers = ((length, "stop", 1.0), (length, "stop", 0.0))
    return Completed(number=number, engine=engine, answers=answers, kept=kept)  # type: ignore[arg-type]


def test_the_batch_is_the_first_kept_in_prompt_order_whatever_ends_first() -> None:
    kept = [True, False, True, True, False, False, True, True, True, False, True, True]
    expected: tuple[list[int], int] | None = None
    for seed in range(50):
        one, source = ledger(rates=Rates(kept=4, sampled=10), surplus="finish")
        left = list(range(len(one.entries)))
        order = random.Random(seed)
        while not one.over:
            number = left.pop(order.randrange(len(left)))
            one.apply(ended(number, kept[number % len(kept)], one.entries[number].engine))
        expected = expected or (one.batch, one.passed)
        assert (one.batch, one.passed) == expected == ([0, 2, 3, 6], 7)
        assert source.counts == [15]  # 10 would give 4 on average, 15 even with bad luck


def test_a_step_is_over_as_soon_as_its_batch_is_certain_and_not_before() -> None:
    one, _ = ledger(rates=Rates(kept=5, sampled=10))
    for number in (5, 4, 3, 2, 1):
        one.apply(ended(number))
        assert not one.over  # the first prompt could still be kept
    one.apply(ended(0, kept=False))
    assert one.over
    assert one.batch == [1, 2, 3, 4]
    assert one.passed == 5
    one.apply(ended(6))
    assert one.entries[6].done is None  # too late


def test_with_a_use_for_them_the_groups_behind_the_batch_are_sampled_to_their_end() -> None:
    one, _ = ledger(rates=Rates(kept=5, sampled=10), surplus="finish")
    count = len(one.entries)
    for number in range(count):
        assert not one.over
        one.apply(ended(number))
    assert one.over
    assert one.passed == 4
    assert count > 4


def test_rounds_draw_what_is_missing_by_the_keep_rate() -> None:
    one, source = ledger()
    assert source.counts == [4]
    for number in range(4):
        one.apply(ended(number, kept=number == 2))
    assert source.counts == [4, 16]  # 3 / 0.25 = 12, and bad luck: 20; four batches at most
    assert one.rounds == 2


@pytest.mark.parametrize("when_short", ["train_partial", "continue", "raise"])
def test_after_the_last_round_a_step_is_over_or_goes_on(when_short: str) -> None:
    one, source = ledger(when_short=when_short, max_rounds=2)
    number = 0
    while not one.over and number < 100:
        one.apply(ended(number, kept=number == 1 or number >= 60))
        number += 1
    assert one.over
    assert len(one.batch) == (4 if when_short == "continue" else 1)
    assert (one.rounds > 2) == (when_short == "continue")
    assert max(source.counts) == 16  # four batches at once, where nothing is kept


def test_all_draws_of_an_evaluation_are_sampled_and_nothing_more() -> None:
    source = Source()
    one = Ledger(plan=Plan(wanted=None, engines=2, responses=2), rates=Rates(), draw=source)
    one.begin(draws=Source()(5))
    for number in (4, 2, 0, 1):
        one.apply(ended(number, kept=False))
        assert not one.over
    one.apply(ended(3))
    assert (one.over, one.passed, source.counts) == (True, 5, [])


def test_engines_get_equal_loads_of_tokens_and_a_group_stays_on_one() -> None:
    rates = Rates(kept=9, sampled=10, tokens=5000, answers=10)
    one, _ = ledger(engines=3, wanted=30, responses=4, rates=rates)
    loads = [0.0] * 3
    for entry in one.entries:
        loads[entry.engine] += len(entry.draw.prompt.ids) + 4 * 500
    assert max(loads) - min(loads) <= 4 * 500 + 6
    assert sorted(number for engine in range(3) for number in one.open_for(engine)) == list(range(len(one.entries)))


def test_who_samples_a_further_round_does_not_depend_on_what_ended_first() -> None:
    def routes(seed: int) -> list[int]:
        source = Source()

        def draw(count: int) -> list[Draw]:
            lengths = [(one, 3 + one.position * 7919 % 1500) for one in source(count)]
            return [replace(one, prompt=replace(one.prompt, ids=(1,) * length)) for one, length in lengths]

        plan = Plan(wanted=60, max_rounds=2, engines=3, responses=3)
        one = Ledger(plan=plan, rates=Rates(kept=3, sampled=7, tokens=100, answers=7), draw=draw)
        one.begin()
        first = len(one.entries)
        for number in random.Random(seed).sample(range(first), first):
            one.apply(ended(number, kept=number % 5 == 0, engine=one.entries[number].engine))
        assert len(source.counts) == 2
        return [entry.engine for entry in one.entries[first:]]

    assert all(routes(seed) == routes(0) for seed in range(40))


def test_what_an_engine_had_goes_to_others_when_it_is_lost() -> None:
    one, _ = ledger(engines=2, wanted=6)
    before = one.open_for(0)
    one.apply(ended(before[0], engine=0))
    one.apply(Lost(engine=0))
    assert one.open_for(0) == []
    assert set(before[1:]) <= set(one.open_for(1))
    one.apply(ended(before[1], engine=0))  # it had finished that one, and its grades came later
    one.apply(ended(before[1], engine=1))
    done = one.entries[before[1]].done
    assert done is not None
    assert done.engine == 0
    assert not one.stalled
    one.apply(Lost(engine=1))
    assert one.stalled
    one.revive()
    assert not one.stalled
    assert sorted(one.open_for(0) + one.open_for(1)) == [n for n, e in enumerate(one.entries) if e.done is None]
    assert one.open_for(0)


def test_an_engine_that_was_lost_too_often_ends_the_step() -> None:
    one, _ = ledger(engines=2)
    one.apply(Lost(engine=1, final="too often"))
    assert (one.over, one.failure) == (True, "too often")


def test_what_is_carried_over_comes_first_and_open_draws_stay_where_they_were_begun() -> None:
    draws = Source(step=1)(5)
    carried = (
        Carried(draw=draws[0], engine=1),
        Carried(draw=draws[1], engine=0, done=ended(7)),
        Carried(draw=draws[2], engine=1),
        Carried(draw=draws[3], engine=0, done=ended(9, kept=False)),
        Carried(draw=draws[4], engine=0, done=ended(10)),
    )
    one, source = ledger(carried, engines=2, surplus="pause")
    assert source.counts == [0]  # two are kept, and the two that are open will be, as far as is known
    assert (one.open_for(0), one.open_for(1)) == ([], [0, 2])
    one.apply(ended(0, engine=1))
    one.apply(ended(2, engine=1, kept=False))
    assert not one.over
    assert source.counts == [0, 4]
    one.apply(ended(6))
    one.apply(ended(5))
    assert one.over
    assert one.batch == [0, 1, 4, 5]


def test_a_step_whose_batch_was_carried_over_is_over_at_once() -> None:
    carried = tuple(Carried(draw=d, engine=0, done=ended(n)) for n, d in enumerate(Source(step=1)(6)))
    one, source = ledger(carried, surplus="finish")
    assert (one.over, one.batch, one.passed, source.counts) == (True, [0, 1, 2, 3], 4, [0])


def test_with_pauses_prompts_are_drawn_ahead() -> None:
    one, source = ledger(surplus="pause", batches_ahead=1.5)
    assert source.counts == [10]
    for number in (3, 0, 2, 1):
        one.apply(ended(number))
    assert (one.over, one.passed, one.batch) == (True, 4, [0, 1, 2, 3])
    one, source = ledger(surplus="finish", batches_ahead=1.5)
    assert source.counts == [4]


def test_rates_forget_and_never_divide_by_nothing() -> None:
    rates = Rates().after([ended(0, kept=False, length=8)] * 10)
    assert rates.keep == 0.05  # none of ten
    assert rates.length == 8
    rates = rates.after([ended(0, length=2)] * 10)
    assert rates.keep == pytest.approx(10 / 17.5)
    assert rates.length == pytest.approx((0.75 * 160 + 40) / 35)


def test_the_prompts_that_are_needed() -> None:
    assert prompts_needed(0, 0.5) == 0
    assert prompts_needed(512, 1.0) == 512
    for keep in (0.9, 0.5, 0.03):
        count = prompts_needed(100, keep)
        lucky = [n * keep - math.sqrt(n * keep * (1 - keep)) for n in (count - 1, count)]
        assert lucky[0] < 100 <= lucky[1]
