"""Prompts divided over the ranks' engines, answers graded, and every group back in its place on every rank."""

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from megatron_rl.demo.task import EOS_ID, VOCABULARY, build_tokenizer
from megatron_rl.evaluation.heldout import evaluate
from megatron_rl.rollout import sampler as module
from megatron_rl.rollout.engine import Request, Sampling, response_seed
from megatron_rl.rollout.groups import EngineGroup
from megatron_rl.rollout.sampler import EVALUATION_STREAM, TRAINING_STREAM, Draw, GroupSampler
from megatron_rl.rollout.waiting import EngineWait
from megatron_rl.types import Group, Prompt, Response
from tests.tiny import run_config

SAMPLING = Sampling(temperature=0.75)
PROMPTS = [Prompt(index=10 + n, text=f"{n}=", ids=(1, VOCABULARY.index(str(n))), answer=str(n)) for n in range(5)]


class Echo:
    """An engine that answers `#` and the prompt's digit, last sample first; sample 1 is cut off before it ends."""

    def __init__(self, lost: tuple[int, int] | None = None) -> None:
        self.asked: list[Request] = []
        self.lost = lost
        self.sampling: Sampling | None = None

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[tuple[int, int, Response]]:
        self.asked += requests
        self.sampling = sampling
        for number in reversed(range(len(requests))):
            for sample in reversed(range(len(requests[number].seeds))):
                end = () if sample == 1 else (EOS_ID,)
                ids = (VOCABULARY.index("#"), requests[number].prompt_ids[-1], *end)
                logprobs = (-1.0, -2.0, -3.0)[: len(ids)]
                if (requests[number].prompt_ids[-1], sample) == self.lost:
                    continue
                yield (
                    number,
                    sample,
                    Response(
                        ids=ids,
                        logprobs=logprobs,
                        finish_reason="length" if sample == 1 else "stop",
                        weight_versions=(0,) * len(ids),
                    ),
                )


class Ranks:
    """Stands for torch.distributed in threads, one for each rank, which meet in the gather."""

    def __init__(self, ranks: int) -> None:
        self.here = threading.local()
        self.gathered: list[Any] = [None] * ranks
        self.meeting = threading.Barrier(ranks, timeout=20)

    def all_gather_object(self, told: list[Any], mine: Any) -> None:
        self.gathered[self.here.rank] = mine
        self.meeting.wait()
        told[:] = self.gathered


def last_line(prompt: Prompt, text: str, finished: bool) -> float:
    return float(finished and text == f"#{prompt.answer}")


LAYOUTS = [(1, 1), (2, 1), (3, 1), (2, 2), (6, 2)]
"""Ranks, and ranks of an engine."""


def alone(engine: Echo, grader: Callable[..., float] = last_line) -> GroupSampler:
    """The sampler of a world of one."""
    wait = EngineWait(dist.HashStore(), EngineGroup(rank=0, size=1, world=1), timeout_s=9)
    return GroupSampler(engine, wait, grader, build_tokenizer(), seed=3)


def sampled_by_ranks(
    monkeypatch: pytest.MonkeyPatch, ranks: int, size: int, grader: Callable[..., float] = last_line
) -> tuple[list[list[Group]], list[Echo]]:
    """What each rank returns, and its engine."""
    world, store = Ranks(ranks), dist.HashStore()
    monkeypatch.setattr(module, "dist", world)
    draws = [Draw(place=(TRAINING_STREAM, 2, 40 + n), prompt=prompt) for n, prompt in enumerate(PROMPTS)]
    engines = [Echo() for _ in range(ranks)]

    def sample(rank: int) -> list[Group]:
        world.here.rank = rank
        wait = EngineWait(store, EngineGroup(rank=rank, size=size, world=ranks), timeout_s=9)
        sampler = GroupSampler(engines[rank], wait, grader, build_tokenizer(), 3)
        return sampler.sample(draws, responses=3, max_tokens=9, sampling=SAMPLING)

    with ThreadPoolExecutor(ranks) as threads:
        return list(threads.map(sample, range(ranks))), engines


