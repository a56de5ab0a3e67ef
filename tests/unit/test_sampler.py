"""Prompts divided over the ranks' engines, answers graded, and every group back in its place on every rank."""

import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest
import torch.distributed as dist

from megatron_rl.demo.task import EOS_ID, VOCABULARY, build_tokenizer
from megatron_rl.errors import UserError
from megatron_rl.evaluation.heldout import evaluate
from megatron_rl.rewards.grade import Grade
from megatron_rl.rollout import sampler as module
from megatron_rl.rollout.engine import Engine, EngineLost, Request, Sampling, response_seed
from megatron_rl.rollout.groups import EngineGroup
from megatron_rl.rollout.leader import Task
from megatron_rl.rollout.ledger import EVALUATION_STREAM, TRAINING_STREAM, Draw, Ledger, Plan, Rates
from megatron_rl.rollout.sampler import GroupSampler, Sampled, SamplingEndedError
from megatron_rl.rollout.waiting import EngineWait
from megatron_rl.types import FinishReason, Group, Prompt, Response
from tests.tiny import run_config

SAMPLING = Sampling(temperature=0.75)
PROMPTS = [Prompt(index=10 + n, text=f"{n}=", ids=(1, VOCABULARY.index(str(n))), answer=str(n)) for n in range(5)]


class Echo:
    """An engine that answers `#` and the prompt's digit, last sample first; sample 1 is cut off before it ends."""

    def __init__(self, version: int = 0) -> None:
        self.asked: list[Request] = []
        self.version = version
        self.sampling: Sampling | None = None
        self.reason: FinishReason = "stop"
        self._found: list[tuple[int, int, Response]] = []

    losses = 0

    def health(self) -> bool:
        return True

    def submit(self, key: int, request: Request, sampling: Sampling) -> None:
        self.asked.append(request)
        self.sampling = sampling
        for sample in range(len(request.seeds)):
            end = () if sample == 1 else (EOS_ID,)
            ids = (VOCABULARY.index("#"), request.prompt_ids[-1], *end)
            response = Response(
                ids=ids,
                logprobs=(-1.0, -2.0, -3.0)[: len(ids)],
                finish_reason="length" if sample == 1 else self.reason,
                weight_versions=(self.version,) * len(ids),
            )
            self._found.insert(0, (key, sample, response))

    def poll(self, wait_s: float) -> list[tuple[int, int, Response]]:
        found, self._found = self._found[:2], self._found[2:]
        return found

    def abort(self) -> list[tuple[int, int, Response]]:
        return []


class AtOnce:
    """Grades where it is asked, with a function in this process."""

    def __init__(self, grader: Callable[..., float]) -> None:
        self.grader = grader
        self._found: list[tuple[int, list[Grade]]] = []

    def submit(self, key: int, prompt: Prompt, answers: Sequence[tuple[str, bool]]) -> None:
        scores = [self.grader(prompt, *answer) for answer in answers]
        grades = [Grade(score=score, error="" if score == score else "it gave up") for score in scores]
        self._found.append((key, grades))

    def poll(self) -> list[tuple[int, list[Grade]]]:
        found, self._found = self._found, []
        return found

    def forget(self) -> None:
        self._found.clear()


def check(response: Response, aborted_ok: bool) -> None:
    """Refuses what a parity check would."""
    assert set(response.weight_versions) == {0}, "of other weights"
    assert aborted_ok or response.finish_reason != "abort", "a part"


class Ranks:
    """Stands for torch.distributed in threads, one for each rank, which meet in the gather."""

    def __init__(self, ranks: int) -> None:
        self.here = threading.local()
        self.gathered: list[Any] = [None] * ranks
        self.meeting = threading.Barrier(ranks, timeout=20)

    def all_gather_object(self, told: list[Any], mine: Any, group: None) -> None:
        told[:] = self._all(mine)

    def broadcast_object_list(self, message: list[Any], src: int, group: None) -> None:
        message[:] = self._all(list(message))[src]

    def _all(self, mine: Any) -> list[Any]:
        self.gathered[self.here.rank] = mine
        self.meeting.wait()
        all_of_them = list(self.gathered)
        self.meeting.wait()
        return all_of_them


def last_line(prompt: Prompt, text: str, finished: bool) -> float:
    return float(finished and text == f"#{prompt.answer}")


LAYOUTS = [(1, 1), (2, 1), (3, 1), (2, 2), (6, 2)]
"""Ranks, and ranks of an engine."""


