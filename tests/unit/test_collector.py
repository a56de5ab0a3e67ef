"""Dynamic sampling over simulated engines: kept groups fill the batch in prompt order, whatever the timing."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest

from megatron_rl.rollout.collector import Collector, Rollout
from megatron_rl.rollout.engine import response_seed
from megatron_rl.rollout.figures import sampling_metrics
from megatron_rl.rollout.ledger import TRAINING_STREAM, Carried, Completed, Draw
from megatron_rl.rollout.leftover import Leftover
from megatron_rl.rollout.sampler import SamplingEndedError
from megatron_rl.types import Group, Prompt, Response
from tests.simulated import Clock, FakeEngine, SimulatedSampler, SlowGrades, lognormal
from tests.tiny import graded_group, run_config

NAN = float("nan")
LENGTH = lognormal(40, 0.8)


class InOrder:
    """A stream whose prompt at a position has that index."""

    def __init__(self) -> None:
        self.position, self.counts, self.longest = 0, list[int](), 10**6

    def draw(self, count: int) -> list[tuple[int, Prompt]]:
        self.counts.append(count)
        first, self.position = self.position, self.position + count
        assert self.position <= self.longest
        return [(n, Prompt(index=n, text="", ids=(1,) * (2 + n % 5), answer="")) for n in range(first, self.position)]


@dataclass
class Rig:
    """A collector and what it works with."""

    collector: Collector
    sampler: SimulatedSampler
    stream: InOrder
    clock: Clock
    warnings: list[str]

    def steps(self, count: int) -> list[Rollout]:
        found = []
        for step in range(1, count + 1):
            for engine in self.sampler.engines:
                engine.version = step
            rollout = self.collector.collect(step)
            assert rollout is not None
            found.append(rollout)
        return found


def rig(
    right: Sequence[int] | Callable[[int], int],
    *,
    engines: int = 2,
    dynamic: bool = True,
    group_filter: str = "mixed",
    timing: int = 0,
    score: Callable[[Prompt, int], float] | None = None,
    **rollout: Any,
) -> Rig:
    """Groups of four; of that at position n `right[n]` are right. `timing` changes all times, and nothing else."""
    of = right if callable(right) else (lambda n: right[n])
    config = run_config(
        algorithm={"dynamic_sampling": dynamic, "group_filter": group_filter},
        rollout={"prompts_per_step": 3, "responses_per_prompt": 4, "max_response_tokens": 90, **rollout},
    )
    clock, warnings = Clock(), list[str]()
    grade = score or (lambda prompt, sample: float(sample < of(prompt.index)))
    speed = [0.01 * (1 + (timing * (number + 3)) % 5) for number in range(engines)]
    sampler = SimulatedSampler(
        clock,
        [FakeEngine(clock, LENGTH, partial(_step_s, s)) for s in speed],
        [SlowGrades(clock, grade, lambda prompt: (prompt.index * 7 + timing) % 5 * 0.3) for _ in range(engines)],
        seed=timing,
    )
    stream = InOrder()
    return Rig(Collector(sampler, stream, config, warnings.append), sampler, stream, clock, warnings)  # type: ignore[arg-type]


def _step_s(seconds: float, running: int) -> float:
    return seconds * (1 + running / 9)


def indices(groups: Sequence[Group]) -> list[int]:
    return [group.prompt.index for group in groups]


def tokens(groups: Sequence[Group]) -> list[list[tuple[int, ...]]]:
    return [[one.response.ids for one in group.responses if one.response] for group in groups]


def test_groups_are_kept_in_prompt_order_until_the_batch_is_full() -> None:
    # Right of four: 0, 2, 4 | 1, 4, 3 | ...: groups 1, 3 and 5 are kept, and two rounds are enough.
    one = rig([0, 2, 4, 1, 4, 3] + [2] * 99)
    (rollout,) = one.steps(1)
    assert indices(rollout.groups) == [1, 3, 5]
    assert indices(rollout.sampled) == [0, 1, 2, 3, 4, 5]
    assert one.stream.counts[0] == 3
    values = rollout.metrics.values()
    assert (values["rollout/rounds"], values["rollout/groups_kept"]) == (2, 3)
    assert values["rollout/accuracy"] == pytest.approx(14 / 24)
    assert values["rollout/all_right_groups"] == pytest.approx(2 / 6)
    assert values["rollout/all_wrong_groups"] == pytest.approx(1 / 6)


@pytest.mark.parametrize("engines", [1, 2, 3])
@pytest.mark.parametrize("options", [{}, {"max_staleness": 1}, {"max_staleness": 2}], ids=["cancel", "next", "two"])
def test_the_batches_are_the_same_whatever_the_timing(engines: int, options: dict[str, Any]) -> None:
    def batches(timing: int) -> list[tuple[list[int], list[list[tuple[int, ...]]], float]]:
        one = rig(lambda n: n * 5 % 7 % 5, engines=engines, timing=timing, **options)
        found = [(indices(r.groups), tokens(r.groups), r.metrics.values()["rollout/length"]) for r in one.steps(5)]
        assert all(numbers == sorted(numbers) and len(numbers) == 3 for numbers, _, _ in found)
        return found

    first = batches(0)
    for timing in range(1, 9):
        assert batches(timing) == first


def test_batches_have_no_fewer_long_answers_than_were_sampled() -> None:
    """Taking what is finished first would: while batches are drawn ahead, short groups behind wait for long ones."""
    one = rig(lambda n: 2, engines=3, prompts_per_step=20, max_staleness=2, partial=True, max_response_tokens=900)
    groups = [group for rollout in one.steps(20) for group in rollout.groups]
    assert indices(groups) == list(range(400))
    lengths = [answer.length for group in groups for answer in group.responses]
    assert lengths == [LENGTH(response_seed(0, 0, n, sample), 900) for n in range(400) for sample in range(4)]


def versions(group: Group) -> set[int]:
    return {version for one in group.responses if one.response for version in one.response.weight_versions}


def test_kept_groups_beyond_the_batch_serve_the_next_step_with_their_versions() -> None:
    # Two thirds are kept, and more of them in the second step than its rounds could know.
    one = rig(lambda n: 2 if n % 3 or n > 5 else 0, max_staleness=1)
    first, second, third = one.steps(3)
    assert indices(first.groups + second.groups + third.groups) == [1, 2, 4, 5, *range(6, 11)]
    left = min(3, int(second.metrics.values()["rollout/groups_left_over"]))
    assert left > 0
    assert [versions(group) for group in third.groups] == [{2}] * left + [{3}] * (3 - left)
    assert third.metrics.values()["rollout/staleness"] == pytest.approx(left / 3)


def test_what_is_too_old_is_sampled_anew_and_counted() -> None:
    one = rig(lambda n: 2, max_staleness=1)
    one.steps(1)
    finished, unfinished = (Draw(stream=0, position=n, prompt=one.stream.draw(1)[0][1], step=1) for n in (3, 4))
    done = Completed(number=0, engine=1, answers=((2, "stop", 1.0),) * 4, kept=True)
    old = Response(ids=(7,), logprobs=(-1.0,), finish_reason="abort", weight_versions=(1,))
    one.collector.leftover = Leftover(
        draws=(Carried(draw=finished, engine=1, done=done), Carried(draw=unfinished, engine=0)),
        held={3: graded_group(3, [1.0] * 4, [2] * 4)},
        begun={4: [old, None, None, None]},
    )
    for engine in one.sampler.engines:
        engine.version = 3
    rollout = one.collector.collect(3)
    assert rollout is not None
    assert indices(rollout.groups) == [3, 4, 5]
    assert [versions(group) for group in rollout.groups] == [{3}] * 3
    values = rollout.metrics.values()
    assert (values["rollout/groups_begun_anew"], values["rollout/staleness"], values["work/continued"]) == (2, 0, 0)


@pytest.mark.parametrize("engines", [1, 2, 3])
def test_nothing_is_sampled_twice_when_it_pauses(engines: int) -> None:
    """Not what a grader has either, nor what was graded in the very moment in which the step was over."""
    for timing in range(9):
        one = rig(lambda n: 2, engines=engines, timing=timing, max_staleness=3, partial=True, max_response_tokens=600)
        totals = [rollout.metrics.values() for rollout in one.steps(6)]
        assert sum(each["rollout/groups_begun_anew"] for each in totals) == 0
        assert sum(each["work/samples"] for each in totals) <= 4 * one.stream.position


def test_what_paused_waits_through_a_step_that_has_its_batch_already() -> None:
    one = rig(lambda n: 2, max_staleness=2, partial=True)
    draws = [Draw(stream=0, position=n, prompt=prompt, step=1) for n, prompt in one.stream.draw(4)]
    done = Completed(number=0, engine=0, answers=((2, "stop", 1.0),) * 4, kept=True)
    begun = Response(ids=(7,), logprobs=(-1.0,), finish_reason="abort", weight_versions=(1,))
    one.collector.leftover = Leftover(
        draws=(*(Carried(draw=draw, engine=0, done=done) for draw in draws[:3]), Carried(draw=draws[3], engine=1)),
        held={n: graded_group(n, [1.0] * 4, [2] * 4) for n in range(3)},
        begun={3: [begun, None, None, None]},
    )
    for engine in one.sampler.engines:
        engine.version = 2
    second, third = one.collector.collect(2), one.collector.collect(3)
    assert second is not None
    assert third is not None
    assert indices(second.groups + third.groups) == [0, 1, 2, 3, 4, 5]
    assert versions(third.groups[0]) == {1, 2}
    assert third.metrics.values()["work/continued"] >= 1


def test_a_part_that_has_no_room_left_is_complete() -> None:
    """The run was resumed with a smaller `rollout.max_response_tokens`."""
    one = rig(lambda n: 2, max_staleness=2, partial=True)
    position, prompt = one.stream.draw(1)[0]
    parts = [
        Response(ids=(7,) * n, logprobs=(-1.0,) * n, finish_reason="abort", weight_versions=(1,) * n) for n in (90, 91)
    ]
    one.collector.leftover = Leftover(
        draws=(Carried(draw=Draw(stream=0, position=position, prompt=prompt, step=1), engine=0),),
        held={},
        begun={position: [*parts, None, None]},
    )
    rollout = one.collector.collect(2)
    assert rollout is not None
    found = [(answer.length, answer.finish_reason) for answer in rollout.groups[0].responses]
    assert found[:2] == [(90, "length"), (91, "length")]
    assert rollout.metrics.values()["work/continued"] == 0


def test_without_a_use_for_them_they_are_thrown_away_and_counted() -> None:
    # One of three is kept, so more are drawn; three of them, or more, are kept: too many.
    one = rig([0, 2, 4, 1, 2] + [3] * 99)
    first, second = one.steps(2)
    assert indices(first.groups) == [1, 3, 4]
    assert second.groups[0].prompt.index == sum(one.stream.counts[:2])
    assert first.metrics.values()["work/groups_discarded"] >= 0
    assert first.metrics.values()["work/tokens"] > first.metrics.values()["rollout/tokens"]


def test_what_is_unfinished_pauses_and_goes_on_first_in_the_next_step() -> None:
    options: dict[str, Any] = {"max_staleness": 1, "partial": True, "max_response_tokens": 600}
    one = rig(lambda n: 2, engines=2, **options)
    rollouts = one.steps(5)
    groups = [group for rollout in rollouts for group in rollout.groups]
    assert indices(groups) == list(range(15))
    for position, group in enumerate(tokens(groups)):
        seeds = [response_seed(0, TRAINING_STREAM, position, sample) for sample in range(4)]
        assert list(map(len, group)) == [LENGTH(seed, 600) for seed in seeds]
    assert one.stream.position <= 15 + 3  # one batch ahead
    spans = [one.response.weight_versions for group in groups for one in group.responses if one.response]
    assert all(list(span) == sorted(span) for span in spans)
    assert any(len(set(span)) == 2 for span in spans)
    continued = sum(r.metrics.values()["work/continued"] for r in rollouts)
    assert continued == sum(bool(request.begun) for engine in one.sampler.engines for request in engine.asked) > 0
    for rollout in rollouts:  # a response goes on where it stopped: its ids count up
        for ids in (ids for group in tokens(rollout.groups) for ids in group):
            assert list(ids) == list(range(ids[0], ids[0] + len(ids)))


def test_the_rounds_are_capped_and_the_part_that_was_found_is_trained_on() -> None:
    one = rig(lambda n: 2 if n == 4 else 0, max_rounds=3)
    (rollout,) = one.steps(1)
    assert indices(rollout.groups) == [4]
    assert one.stream.counts == [3, 12, 12]
    (warning,) = one.warnings
    assert "step 1: 1 of 3 groups" in warning
    assert "3 rounds" in warning


def test_a_batch_that_stays_short_can_end_the_run_or_be_waited_for() -> None:
    with pytest.raises(SamplingEndedError, match=r"^rollout.max_rounds: step 1: 0 of 3 groups kept in 2 rounds"):
        rig(lambda n: 0, max_rounds=2, when_short="raise").steps(1)
    one = rig(lambda n: 2 if n > 40 else 0, max_rounds=2, when_short="continue")
    (rollout,) = one.steps(1)
    assert indices(rollout.groups) == [41, 42, 43]
    assert one.warnings[0] == "step 1: the batch is not full after 2 rounds; another one is drawn"


def test_all_groups_alike_for_a_while_and_then_not() -> None:
    one = rig(lambda n: 2 if n > 60 else 4, max_rounds=2)
    rollouts = one.steps(14)
    assert [len(rollout.groups) for rollout in rollouts][:2] == [0, 0]
    assert [len(rollout.groups) for rollout in rollouts][-3:] == [3, 3, 3]
    assert max(one.stream.counts) == 12
    assert one.stream.counts[-1] < 12  # it learned that groups are kept again


def test_without_dynamic_sampling_all_groups_are_kept() -> None:
    one = rig([0, 2, 4, 1], dynamic=False)
    assert indices(one.steps(1)[0].groups) == [0, 1, 2]
    assert one.stream.counts == [3]


def thin_group(**rollout: Any) -> Rig:
    """Sampling that is not dynamic, and a group, that at position 1, with too few grades to be trained on."""
    lone = [NAN, 1.0, NAN, NAN]
    one = rig([], dynamic=False, score=lambda prompt, n: lone[n] if prompt.index == 1 else float(n < 2), **rollout)
    rewards = one.collector.config.rewards.model_copy(update={"max_ungraded": 0.5})
    one.collector.config = one.collector.config.model_copy(update={"rewards": rewards})
    return one


def test_what_comes_after_the_rounds_is_asked_of_dynamic_sampling_only() -> None:
    one = thin_group(when_short="raise")
    assert indices(one.steps(1)[0].groups) == [0, 2]
    assert len(one.warnings) == 1


def test_without_dynamic_sampling_a_thin_group_has_no_more_drawn_in_later_steps() -> None:
    one = thin_group()
    one.steps(3)
    assert one.stream.counts == [3, 3, 3]


def at_most_half(accuracies: Sequence[float]) -> bool:
    """A user's filter; with scores of a whole group of four."""
    assert len(accuracies) == 4
    return sum(accuracies) <= 2


