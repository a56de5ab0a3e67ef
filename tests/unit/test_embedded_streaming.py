"""The embedded engine's requests: taken as they come, answered as they complete, aborted, and gone on with."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import Qwen2ForCausalLM

from megatron_rl.rollout.embedded import EmbeddedEngine
from megatron_rl.rollout.engine import Request, Sampling
from megatron_rl.types import Response
from tests.tiny import random_model
from tests.unit.test_engine import SHAPE, engine_of, requests_of, responses, weights_of

Place = tuple[int, int]


@pytest.fixture
def engine(untied_model: tuple[Path, Qwen2ForCausalLM]) -> EmbeddedEngine:
    """Samples four at once, with weights of version 4."""
    made = engine_of(untied_model[0], max_concurrent=4)
    made.update_weights(weights_of(untied_model[1]), version=4)
    return made


def submit(engine: EmbeddedEngine, requests: list[Request], sampling: Sampling, first: int = 0) -> None:
    for number, request in enumerate(requests, first):
        engine.submit(number, request, sampling)


def polled(engine: EmbeddedEngine, polls: int, wait_s: float = 0.0) -> dict[Place, Response]:
    """With no time to wait, a poll samples one token of each response."""
    return {(key, sample): response for _ in range(polls) for key, sample, response in engine.poll(wait_s)}


def joined(begun: Response, rest: Response) -> Response:
    return Response(
        ids=begun.ids + rest.ids,
        logprobs=begun.logprobs + rest.logprobs,
        finish_reason=rest.finish_reason,
        weight_versions=begun.weight_versions + rest.weight_versions,
    )


@pytest.mark.parametrize("sampling", [Sampling(greedy=True), Sampling(temperature=1.2), Sampling(top_p=0.8)])
@pytest.mark.parametrize("aborts", [1, 3])
def test_aborted_and_gone_on_with_it_is_the_answer_that_was_not_aborted(
    engine: EmbeddedEngine, sampling: Sampling, aborts: int
) -> None:
    """Aborted after a token, then after two more, ...; what was still queued has no tokens by then."""
    requests = [replace(request, seeds=(seed,)) for request in requests_of(3, 10) for seed in request.seeds]
    whole = responses(engine, requests, sampling)
    nothing = Response(ids=(), logprobs=(), finish_reason="abort", weight_versions=())
    found: dict[Place, Response] = {}
    begun = dict.fromkeys(whole, nothing)
    submit(engine, requests, sampling)
    for time in range(aborts):
        found |= {place: joined(begun[place], rest) for place, rest in polled(engine, 1 + time).items()}
        ended = {(key, sample): response for key, sample, response in engine.abort()}
        assert found.keys() | ended.keys() == whole.keys()
        begun = {place: joined(begun[place], rest) for place, rest in ended.items()}
        for (key, _), part in begun.items():
            engine.submit(key, replace(requests[key], begun=part.ids), sampling)
    assert any(part.ids for part in begun.values())
    found |= {place: joined(begun[place], rest) for place, rest in polled(engine, 200).items()}
    assert found.keys() == whole.keys()
    for place, response in found.items():
        assert response.ids == whole[place].ids
        assert response.finish_reason == whole[place].finish_reason
        # The keys and values of all tokens at once, and of one after another, are rounded differently.
        assert response.logprobs == pytest.approx(whole[place].logprobs, abs=5e-6)


def test_what_goes_on_has_only_its_new_tokens_in_the_new_version(
    engine: EmbeddedEngine, untied_model: tuple[Path, Qwen2ForCausalLM]
) -> None:
    request = replace(requests_of(1, 9)[0], seeds=(11,))
    engine.submit(7, request, Sampling())
    assert engine.poll(0.0) == []
    assert engine.poll(0.0) == []
    ((key, sample, part),) = engine.abort()
    assert (key, sample, part.finish_reason, len(part.ids), part.weight_versions) == (7, 0, "abort", 2, (4, 4))
    engine.update_weights(weights_of(random_model(SHAPE, seed=9)), version=5)
    engine.submit(7, replace(request, begun=part.ids), Sampling())
    ((key, sample, rest),) = engine.poll(9.0)
    assert (key, sample) == (7, 0)
    assert 0 < len(rest.ids) <= 7
    assert rest.weight_versions == (5,) * len(rest.ids)
    assert rest.finish_reason == ("length" if len(rest.ids) == 7 else "stop")


def test_an_abort_ends_all_and_gives_back_what_was_not_begun(engine: EmbeddedEngine) -> None:
    submit(engine, requests_of(2, 9), Sampling(greedy=True))
    found = polled(engine, 2)
    ended = {(key, sample): response for key, sample, response in engine.abort()}
    assert found.keys().isdisjoint(ended)
    assert found.keys() | ended.keys() == {(number, sample) for number in range(5) for sample in range(2)}
    lengths = [len(response.ids) for response in ended.values()]
    assert lengths == [2] * (4 - len(found)) + [0] * 6
    assert engine.abort() == []
    assert engine.poll(5.0) == []  # at once


def test_a_poll_ends_with_the_first_that_completes(engine: EmbeddedEngine) -> None:
    budgets = (5, 2, 9, 1, 3)
    requests = [replace(one, max_tokens=n) for one, n in zip(requests_of(1, 9), budgets, strict=True)]
    submit(engine, requests, Sampling(greedy=True))
    first = engine.poll(99.0)
    assert [key for key, _, _ in first] == [3]


@pytest.mark.parametrize("sampling", [Sampling(greedy=True), Sampling()])
def test_chunks_depend_on_the_order_of_submissions_only(
    engine: EmbeddedEngine, sampling: Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Polled a token at a time or at length, with a request for each response that completes: the same chunks."""
    requests = requests_of(2, 7)

    def run(wait_s: Callable[[int], float]) -> tuple[list[list[int]], dict[Place, Response]]:
        chunks: list[list[int]] = []
        prefill = EmbeddedEngine._next_chunk

        def noted(self: EmbeddedEngine) -> object:
            chunk = prefill(self)
            chunks.append([one.key for one in chunk.wanted])
            return chunk

        monkeypatch.setattr(EmbeddedEngine, "_next_chunk", noted)
        submit(engine, requests[:3], sampling)
        found: dict[Place, Response] = {}
        following, polls = 3, 0
        while len(found) < 16:
            for key, sample, response in engine.poll(wait_s(polls)):
                found[key, sample] = response
                if following < 8:
                    engine.submit(following, requests[following % 5], sampling)
                    following += 1
            polls += 1
        monkeypatch.setattr(EmbeddedEngine, "_next_chunk", prefill)
        return chunks, found

    at_length, token_by_token = run(lambda _: 9.0), run(lambda _: 0.0)
    assert at_length == token_by_token
    assert all(len(chunk) <= 4 for chunk in at_length[0])