def sampler_of(engine: Echo, store: dist.Store, group: EngineGroup, grader: Callable[..., float]) -> GroupSampler:
    wait = EngineWait(store, group, timeout_s=9)
    return GroupSampler(cast(Engine, engine), wait, AtOnce(grader), build_tokenizer(), check)


def alone(engine: Echo, monkeypatch: pytest.MonkeyPatch, grader: Callable[..., float] = last_line) -> GroupSampler:
    """The sampler of a world of one."""
    world = Ranks(1)
    world.here.rank = 0
    monkeypatch.setattr(module, "dist", world)
    return sampler_of(engine, dist.HashStore(), EngineGroup(rank=0, size=1, world=1), grader)


def sample(sampler: GroupSampler, keeps: Callable[[Group], bool] = lambda group: True) -> Sampled:
    """All prompts, as a training step draws them."""
    draws = [Draw(stream=TRAINING_STREAM, position=40 + n, prompt=prompt) for n, prompt in enumerate(PROMPTS)]
    plan = Plan(wanted=None, engines=sampler.wait.group.engines, responses=3)
    ledger = Ledger(plan=plan, rates=Rates(), draw=lambda count: ())
    ledger.begin(draws=draws)
    sampler.begin(ledger, Task(responses=3, max_tokens=9, sampling=SAMPLING, seed=3), keeps=keeps)
    assert sampler.go_on()
    return sampler.end()


def sampled_by_ranks(
    monkeypatch: pytest.MonkeyPatch, ranks: int, size: int, grader: Callable[..., float] = last_line
) -> tuple[list[list[Group]], list[Echo]]:
    """What each rank returns, and its engine."""
    world, store = Ranks(ranks), dist.HashStore()
    monkeypatch.setattr(module, "dist", world)
    engines = [Echo() for _ in range(ranks)]

    def of_rank(rank: int) -> list[Group]:
        world.here.rank = rank
        found = sample(sampler_of(engines[rank], store, EngineGroup(rank=rank, size=size, world=ranks), grader))
        return [found.groups[number] for number in range(len(PROMPTS))]

    with ThreadPoolExecutor(ranks) as threads:
        return list(threads.map(of_rank, range(ranks))), engines