def sampled(
    monkeypatch: pytest.MonkeyPatch, grader: Callable[..., float] = last_line
) -> tuple[list[Group], list[Request]]:
    """What one rank returns, and what its engine was asked."""
    (groups,), (engine,) = sampled_by_ranks(monkeypatch, 1, 1, grader)
    return groups, engine.asked


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
        expected = [response_seed(3, TRAINING_STREAM, 2, 40 + n, sample) for sample in range(3)]
        assert list(seeds[prompt.ids]) == expected


def test_an_answer_whose_grading_fails_is_ungraded_and_the_run_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def brittle(prompt: Prompt, text: str, finished: bool) -> float:
        if not finished:
            raise ZeroDivisionError("a user's mistake")
        return 0.5

    groups, _ = sampled(monkeypatch, brittle)
    for group in groups:
        assert [graded.score for graded in group.responses] == [0.5, pytest.approx(math.nan, nan_ok=True), 0.5]
        assert group.graded_scores == [0.5, 0.5]
        assert group.accuracy == 0.5


@pytest.mark.parametrize("score", [-0.01, 1.01, -1, 2, math.inf, -math.inf])
def test_a_score_that_is_no_share_of_right_is_ungraded(
    score: float, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    groups, _ = sampled(monkeypatch, lambda prompt, text, finished: score if finished else 1)
    assert [group.graded_scores for group in groups] == [[1.0]] * 5
    (said,) = caplog.messages
    assert f"it returned {float(score)}; a score is from 0 (wrong) to 1 (right)" in said


def test_a_grader_that_says_ungraded_did_not_fail(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    groups, _ = sampled(monkeypatch, lambda prompt, text, finished: math.nan)
    assert [group.graded_scores for group in groups] == [[]] * 5
    assert caplog.messages == []


def test_each_kind_of_failure_of_a_grader_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def brittle(prompt: Prompt, text: str, finished: bool) -> float:
        if finished:
            raise KeyError(prompt.answer)
        raise ZeroDivisionError(prompt.answer)

    sampled(monkeypatch, brittle)
    kinds = [next(kind for kind in ("KeyError", "ZeroDivisionError") if kind in said) for said in caplog.messages]
    assert sorted(kinds) == ["KeyError", "ZeroDivisionError"]
    assert all("the grader failed on the prompt of row 14" in said for said in caplog.messages)  # the first that came


def test_a_response_that_the_engine_loses_is_an_error_that_names_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    world = Ranks(1)
    world.here.rank = 0
    monkeypatch.setattr(module, "dist", world)
    engine = Echo(lost=(PROMPTS[3].ids[-1], 2))
    sampler = alone(engine)
    draws = [Draw(place=(TRAINING_STREAM, 2, n), prompt=prompt) for n, prompt in enumerate(PROMPTS)]
    with pytest.raises(RuntimeError, match="2 of 3 responses to prompt 13"):
        sampler.sample(draws, responses=3, max_tokens=9, sampling=SAMPLING)


def test_graders_get_text_without_special_tokens_and_whether_it_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, str, bool]] = []

    def note(prompt: Prompt, text: str, finished: bool) -> float:
        seen.append((prompt.index, text, finished))
        return 1.0

    sampled(monkeypatch, note)
    assert sorted(seen)[:3] == [(10, "#0", False), (10, "#0", True), (10, "#0", True)]


def test_evaluation_has_seeds_of_its_own_that_do_not_depend_on_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    world = Ranks(1)
    world.here.rank = 0
    monkeypatch.setattr(module, "dist", world)
    engine = Echo()
    sampler = alone(engine)
    config = run_config(evaluation={"samples_per_prompt": 2, "temperature": 0.5}, rollout={"max_response_tokens": 7})
    metrics = evaluate(sampler, PROMPTS, config)
    assert metrics.pairs["eval/accuracy"] == (5.0, 10.0)
    assert metrics.pairs["eval/length_right"] == (15.0, 5.0)
    assert metrics.pairs["eval/length_wrong"] == (10.0, 5.0)
    assert engine.sampling == Sampling(temperature=0.5)
    for row, request in enumerate(engine.asked):
        assert request.max_tokens == 7
        assert list(request.seeds) == [response_seed(3, EVALUATION_STREAM, 0, row, sample) for sample in range(2)]


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
    world = Ranks(1)
    world.here.rank = 0
    monkeypatch.setattr(module, "dist", world)
    engine = Echo()
    sampler = alone(engine)
    evaluate(sampler, PROMPTS, run_config(evaluation=options))
    assert engine.sampling == expected
