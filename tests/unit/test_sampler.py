"""Prompts divided over the ranks' engines, answers graded, and every group back in its place on every rank."""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence

import pytest

from megatron_rl.demo.task import EOS_ID, VOCABULARY, build_tokenizer
from megatron_rl.evaluation.heldout import evaluate
from megatron_rl.rollout import sampler as module
from megatron_rl.rollout.engine import Request, Sampling, response_seed
from megatron_rl.rollout.sampler import EVALUATION_STREAM, TRAINING_STREAM, Draw, GroupSampler
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


class Waiting(Exception):
    """The other ranks' shares are not there yet."""


class Ranks:
    """Stands for torch.distributed: ranks run one after another, and the last one gathers from all of them."""

    def __init__(self, ranks: int) -> None:
        self.rank, self.ranks, self.gathered = 0, ranks, dict[int, list[Group]]()

    def get_rank(self) -> int:
        return self.rank

    def get_world_size(self) -> int:
        return self.ranks

    def all_gather_object(self, shares: list[list[Group]], mine: list[Group]) -> None:
        self.gathered[self.rank] = mine
        if len(self.gathered) < self.ranks:
            raise Waiting
        for rank, share in self.gathered.items():
            shares[rank] = share


def last_line(prompt: Prompt, text: str, finished: bool) -> float:
    return float(finished and text == f"#{prompt.answer}")


def sampled(
    monkeypatch: pytest.MonkeyPatch, ranks: int, grader: Callable[..., float] = last_line, seed: int = 3
) -> tuple[list[Group], list[list[Request]]]:
    """What the last rank returns, and what each rank's engine was asked."""
    world = Ranks(ranks)
    monkeypatch.setattr(module, "dist", world)
    draws = [Draw(place=(TRAINING_STREAM, 2, 40 + n), prompt=prompt) for n, prompt in enumerate(PROMPTS)]
    asked, groups = [], list[Group]()
    for world.rank in [*range(1, ranks), 0]:
        engine = Echo()
        sampler = GroupSampler(engine, grader, build_tokenizer(), seed)
        with contextlib.suppress(Waiting):
            groups = sampler.sample(draws, responses=3, max_tokens=9, sampling=SAMPLING)
        assert engine.sampling == SAMPLING
        asked.append(engine.asked)
    return groups, asked


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_groups_come_back_in_the_order_of_the_draws(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    groups, asked = sampled(monkeypatch, ranks)
    assert [group.prompt for group in groups] == PROMPTS
    for n, group in enumerate(groups):
        assert [graded.text for graded in group.responses] == [f"#{n}"] * 3
        assert [graded.score for graded in group.responses] == [1.0, 0.0, 1.0]  # sample 1 was cut off
    assert sorted(request.prompt_ids for requests in asked for request in requests) == [p.ids for p in PROMPTS]
    assert max(map(len, asked)) - min(map(len, asked)) <= 1
    assert {request.max_tokens for requests in asked for request in requests} == {9}


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_seeds_come_from_the_place_in_the_run_whichever_rank_samples(
    ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, asked = sampled(monkeypatch, ranks)
    seeds = {request.prompt_ids: request.seeds for requests in asked for request in requests}
    for n, prompt in enumerate(PROMPTS):
        expected = [response_seed(3, TRAINING_STREAM, 2, 40 + n, sample) for sample in range(3)]
        assert list(seeds[prompt.ids]) == expected


def test_an_answer_whose_grading_fails_is_ungraded_and_the_run_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def brittle(prompt: Prompt, text: str, finished: bool) -> float:
        if not finished:
            raise ZeroDivisionError("a user's mistake")
        return 0.5

    groups, _ = sampled(monkeypatch, 1, brittle)
    for group in groups:
        assert [graded.score for graded in group.responses] == [0.5, pytest.approx(math.nan, nan_ok=True), 0.5]
        assert group.graded_scores == [0.5, 0.5]
        assert group.accuracy == 0.5


@pytest.mark.parametrize("score", [-0.01, 1.01, -1, 2, math.inf, -math.inf])
def test_a_score_that_is_no_share_of_right_is_ungraded(
    score: float, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    groups, _ = sampled(monkeypatch, 1, lambda prompt, text, finished: score if finished else 1)
    assert [group.graded_scores for group in groups] == [[1.0]] * 5
    (said,) = caplog.messages
    assert f"it returned {float(score)}; a score is from 0 (wrong) to 1 (right)" in said


def test_a_grader_that_says_ungraded_did_not_fail(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    groups, _ = sampled(monkeypatch, 1, lambda prompt, text, finished: math.nan)
    assert [group.graded_scores for group in groups] == [[]] * 5
    assert caplog.messages == []


def test_each_kind_of_failure_of_a_grader_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def brittle(prompt: Prompt, text: str, finished: bool) -> float:
        if finished:
            raise KeyError(prompt.answer)
        raise ZeroDivisionError(prompt.answer)

    sampled(monkeypatch, 1, brittle)
    kinds = [next(kind for kind in ("KeyError", "ZeroDivisionError") if kind in said) for said in caplog.messages]
    assert sorted(kinds) == ["KeyError", "ZeroDivisionError"]
    assert all("the grader failed on the prompt of row 14" in said for said in caplog.messages)  # the first that came


def test_a_response_that_the_engine_loses_is_an_error_that_names_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "dist", Ranks(1))
    engine = Echo(lost=(PROMPTS[3].ids[-1], 2))
    sampler = GroupSampler(engine, last_line, build_tokenizer(), seed=3)
    draws = [Draw(place=(TRAINING_STREAM, 2, n), prompt=prompt) for n, prompt in enumerate(PROMPTS)]
    with pytest.raises(RuntimeError, match="2 of 3 responses to prompt 13"):
        sampler.sample(draws, responses=3, max_tokens=9, sampling=SAMPLING)


def test_graders_get_text_without_special_tokens_and_whether_it_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, str, bool]] = []

    def note(prompt: Prompt, text: str, finished: bool) -> float:
        seen.append((prompt.index, text, finished))
        return 1.0

    sampled(monkeypatch, 1, note)
    assert sorted(seen)[:3] == [(10, "#0", False), (10, "#0", True), (10, "#0", True)]


def test_evaluation_has_seeds_of_its_own_that_do_not_depend_on_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "dist", Ranks(1))
    engine = Echo()
    sampler = GroupSampler(engine, last_line, build_tokenizer(), seed=3)
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
    monkeypatch.setattr(module, "dist", Ranks(1))
    engine = Echo()
    sampler = GroupSampler(engine, last_line, build_tokenizer(), seed=3)
    evaluate(sampler, PROMPTS, run_config(evaluation=options))
    assert engine.sampling == expected
