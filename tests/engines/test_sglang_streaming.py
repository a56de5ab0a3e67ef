"""The SGLang engine of one rank: requests taken as they come, aborted, gone on with; servers that are lost."""

import copy
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from transformers import Qwen2ForCausalLM

from megatron_rl.errors import UserError
from megatron_rl.rollout.engine import Answer, EngineLost, Request, Sampling
from megatron_rl.rollout.groups import EngineGroup
from megatron_rl.rollout.sglang import SglangEngine
from megatron_rl.training.hf_config import read_model_spec
from tests.engines.conftest import ARGUMENTS, ENVIRONMENT, PYTHON, SHAPE, Model
from tests.engines.processes import left_behind, writing_to
from tests.tiny import run_config

EOS = 36
PROMPTS = [(5, 6, 7, 8, 9), (10, 11, 12), (20,) * 20, tuple(range(3, 30))]
AT_ONCE = 3
"""Requests that the server is asked at once."""


@pytest.fixture(scope="module")
def weights(model: Model) -> Qwen2ForCausalLM:
    """A model that never says `EOS`, so that answers are as long as they may be: it shows in one direction of all."""
    made = copy.deepcopy(model[1])
    made.model.embed_tokens.weight[:, 0] = 5
    made.model.norm.weight[0] = 1
    made.lm_head.weight[EOS] = 0
    made.lm_head.weight[EOS, 0] = -20
    return made


@pytest.fixture(scope="module")
def engine(model: Model, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SglangEngine]:
    """Started and asleep; two restarts are allowed."""
    config = run_config(
        run_dir=tmp_path_factory.mktemp("streaming"),
        model={"path": model[0]},
        trainer={"dtype": "float32"},
        rollout={
            "engine": "sglang",
            "engine_restarts": 2,
            "sglang": {
                "python": PYTHON,
                "extra_args": ARGUMENTS,
                "environment": ENVIRONMENT,
                "start_timeout_s": 400,
                "hung_after_s": 10,
                "max_concurrent_prompts": AT_ONCE,
            },
        },
    )
    made = SglangEngine(
        config,
        read_model_spec(model[0]),
        EngineGroup(rank=0, size=1, world=1),
        eos_token_ids=frozenset({EOS}),
        vocabulary=SHAPE.vocab,
    )
    made.start()
    made.sleep()
    yield made
    made.stop()


@pytest.fixture
def awake(engine: SglangEngine, weights: Qwen2ForCausalLM) -> Iterator[SglangEngine]:
    """It has weights of version 5, and sleeps afterwards."""
    wake(engine, weights, 5)
    yield engine
    engine.sleep()


def wake(engine: SglangEngine, weights: Qwen2ForCausalLM, version: int) -> None:
    engine.wake()
    engine.update_weights(((name, parameter.data) for name, parameter in weights.named_parameters()), version)
    engine.resume()
    assert engine.health()


def polled(engine: SglangEngine, count: int, within_s: float = 60) -> list[Answer]:
    """The next `count` responses."""
    deadline = time.monotonic() + within_s
    found: list[Answer] = []
    while len(found) < count and time.monotonic() < deadline:
        found += engine.poll(1.0)
    assert len(found) == count
    return found


def long(number: int, samples: int = 4, tokens: int = 400) -> Request:
    return Request(prompt_ids=PROMPTS[number], seeds=tuple(range(samples)), max_tokens=tokens)


def check_greedy(engine: SglangEngine, weights: Qwen2ForCausalLM, version: int) -> None:
    """What it generates is right."""
    engine.submit(0, long(1, 1, 8), Sampling(greedy=True))
    ((_, _, response),) = polled(engine, 1)
    likeliest = weights(torch.tensor([PROMPTS[1] + response.ids])).logits[0].argmax(-1).tolist()
    assert list(response.ids) == likeliest[len(PROMPTS[1]) - 1 : -1]
    assert response.weight_versions == (version,) * 8


def lost(engine: SglangEngine, within_s: float) -> str:
    """Why polling says that it is lost."""
    begun = time.monotonic()
    with pytest.raises(EngineLost) as caught:  # noqa: PT012
        while time.monotonic() < begun + within_s:
            engine.poll(1.0)
    assert not engine.health()
    return str(caught.value)


def test_requests_are_taken_while_others_run(awake: SglangEngine) -> None:
    awake.submit(7, long(0), Sampling())
    assert awake.poll(0.3) == []
    awake.submit(8, long(1, 2, 3), Sampling())
    first = polled(awake, 2)
    assert [(key, sample) for key, sample, _ in first] == [(8, 0), (8, 1)]
    awake.submit(8, long(1, 1, 5), Sampling(greedy=True))  # a key is free again when all of it has come
    rest = polled(awake, 5)
    assert {(key, sample): len(response.ids) for key, sample, response in rest} == {
        (8, 0): 5,
        **{(7, sample): 400 for sample in range(4)},
    }
    assert awake.poll(9.0) == []  # at once


