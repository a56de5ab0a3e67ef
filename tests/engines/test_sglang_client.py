"""What a real SGLang server answers, against transformers."""

import asyncio

import httpx2
import pytest
import torch
from transformers import Qwen2ForCausalLM

from megatron_rl.errors import UserError
from megatron_rl.rollout.engine import EngineLost, Request, Sampling
from megatron_rl.rollout.sglang_client import SglangClient
from megatron_rl.rollout.sglang_server import SglangServer
from megatron_rl.types import Response
from tests.engines.conftest import Model

PROMPTS = [(5, 6, 7, 8, 9), (10, 11, 12), (20,) * 20, tuple(range(3, 36))]
EOS = 2


pytestmark = pytest.mark.usefixtures("control")


def ask(server: SglangServer, requests: list[Request], sampling: Sampling, eos: frozenset[int] = frozenset({EOS})):
    """All responses, in the order of the requests."""

    async def all_of_them() -> list[tuple[Response, ...]]:
        async with SglangClient(server.url, server.api_key, eos_token_ids=eos, timeout_s=120) as client:
            return await asyncio.gather(*(client.generate(request, sampling) for request in requests))

    return asyncio.run(all_of_them())


def requests_for(prompts: list[tuple[int, ...]], responses: int, max_tokens: int) -> list[Request]:
    return [Request(prompt_ids=prompt, seeds=tuple(range(responses)), max_tokens=max_tokens) for prompt in prompts]


def logprobs(model: Qwen2ForCausalLM, prompt: tuple[int, ...], response: Response, temperature: float) -> torch.Tensor:
    """Of the response's tokens, by transformers."""
    logits = model(torch.tensor([prompt + response.ids])).logits[0, len(prompt) - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(-1, torch.tensor(response.ids).unsqueeze(-1)).squeeze(-1)


def test_greedy_is_the_argmax_of_transformers(server: SglangServer, model: Model) -> None:
    answers = ask(server, requests_for(PROMPTS, 1, 32), Sampling(greedy=True))
    for prompt, (response,) in zip(PROMPTS, answers, strict=True):
        expected = model[1](torch.tensor([prompt + response.ids])).logits[0, len(prompt) - 1 : -1].argmax(-1)
        assert response.ids == tuple(expected.tolist())
        torch.testing.assert_close(
            torch.tensor(response.logprobs), logprobs(model[1], prompt, response, 1.0), atol=1e-4, rtol=0
        )


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_sixteen_samples_have_the_log_probs_of_transformers(
    server: SglangServer, model: Model, temperature: float
) -> None:
    answers = ask(server, requests_for(PROMPTS, 16, 24), Sampling(temperature=temperature))
    for prompt, responses in zip(PROMPTS, answers, strict=True):
        assert len(responses) == 16
        assert len({response.ids for response in responses}) > 8
        for response in responses:
            expected = logprobs(model[1], prompt, response, temperature)
            torch.testing.assert_close(torch.tensor(response.logprobs), expected, atol=1e-4, rtol=0)
            assert response.weight_versions == (3,) * len(response.ids)


def test_top_p_draws_from_the_nucleus_and_keeps_the_log_probs_of_all_tokens(server: SglangServer, model: Model) -> None:
    answers = ask(server, requests_for(PROMPTS, 32, 12), Sampling(temperature=0.8, top_p=0.5))
    outside = 0.0
    for prompt, responses in zip(PROMPTS, answers, strict=True):
        for response in responses:
            expected = logprobs(model[1], prompt, response, 0.8)
            torch.testing.assert_close(torch.tensor(response.logprobs), expected, atol=1e-4, rtol=0)
            logits = model[1](torch.tensor([prompt + response.ids])).logits[0, len(prompt) - 1 : -1] / 0.8
            whole = logits.double().softmax(-1)
            likelier = whole * (whole > expected.double().exp().unsqueeze(-1) + 1e-6)
            assert (likelier.sum(-1) < 0.5 + 1e-4).all()  # what is likelier had not reached top_p
            outside += float((1 - whole.max(-1).values).sum())
    assert outside > 100  # so many tokens, at least, would not be the likeliest if all were drawn from
    assert len({response.ids for responses in answers for response in responses}) > 16


def test_a_response_ends_with_its_end_token_or_at_the_budget(server: SglangServer) -> None:
    responses = [
        r for rs in ask(server, requests_for(PROMPTS, 16, 12), Sampling(), frozenset({EOS, 7, 8, 9})) for r in rs
    ]
    assert {response.finish_reason for response in responses} == {"stop", "length"}
    for response in responses:
        ends = [token in (EOS, 7, 8, 9) for token in response.ids]
        if response.finish_reason == "stop":
            assert ends == [False] * (len(ends) - 1) + [True]
        else:
            assert ends == [False] * 12


def test_samples_share_the_keys_and_values_of_their_prompt(server: SglangServer) -> None:
    prompt = [3 + number % 30 for number in range(200)]
    body = {"input_ids": prompt, "sampling_params": {"n": 16, "max_new_tokens": 2}}
    headers = {"Authorization": f"Bearer {server.api_key}"}
    replies = httpx2.post(f"{server.url}/generate", json=body, headers=headers, timeout=60).json()
    # All but the last token of the prompt, which must be computed for its logits
    assert [reply["meta_info"]["cached_tokens"] for reply in replies] == [199] * 16


def test_a_sequence_is_scored_as_transformers_does(server: SglangServer, model: Model) -> None:
    async def score() -> list[tuple[float, ...]]:
        async with SglangClient(server.url, server.api_key, eos_token_ids=frozenset(), timeout_s=60) as client:
            return await asyncio.gather(*(client.score(ids) for ids in PROMPTS * 2))  # again: from a full cache

    for ids, scores in zip(PROMPTS * 2, asyncio.run(score()), strict=True):
        logits = model[1](torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        expected = logits.gather(-1, torch.tensor(ids[1:]).unsqueeze(-1)).squeeze(-1)
        torch.testing.assert_close(torch.tensor(scores), expected, atol=1e-4, rtol=0)


def test_a_wrong_api_key_is_the_users_to_mend(server: SglangServer) -> None:
    async def ask_with_a_wrong_key() -> None:
        async with SglangClient(server.url, "wrong", eos_token_ids=frozenset(), timeout_s=60) as client:
            await client.generate(requests_for(PROMPTS, 1, 1)[0], Sampling())

    with pytest.raises(UserError, match="refused the API key"):
        asyncio.run(ask_with_a_wrong_key())


def test_what_the_server_refuses_is_told_in_its_words(server: SglangServer) -> None:
    with pytest.raises(RuntimeError, match=r"/generate failed \(400\): .*8192"):
        ask(server, requests_for([(3,) * 9000], 1, 4), Sampling())


def test_a_request_has_a_deadline(server: SglangServer) -> None:
    async def ask_in_a_hurry() -> None:
        async with SglangClient(server.url, server.api_key, eos_token_ids=frozenset(), timeout_s=0.05) as client:
            await client.generate(requests_for([(3, 4)], 16, 400)[0], Sampling())

    with pytest.raises(EngineLost, match=r"/generate took longer than 0.05 s"):
        asyncio.run(ask_in_a_hurry())