def test_differently_sampled_requests_are_never_in_one_chunk(engine: EmbeddedEngine) -> None:
    submit(engine, requests_of(1, 5), Sampling(greedy=True))
    submit(engine, requests_of(1, 5), Sampling(temperature=2.0), first=5)
    found = polled(engine, 100)
    for sampling, first in ((Sampling(greedy=True), 0), (Sampling(temperature=2.0), 5)):
        alone = responses(engine, requests_of(1, 5), sampling)
        for (number, sample), response in alone.items():
            assert found[first + number, sample].ids == response.ids


def test_a_request_that_goes_on_has_one_seed_and_room() -> None:
    for seeds, begun in (((1, 2), (5,)), ((1,), (5, 6, 7))):
        with pytest.raises(ValueError, match="a response that goes on has one seed and room"):
            Request(prompt_ids=(3,), seeds=seeds, max_tokens=3, begun=begun)


def test_sleep_drops_what_is_under_way(engine: EmbeddedEngine) -> None:
    submit(engine, requests_of(2, 9), Sampling())
    engine.poll(0.0)
    engine.sleep()
    assert engine.poll(0.0) == []
    assert engine.abort() == []


def test_it_is_never_started_again(engine: EmbeddedEngine) -> None:
    with pytest.raises(RuntimeError, match="never lost"):
        engine.restart()