def test_aborted_answers_go_on_and_their_logprobs_are_those_of_the_whole(awake: SglangEngine) -> None:
    for key in range(4):
        awake.submit(key, long(key), Sampling())
    assert awake.poll(0.7) == []
    begun = time.monotonic()
    parts = {(key, sample): response for key, sample, response in awake.abort()}
    assert time.monotonic() - begun < 5
    assert parts.keys() == {(key, sample) for key in range(4) for sample in range(4)}
    assert {response.finish_reason for response in parts.values()} == {"abort"}
    assert all(0 < len(parts[key, 0].ids) < 400 for key in range(AT_ONCE))
    assert all(parts[AT_ONCE, sample].ids == () for sample in range(4))  # its turn had not come
    assert awake.abort() == []

    for number, ((key, sample), part) in enumerate(parts.items()):
        awake.submit(number, replace(long(key), seeds=(sample,), begun=part.ids), Sampling())
    rest = {key: response for key, _, response in polled(awake, 16)}
    for number, ((key, _), part) in enumerate(parts.items()):
        whole = part.ids + rest[number].ids
        assert (len(whole), rest[number].finish_reason) == (400, "length")
        assert part.weight_versions + rest[number].weight_versions == (5,) * 400
        if number % 3 == 0:
            scored = awake.score([PROMPTS[key] + whole])[0][len(PROMPTS[key]) - 1 :]
            assert part.logprobs + rest[number].logprobs == pytest.approx(scored, abs=1e-4)


def test_an_abort_at_any_moment_ends_all_and_the_next_request_is_taken(
    awake: SglangEngine, weights: Qwen2ForCausalLM
) -> None:
    """On their way to the server, in the prompt's own prefill, before and after the first token."""
    for wait_s in (0, 0.005, 0.01, 0.02, 0.04, 0.08):
        for key in range(3):
            awake.submit(key, long(key), Sampling())
        time.sleep(wait_s)
        begun = time.monotonic()
        ended = awake.abort()
        assert time.monotonic() - begun < 3
        assert {(key, sample) for key, sample, _ in ended} == {(key, sample) for key in range(3) for sample in range(4)}
        assert {response.finish_reason for _, _, response in ended} == {"abort"}
        check_greedy(awake, weights, 5)


def test_an_abort_that_meets_the_last_token_leaves_no_part(awake: SglangEngine) -> None:
    """SGLang calls an answer aborted that is as long as it may be, if it is aborted in the pass of its last token."""
    for number in range(20):
        awake.submit(0, long(0, samples=8, tokens=6), Sampling())
        time.sleep(0.004 * number)
        for _, _, response in awake.abort():
            assert (response.finish_reason == "length") == (len(response.ids) == 6)


def test_a_killed_server_is_told_and_started_again(engine: SglangEngine, weights: Qwen2ForCausalLM) -> None:
    wake(engine, weights, 6)
    log_file = engine.directory / "server.log"
    old = writing_to(log_file)
    engine.submit(0, long(0), Sampling())
    assert engine.poll(0.3) == []
    kill(old, signal.SIGKILL, but=keeper(engine))
    begun = time.monotonic()
    assert "the SGLang server ended with exit code 137; the end of" in lost(engine, within_s=20)
    assert time.monotonic() - begun < 12
    assert [response.ids for _, _, response in engine.abort()] == [()] * 4
    begun = time.monotonic()
    engine.restart()
    assert time.monotonic() - begun < 3  # it waits for nothing
    assert not engine.health()
    engine.resume()  # another rollout of the same phase: nothing to do for it
    engine.sleep()
    wake(engine, weights, 7)
    check_greedy(engine, weights, 7)
    assert not set(old) & set(writing_to(log_file))
    assert log_file.read_text().count("Uvicorn running") == 2
    engine.sleep()


def test_a_stopped_server_is_hung_and_started_again(engine: SglangEngine, weights: Qwen2ForCausalLM) -> None:
    """All of its processes, the one that looks after them too, get SIGSTOP."""
    wake(engine, weights, 8)
    log_file = engine.directory / "server.log"
    old = writing_to(log_file)
    engine.submit(0, long(0), Sampling())
    assert engine.poll(0.3) == []
    kill(old, signal.SIGSTOP)
    begun = time.monotonic()
    assert "gave no sign of life for" in lost(engine, within_s=40)
    assert time.monotonic() - begun < 25
    begun = time.monotonic()
    engine.restart()
    assert time.monotonic() - begun < 5
    assert not set(old) & set(writing_to(log_file))
    engine.sleep()
    wake(engine, weights, 9)
    check_greedy(engine, weights, 9)
    engine.sleep()


def test_one_that_is_lost_too_often_ends_the_run(engine: SglangEngine, weights: Qwen2ForCausalLM) -> None:
    wake(engine, weights, 10)
    log_file = engine.directory / "server.log"
    engine.submit(0, long(0), Sampling())
    kill(writing_to(log_file), signal.SIGKILL)  # its keeper too
    lost(engine, within_s=20)
    with pytest.raises(UserError, match=r"engine 0 .*rollout.engine_restarts is 2(.|\n)*ended with exit code -9"):
        engine.restart()
    engine.stop()
    assert left_behind(log_file, within_s=5) == []


def keeper(engine: SglangEngine) -> int:
    assert engine._kept
    assert engine._kept.server._child
    return engine._kept.server._child.pid


def kill(processes: list[int], with_signal: signal.Signals, but: int = -1) -> None:
    assert len(processes) >= 4  # keeper, server, scheduler, detokenizer
    for process in processes:
        if process != but:
            os.kill(process, with_signal)
