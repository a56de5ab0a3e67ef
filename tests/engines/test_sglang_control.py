"""New weights, pauses and memory of a real SGLang server."""

import asyncio
import time
from typing import Any

import httpx2
import pytest
import torch
from transformers import Qwen2ForCausalLM

from megatron_rl.errors import UserError
from megatron_rl.rollout.engine import Request, Sampling
from megatron_rl.rollout.sglang_buckets import Buckets
from megatron_rl.rollout.sglang_client import SglangClient
from megatron_rl.rollout.sglang_control import SglangControl
from megatron_rl.rollout.sglang_server import SglangServer
from megatron_rl.types import Response
from tests.engines.conftest import POSITIONS, SHAPE, Model, push
from tests.tiny import random_model

PROMPT = (5, 6, 7, 8, 9)
LONG = 4000
"""Tokens of an answer that is still under way a moment after it was begun, on a fast machine too."""


@pytest.fixture(scope="module")
def other() -> Qwen2ForCausalLM:
    """Another model of the same shape."""
    return random_model(SHAPE, seed=4, max_position_embeddings=POSITIONS)


async def greedy(server: SglangServer, tokens: int, prompt: tuple[int, ...] = PROMPT) -> Response:
    async with SglangClient(server.url, server.api_key, eos_token_ids=frozenset(), timeout_s=120) as client:
        request = Request(prompt_ids=prompt, seeds=(0,), max_tokens=tokens)
        return (await client.generate(request, Sampling(greedy=True)))[0]


def argmaxes(model: Qwen2ForCausalLM, ids: tuple[int, ...]) -> list[int]:
    """After each token, the likeliest next."""
    return model(torch.tensor([ids])).logits[0].argmax(-1).tolist()


def cached(server: SglangServer, prompt: tuple[int, ...]) -> int:
    """How many tokens of a prompt the server had keys and values of, when asked for one more."""
    reply = httpx2.post(
        f"{server.url}/generate",
        json={"input_ids": list(prompt), "sampling_params": {"max_new_tokens": 1}},
        headers={"Authorization": f"Bearer {server.api_key}"},
        timeout=60,
    ).json()
    return reply["meta_info"]["cached_tokens"]


def test_new_weights_give_new_answers_and_forget_the_cache(
    server: SglangServer, control: SglangControl, model: Model, other: Qwen2ForCausalLM
) -> None:
    prompt = tuple(3 + number % 30 for number in range(100))
    before = asyncio.run(greedy(server, 8, prompt))
    assert cached(server, prompt) == 99
    assert push(control, other, version=4) > 3
    assert cached(server, prompt) == 0
    after = asyncio.run(greedy(server, 8, prompt))
    for answer, weights, version in ((before, model[1], 3), (after, other, 4)):
        assert list(answer.ids) == argmaxes(weights, prompt + answer.ids)[len(prompt) - 1 : -1]
        assert set(answer.weight_versions) == {version}
    assert before.ids != after.ids


def test_a_bucket_before_the_last_keeps_version_and_cache(
    server: SglangServer, control: SglangControl, model: Model
) -> None:
    prompt = tuple(3 + number % 20 for number in range(50))
    cached(server, prompt)
    buckets = Buckets(torch.device("cpu"), 40_000)
    control.begin_update()
    held, _ = next(iter(buckets.fill(model[1].named_parameters())))
    control.update([buckets.payload(held)], load_format="flattened_bucket", version=None)
    control.end_update()
    assert cached(server, prompt) == 49
    assert asyncio.run(greedy(server, 1)).weight_versions == (3,)


def test_weights_change_in_mid_generation_and_each_token_has_its_version(
    server: SglangServer, control: SglangControl, model: Model, other: Qwen2ForCausalLM
) -> None:
    async def swap() -> Response:
        answer = asyncio.create_task(greedy(server, LONG))
        await asyncio.sleep(0.3)
        await asyncio.to_thread(control._post, "/pause_generation", {"mode": "retract"})  # it goes on afterwards
        await asyncio.to_thread(push, control, other, 4)
        assert not answer.done()
        await asyncio.to_thread(control.go_on)
        return await answer

    answer = asyncio.run(swap())
    old, new = (answer.weight_versions.count(version) for version in (3, 4))
    assert answer.weight_versions == (3,) * old + (4,) * new
    assert min(old, new) > 0
    whole = PROMPT + answer.ids
    likeliest = {3: argmaxes(model[1], whole), 4: argmaxes(other, whole)}
    for place, (token, version) in enumerate(zip(answer.ids, answer.weight_versions, strict=True)):
        assert token == likeliest[version][len(PROMPT) + place - 1]


def test_a_pause_aborts_what_is_under_way_and_holds_up_what_comes(server: SglangServer, control: SglangControl) -> None:
    async def pause() -> tuple[Response, Response]:
        aborted = asyncio.create_task(greedy(server, LONG))
        await asyncio.sleep(0.3)
        await asyncio.to_thread(control.pause)
        assert (await aborted).finish_reason == "abort"
        held_up = asyncio.create_task(greedy(server, 4))
        await asyncio.sleep(0.7)
        assert not held_up.done()
        await asyncio.to_thread(control.go_on)
        return await aborted, await held_up

    aborted, held_up = asyncio.run(pause())
    assert 0 < len(aborted.ids) < LONG
    assert len(aborted.logprobs) == len(aborted.ids)
    assert (held_up.finish_reason, len(held_up.ids)) == ("length", 4)


def test_the_way_through_a_sleep(server: SglangServer, control: SglangControl, other: Qwen2ForCausalLM) -> None:
    """Pause, flush, release; weights back, new ones, cache back. Without a memory saver nothing is freed here."""
    asyncio.run(greedy(server, 4))
    control.pause()
    control.flush()
    control.release(["kv_cache", "cuda_graph", "weights"])
    control.resume(["weights"])
    push(control, other, version=9)
    control.resume(["kv_cache", "cuda_graph"])
    control.go_on()
    answer = asyncio.run(greedy(server, 8))
    assert list(answer.ids) == argmaxes(other, PROMPT + answer.ids)[len(PROMPT) - 1 : -1]
    assert answer.weight_versions == (9,) * 8


def failing(act: Any, *args: Any, **kwargs: Any) -> str:
    with pytest.raises(RuntimeError) as caught:
        act(*args, **kwargs)
    return str(caught.value)


def test_failures_that_sglang_returns_are_raised(control: SglangControl, model: Model) -> None:
    buckets = Buckets(torch.device("cpu"))
    held, _ = next(iter(buckets.fill(model[1].named_parameters())))
    assert "must run between begin_weight_update() and" in failing(
        control.update, [buckets.payload(held)], load_format="flattened_bucket", version=None
    )
    assert "no weight-update session is open" in failing(control.end_update)
    control.begin_update()
    assert "already open" in failing(control.begin_update)
    control.end_update()


def test_a_wrong_admin_key_is_the_users_to_mend(server: SglangServer) -> None:
    with pytest.raises(UserError, match="refused the admin key"):
        SglangControl(server.url, server.api_key).pause()


def test_a_server_that_is_gone_is_told_at_once() -> None:
    begun = time.monotonic()
    assert "did not answer /pause_generation" in failing(SglangControl("http://127.0.0.1:9", "key").pause)
    assert time.monotonic() - begun < 5