@pytest.mark.parametrize(("dynamic", "expected"), [(True, [0, 1, 3]), (False, [0, 1, 2])])
def test_a_filter_of_ones_own_decides_where_sampling_is_dynamic(dynamic: bool, expected: list[int]) -> None:
    one = rig([0, 2, 4, 1] + [2] * 99, dynamic=dynamic, group_filter=f"{__name__}:at_most_half")
    assert indices(one.steps(1)[0].groups) == expected


def test_responses_are_seeded_by_their_place_in_the_stream_and_nothing_else() -> None:
    one = rig(lambda n: 1, temperature=0.7)
    one.steps(2)
    seeds = {request.seeds for engine in one.sampler.engines for request in engine.asked}
    places = [[response_seed(0, TRAINING_STREAM, position, sample) for sample in range(4)] for position in range(6)]
    assert seeds == {tuple(place) for place in places}


@pytest.mark.parametrize("engines", [2, 3])
def test_a_lost_engine_changes_nothing_in_the_batch(engines: int) -> None:
    one, calm = (rig(lambda n: n % 4, engines=engines, prompts_per_step=6) for _ in range(2))
    one.sampler.engines[1].dies_at = 0.7
    rollout, expected = one.steps(1)[0], calm.steps(1)[0]
    assert rollout.metrics.values()["work/engines_lost"] == 1
    assert tokens(rollout.groups) == tokens(expected.groups)
    assert not one.sampler.engines[1].usable
    again = one.collector.collect(2)  # it has no weights yet, and is left out
    assert again is None or again.groups


