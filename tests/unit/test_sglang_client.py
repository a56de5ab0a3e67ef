"""The client against a few lines of server that break off, and replies as SGLang 0.5.23 writes them."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from megatron_rl.errors import UserError
from megatron_rl.rollout import sglang_client
from megatron_rl.rollout.engine import EngineLost, Request, Sampling
from megatron_rl.rollout.sglang_client import SglangClient
from megatron_rl.types import Response

REQUEST = Request(prompt_ids=(5, 6), seeds=(0,), max_tokens=3)
REPLY: dict[str, Any] = {
    "output_ids": [18, 27, 6],
    "meta_info": {
        "finish_reason": {"type": "length", "length": 3},
        "output_token_logprobs": [[-1.5, 18, None], [-2.5, 27, None], [-0.5, 6, None]],
        "weight_version": "4",
        "weight_versions": [{"version": "3", "start": 0, "end": 2}, {"version": "4", "start": 2, "end": 3}],
    },
}
Answer = Callable[[int, dict[str, Any]], Awaitable[Any]]


async def run_against(answer: Answer, use: Callable[[SglangClient], Awaitable[Any]]) -> Any:
    """Call `use` with a client of a server that says `answer(number of the request, body)`; None: it breaks off."""
    asked = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(head.split("content-length: ")[1].split("\r\n")[0])
        body = json.loads(await reader.readexactly(length))
        asked += 1
        reply = await answer(asked, body)
        if reply is not None:
            text = json.dumps(reply).encode()
            writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(text) + text)
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with (
        server,
        SglangClient(url, "key", eos_token_ids=frozenset({2}), timeout_s=2) as client,
    ):
        return await use(client)


async def generate(client: SglangClient) -> tuple[Response, ...]:
    return await client.generate(REQUEST, Sampling())


def test_a_reply_becomes_a_response() -> None:
    async def answer(number: int, body: dict[str, Any]) -> Any:
        assert body["input_ids"] == [5, 6]
        assert body["sampling_params"] | {"n": 1, "max_new_tokens": 3, "stop_token_ids": [2]} == body["sampling_params"]
        return REPLY

    assert asyncio.run(run_against(answer, generate)) == (
        Response(ids=(18, 27, 6), logprobs=(-1.5, -2.5, -0.5), finish_reason="length", weight_versions=(3, 3, 4)),
    )


@pytest.mark.parametrize(
    ("sampling", "asked"),
    [
        (Sampling(), {"temperature": 1.0, "top_p": 1.0, "top_k": -1}),
        (Sampling(temperature=0.6, top_p=0.95), {"temperature": 0.6, "top_p": 0.95, "top_k": -1}),
        (Sampling(greedy=True), {"temperature": 0.0, "top_p": 1.0, "top_k": -1}),
    ],
)
def test_how_tokens_are_drawn_is_asked_for(sampling: Sampling, asked: dict[str, float]) -> None:
    bodies: list[dict[str, Any]] = []

    async def answer(number: int, body: dict[str, Any]) -> Any:
        bodies.append(body)
        return REPLY

    asyncio.run(run_against(answer, lambda client: client.generate(REQUEST, sampling)))
    assert bodies[0]["sampling_params"] | asked == bodies[0]["sampling_params"]


def test_a_response_that_was_cut_short_is_told() -> None:
    async def answer(number: int, body: dict[str, Any]) -> Any:
        return REPLY

    async def ask_for_four(client: SglangClient) -> Any:
        return await client.generate(replace(REQUEST, max_tokens=4), Sampling())

    with pytest.raises(UserError, match="cut a response at 3 of 4 tokens: its key-value cache is too small"):
        asyncio.run(run_against(answer, ask_for_four))


def test_a_deterministic_server_gets_the_seed_in_63_bits() -> None:
    async def answer(number: int, body: dict[str, Any]) -> Any:
        assert body["sampling_params"]["sampling_seed"] == 2**63 - 1
        return REPLY

    async def ask(client: SglangClient) -> Any:
        client.seeded = True
        return await client.generate(replace(REQUEST, seeds=(2**64 - 1,)), Sampling())

    assert asyncio.run(run_against(answer, ask))


def test_a_lost_connection_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang_client, "FIRST_WAIT_S", 0.01)

    async def answer(number: int, body: dict[str, Any]) -> Any:
        return REPLY if number == 3 else None

    assert len(asyncio.run(run_against(answer, generate))) == 1


def test_a_connection_that_is_always_lost_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang_client, "FIRST_WAIT_S", 0.001)
    monkeypatch.setattr(sglang_client, "LONGEST_WAIT_S", 0.01)

    async def answer(number: int, body: dict[str, Any]) -> Any:
        return None

    with pytest.raises(EngineLost, match="lost the connection 8 times"):
        asyncio.run(run_against(answer, generate))


def test_a_server_that_does_not_answer_runs_into_the_deadline() -> None:
    async def answer(number: int, body: dict[str, Any]) -> Any:
        await asyncio.sleep(60)

    with pytest.raises(EngineLost, match=r"/generate took longer than 2 s \(rollout.sglang.request_timeout_s\)"):
        asyncio.run(run_against(answer, generate))


def test_a_response_that_goes_on_has_its_begin_in_the_prompt_and_less_room() -> None:
    async def answer(number: int, body: dict[str, Any]) -> Any:
        assert body["input_ids"] == [5, 6, 7, 8]
        assert body["sampling_params"]["max_new_tokens"] == 3
        return REPLY

    request = replace(REQUEST, begun=(7, 8), max_tokens=5)
    (response,) = asyncio.run(run_against(answer, lambda client: client.generate(request, Sampling())))
    assert (response.ids, response.finish_reason) == ((18, 27, 6), "length")


def test_an_aborted_response_may_be_short_and_have_no_tokens() -> None:
    meta = {"finish_reason": {"type": "abort", "message": "Abort in waiting queue"}, "weight_version": "4"}

    async def answer(number: int, body: dict[str, Any]) -> Any:
        return {"output_ids": [], "meta_info": meta}

    (response,) = asyncio.run(run_against(answer, generate))
    assert response == Response(ids=(), logprobs=(), finish_reason="abort", weight_versions=())


@pytest.mark.parametrize(
    ("last", "max_tokens", "reason"), [(6, 4, "abort"), (2, 4, "stop"), (2, 3, "stop"), (6, 3, "length")]
)
def test_what_is_aborted_as_it_ends_is_complete(last: int, max_tokens: int, reason: str) -> None:
    meta = {**REPLY["meta_info"], "finish_reason": {"type": "abort"}}
    meta["output_token_logprobs"] = [*meta["output_token_logprobs"][:2], [-0.5, last, None]]

    async def answer(number: int, body: dict[str, Any]) -> Any:
        return {"output_ids": [18, 27, last], "meta_info": meta}

    async def ask(client: SglangClient) -> Any:
        return await client.generate(replace(REQUEST, max_tokens=max_tokens), Sampling())

    (response,) = asyncio.run(run_against(answer, ask))
    assert (response.ids, response.finish_reason) == ((18, 27, last), reason)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"output_token_logprobs": [[-1.5, 18, None]]}, "log-probs came for other tokens than the 3"),
        ({"finish_reason": {"type": "tired"}}, "unknown reason 'tired'"),
        ({"weight_versions": [{"version": "3", "start": 0, "end": 2}]}, "versions came for 2 tokens of 3"),
    ],
)
def test_replies_that_contradict_themselves_are_refused(change: dict[str, Any], message: str) -> None:
    async def answer(number: int, body: dict[str, Any]) -> Any:
        return {**REPLY, "meta_info": {**REPLY["meta_info"], **change}}

    with pytest.raises(RuntimeError, match=message):
        asyncio.run(run_against(answer, generate))


def test_greedy_with_a_temperature_is_refused() -> None:
    async def answer(number: int, body: dict[str, Any]) -> Any:
        return REPLY

    async def ask(client: SglangClient) -> Any:
        return await client.generate(REQUEST, Sampling(greedy=True, temperature=0.5))

    with pytest.raises(ValueError, match="at temperature 1 only"):
        asyncio.run(run_against(answer, ask))