@pytest.mark.parametrize(("ranks", "size"), LAYOUTS)
def test_groups_come_back_in_the_order_of_the_draws(ranks: int, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found, engines = sampled_by_ranks(monkeypatch, ranks, size)
    for groups in found:
        assert [group.prompt for group in groups] == PROMPTS
        for group in groups:
            assert [graded.score for graded in group.responses] == [1.0, 0.0, 1.0]  # sample 1 was cut off
            assert [graded.finish_reason for graded in group.responses] == ["stop", "length", "stop"]
            assert [graded.length for graded in group.responses] == [3, 2, 3]
    asked = [engine.asked for engine in engines[::size]]
    assert sorted(request.prompt_ids for requests in asked for request in requests) == [p.ids for p in PROMPTS]
    assert max(map(len, asked)) - min(map(len, asked)) <= 1
    assert {request.max_tokens for requests in asked for request in requests} == {9}


@pytest.mark.parametrize(("ranks", "size"), LAYOUTS)
def test_only_leaders_sample_and_tokens_stay_with_them(ranks: int, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found, engines = sampled_by_ranks(monkeypatch, ranks, size)
    for rank, engine in enumerate(engines):
        assert engine.sampling == (SAMPLING if rank % size == 0 else None)
    for rank, groups in enumerate(found):
        for n, group in enumerate(groups):
            home = n % (ranks // size) * size
            for graded in group.responses:
                assert graded.home == home
                assert graded.text == (f"#{n}" if rank == home else "")
                assert (graded.response is not None) == (rank == home)
                assert graded.response is None or len(graded.response.ids) == graded.length


@pytest.mark.parametrize(("ranks", "size"), LAYOUTS)
def test_seeds_come_from_the_place_in_the_run_whichever_rank_samples(
    ranks: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, engines = sampled_by_ranks(monkeypatch, ranks, size)
    seeds = {request.prompt_ids: request.seeds for engine in engines for request in engine.asked}
    for n, prompt in enumerate(PROMPTS):
        expected = [response_seed(3, TRAINING_STREAM, 40 + n, sample) for sample in range(3)]
        assert list(seeds[prompt.ids]) == expected


def test_an_answer_without_a_grade_is_counted_by_its_reason_and_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sampler = alone(Echo(), monkeypatch, lambda prompt, text, finished: 0.5 if finished else math.nan)
    found = sample(sampler)
    for group in found.groups.values():
        assert [graded.score for graded in group.responses] == [0.5, pytest.approx(math.nan, nan_ok=True), 0.5]
        assert group.graded_scores == [0.5, 0.5]
        assert group.accuracy == 0.5
    assert found.work.ungraded == {"it gave up": 5}
    (said,) = caplog.messages
    assert said == "the prompt of row 14: an answer is ungraded: it gave up"  # the first that came
    assert (found.work.samples, found.work.tokens) == (15, 40)


def test_every_response_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AssertionError, match="of other weights"):
        sample(alone(Echo(version=4), monkeypatch))
    engine = Echo()
    engine.reason = "abort"
    with pytest.raises(AssertionError, match="a part"):
        sample(alone(engine, monkeypatch))


def test_a_filter_that_fails_on_one_rank_ends_the_run_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    world, store = Ranks(2), dist.HashStore()
    monkeypatch.setattr(module, "dist", world)

    def keeps(group: Group) -> bool:
        if group.prompt.index == 13:
            raise UserError("algorithm.group_filter: it divides by zero")
        return True

    def of_rank(rank: int) -> None:
        world.here.rank = rank
        with pytest.raises(SamplingEndedError, match=r"^algorithm\.group_filter: it divides by zero$"):
            sample(sampler_of(Echo(), store, EngineGroup(rank=rank, size=1, world=2), last_line), keeps)

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(of_rank, range(2)))


class Dying(Echo):
    """It dies when it has completed a group, for the last time."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.alive = 3, True

    def health(self) -> bool:
        return self.alive

    def poll(self, wait_s: float) -> list[tuple[int, int, Response]]:
        if not self.left:
            self.losses += 1
            raise EngineLost("it was killed")
        self.left -= 1
        return [self._found.pop()]

    def restart(self) -> None:
        self.alive = False
        raise UserError("it may not be started again")

    def stop(self) -> None:
        pass


def test_an_engine_that_is_lost_for_good_as_a_step_ends_ends_the_run_in_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sampler = alone(Dying(), monkeypatch)
    draws = [Draw(stream=TRAINING_STREAM, position=n, prompt=prompt) for n, prompt in enumerate(PROMPTS)]

    def begin() -> None:
        ledger = Ledger(plan=Plan(wanted=1, responses=3), rates=Rates(), draw=lambda count: draws[:2])
        ledger.begin()
        sampler.begin(ledger, Task(responses=3, max_tokens=9, sampling=SAMPLING, seed=3), keeps=lambda group: True)

    begin()
    assert sampler.go_on()  # its only group, of two that were drawn, was completed
    found = sampler.end()
    assert list(found.groups) == [0]
    assert found.work.engines_lost == 1
    begin()
    with pytest.raises(SamplingEndedError, match="it may not be started again"):
        sampler.go_on()


def test_graders_get_text_without_special_tokens_and_whether_it_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, str, bool]] = []

    def note(prompt: Prompt, text: str, finished: bool) -> float:
        seen.append((prompt.index, text, finished))
        return 1.0

    sample(alone(Echo(), monkeypatch, note))
    assert sorted(seen)[:3] == [(10, "#0", False), (10, "#0", True), (10, "#0", True)]


def test_evaluation_has_seeds_of_its_own_that_do_not_depend_on_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Echo()
    sampler = alone(engine, monkeypatch)
    config = run_config(
        seed=5, evaluation={"samples_per_prompt": 2, "temperature": 0.5}, rollout={"max_response_tokens": 7}
    )
    metrics = evaluate(sampler, PROMPTS, config)
    assert metrics is not None
    assert metrics.pairs["eval/accuracy"] == (5.0, 10.0)
    assert metrics.pairs["eval/length_right"] == (15.0, 5.0)
    assert metrics.pairs["eval/length_wrong"] == (10.0, 5.0)
    assert engine.sampling == Sampling(temperature=0.5)
    for row, request in enumerate(engine.asked):
        assert request.max_tokens == 7
        assert list(request.seeds) == [response_seed(5, EVALUATION_STREAM, row, sample) for sample in range(2)]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"greedy": True, "samples_per_prompt": 1}, Sampling(greedy=True)),
        ({"top_p": 0.8, "temperature": 0.5}, Sampling(temperature=0.5, top_p=0.8)),
    ],
)
def test_evaluation_samples_as_its_options_say(
    options: dict[str, object], expected: Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Echo()
    sampler = alone(engine, monkeypatch)
    evaluate(sampler, PROMPTS, run_config(evaluation=options))
    assert engine.sampling == expected