def test_nobody_waits_for_an_engine_that_dies_with_nothing_to_do() -> None:
    one = rig(lambda n: 2, prompts_per_step=1)
    one.sampler.engines[1].dies_at = 0.01  # the only group is sampled by the first
    (rollout,) = one.steps(1)
    assert rollout.metrics.values()["work/engines_lost"] == 0


def test_losses_that_no_sampling_met_are_counted_in_the_next_step() -> None:
    one = rig(lambda n: n % 4, engines=2)
    one.steps(1)
    one.sampler.engines[1].losses += 2  # asleep
    found = [one.collector.collect(step) for step in (2, 3)]
    assert [rollout and rollout.metrics.values()["work/engines_lost"] for rollout in found] == [2, 0]


def test_when_all_engines_are_lost_the_step_goes_on_after_they_got_weights() -> None:
    one, calm = (rig(lambda n: n % 4, engines=2, prompts_per_step=6) for _ in range(2))
    one.sampler.engines[0].dies_at, one.sampler.engines[1].dies_at = 0.5, 0.7
    assert one.collector.collect(1) is None
    rollout = one.collector.collect(1)
    assert rollout is not None
    assert rollout.metrics.values()["work/engines_lost"] == 2
    assert tokens(rollout.groups) == tokens(calm.steps(1)[0].groups)


def test_a_group_with_one_grade_teaches_nothing() -> None:
    lone = [NAN, 1.0, NAN, NAN]
    one = rig([], score=lambda prompt, sample: lone[sample] if prompt.index == 1 else float(sample < 2))
    one.collector.config = run_config(
        algorithm={"dynamic_sampling": True},
        rollout={"prompts_per_step": 3, "responses_per_prompt": 4},
        rewards={"max_ungraded": 0.5},
    )
    (rollout,) = one.steps(1)
    assert indices(rollout.groups) == [0, 2, 3]
    assert rollout.metrics.values()["rollout/ungraded"] == pytest.approx(3 / 16)


def test_too_many_answers_without_a_grade_end_the_run() -> None:
    one = rig([], dynamic=False, score=lambda prompt, sample: NAN if sample == 3 else 1.0)
    with pytest.raises(SamplingEndedError, match=r"^rewards\.max_ungraded: step 1: 3 of 12 answers could not be"):
        one.steps(1)


@pytest.mark.parametrize("when_short", ["train_partial", "continue", "raise"])
def test_a_grader_that_fails_on_everything_ends_the_run_after_one_round(when_short: str) -> None:
    one = rig([], when_short=when_short, score=lambda prompt, sample: NAN)
    one.stream.longest = 1000  # or it would go on for ever
    with pytest.raises(SamplingEndedError, match=r"^rewards\.max_ungraded: step 1: 12 of 12 answers could not be"):
        one.steps(1)
    assert one.stream.counts == [3]


def test_figures_of_sampled_groups() -> None:
    groups = [
        graded_group(0, [1, 0, NAN], [2, 5, 9], truncated=(1, 2)),
        graded_group(1, [1, 1], [4, 8]),
        graded_group(2, [0, 0], [1, 3]),
    ]
    values = sampling_metrics(groups, "eval").values()
    assert values["eval/accuracy"] == 3 / 6
    assert values["eval/length"] == pytest.approx(32 / 7)
    assert values["eval/length_right"] == pytest.approx(14 / 3)
    assert values["eval/length_wrong"] == pytest.approx(9 / 3)
    assert (values["eval/truncated"], values["eval/ungraded"]) == (2 / 7, 1 / 7)
    assert (values["eval/mixed_groups"], values["eval/all_right_groups"]) == (1 / 3, 1 / 3)
    assert values["eval/all_wrong_groups"] == 1 / 3
    assert (values["eval/samples"], values["eval/tokens"]) == (7, 32)
    assert math.isclose(values["eval/aborted"], 0)
