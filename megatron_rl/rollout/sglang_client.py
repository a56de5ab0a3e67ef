"""Asks an SGLang server for responses over HTTP. Token ids in, token ids out."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

import httpx2

from megatron_rl.errors import UserError
from megatron_rl.rollout.engine import EngineLost, Request, Sampling
from megatron_rl.types import Response

FIRST_WAIT_S, LONGEST_WAIT_S, TRIES = 0.25, 8.0, 8
"""Of a request whose connection was lost. The waits add up to half a minute: a busy server takes connections again
within seconds, and a dead one doesn't come back."""


class SglangClient:
    """A connection to one server, of one event loop: `async with SglangClient(...) as client`."""

    def __init__(
        self,
        url: str,
        api_key: str,
        *,
        eos_token_ids: frozenset[int],
        timeout_s: float,
        seeded: bool = False,
    ) -> None:
        """Describe the connection.

        Args:
            url: of the server, `http://address:port`.
            api_key: the server's.
            eos_token_ids: sampling one of them ends a response, beside those that the model's files name.
            timeout_s: how long a request may take from the moment it is sent, with all its tries.
            seeded: the server is deterministic, and a request has one seed.
        """
        self.eos, self.timeout_s, self.seeded = eos_token_ids, timeout_s, seeded
        self._http = httpx2.AsyncClient(
            base_url=url,
            headers={"Authorization": f"Bearer {api_key}"},
            timeout=httpx2.Timeout(None, connect=10),  # the deadline is over the whole request
            # The server closes idle connections after 5 seconds: it must not do so under our next request.
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=3),
            trust_env=False,  # a proxy has no business between a node and itself
        )

    async def __aenter__(self) -> SglangClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    async def generate(self, request: Request, sampling: Sampling) -> tuple[Response, ...]:
        """All responses to a prompt, whose keys and values the server computes once; of one that goes on, what is new.

        Seeds are only counted, unless the server is deterministic: SGLang ignores them otherwise. Log-probs are those
        of the whole distribution with `top_p` too: SGLang takes them before it cuts.

        Raises:
            EngineLost: the connection was lost again and again, or the request took too long.
            UserError: the API key is wrong, or the server's cache is too small for a longest response.
            RuntimeError: the server refused the request.
        """
        params = _sampling_params(request, sampling, self.eos)
        if self.seeded:
            (seed,) = request.seeds
            params["sampling_seed"] = seed >> 1  # of 64 bits without a sign, to those with one
        ids = [*request.prompt_ids, *request.begun]
        body = {"input_ids": ids, "sampling_params": params, "return_logprob": True}
        reply = await self._post("/generate", body)
        answers = [reply] if isinstance(reply, dict) else reply
        if len(answers) != len(request.seeds):
            raise RuntimeError(f"SGLang: {len(answers)} responses came instead of {len(request.seeds)}")
        responses = tuple(_response(answer, request.room, self.eos) for answer in answers)
        for response in responses:
            if response.finish_reason == "length" and len(response.ids) < request.room:
                raise UserError(
                    f"SGLang cut a response at {len(response.ids)} of {request.room} tokens: its key-value cache "
                    "is too small for a longest response; raise rollout.sglang.memory_fraction or --max-total-tokens"
                )
        return responses

    async def score(self, ids: Sequence[int]) -> tuple[float, ...]:
        """Log-probabilities of each token after the first, at temperature 1. Nothing is generated.

        Raises: as `generate`.
        """
        body = {
            "input_ids": list(ids),
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        scored = (await self._post("/generate", body))["meta_info"]["input_token_logprobs"]
        if [token for _, token, *_ in scored] != list(ids):
            raise RuntimeError(f"SGLang: log-probs came for other tokens than the {len(ids)} of the prompt")
        return tuple(logprob for logprob, *_ in scored[1:])  # the first has none

    async def is_well(self, within_s: float) -> bool:
        """Whether tokens come out of it: SGLang looks for any, and has one generated where none is under way."""
        try:
            async with asyncio.timeout(within_s):
                return (await self._http.get("/health")).status_code == 200
        except (httpx2.TransportError, TimeoutError):
            return False

    async def _post(self, path: str, body: Mapping[str, Any]) -> Any:
        """The reply's JSON. Sent again when the connection is lost: generating has no side effects."""
        try:
            async with asyncio.timeout(self.timeout_s):
                reply = await self._until_connected(path, body)
        except TimeoutError:
            message = f"SGLang: {path} took longer than {self.timeout_s:g} s (rollout.sglang.request_timeout_s)"
            raise EngineLost(message) from None
        if reply.status_code == 401:
            raise UserError(f"SGLang: {self._http.base_url} refused the API key; is it this run's server?")
        if reply.status_code != 200:
            raise RuntimeError(f"SGLang: {path} failed ({reply.status_code}): {reply.text[:500]}")
        return reply.json()

    async def _until_connected(self, path: str, body: Mapping[str, Any]) -> httpx2.Response:
        wait = FIRST_WAIT_S
        for _ in range(TRIES - 1):
            try:
                return await self._http.post(path, json=body)
            except httpx2.TransportError:
                await asyncio.sleep(wait)
                wait = min(2 * wait, LONGEST_WAIT_S)
        try:
            return await self._http.post(path, json=body)
        except httpx2.TransportError as error:
            message = f"SGLang: {self._http.base_url} lost the connection {TRIES} times ({error!r}); see its log"
            raise EngineLost(message) from error


def _sampling_params(request: Request, sampling: Sampling, eos: frozenset[int]) -> dict[str, Any]:
    """Every parameter that changes what is drawn: the defaults are the model's generation_config.json.

    Raises:
        ValueError: greedy with a temperature, at which SGLang gives no log-probs.
    """
    if sampling.greedy and sampling.temperature != 1:
        raise ValueError(
            "SGLang gives a greedy token's log-prob at temperature 1 only; sample greedily at temperature 1"
        )
    return {
        "n": len(request.seeds),
        "max_new_tokens": request.room,
        "stop_token_ids": sorted(eos),
        "temperature": 0.0 if sampling.greedy else sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": -1,
        "min_p": 0.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
    }


def _response(answer: Mapping[str, Any], room: int, eos: frozenset[int]) -> Response:
    """A response from SGLang's words for it. Raises RuntimeError where they contradict each other.

    SGLang ends what it aborts with the next token, and calls it aborted though that be an end token or the last one
    that there is room for.
    """
    ids, meta = tuple(answer["output_ids"]), answer["meta_info"]
    # (log-prob, id, text) of each sampled token
    scored = meta.get("output_token_logprobs") or []  # aborted before it began it may have none
    if tuple(token for _, token, *_ in scored) != ids:
        raise RuntimeError(f"SGLang: log-probs came for other tokens than the {len(ids)} that were sampled")
    reason = meta["finish_reason"]["type"]
    if reason not in ("stop", "length", "abort"):
        raise RuntimeError(f"SGLang: a response ended for the unknown reason {reason!r}")
    if reason == "abort" and ids and ids[-1] in eos:
        reason = "stop"
    elif reason == "abort" and len(ids) >= room:
        reason = "length"
    return Response(
        ids=ids,
        logprobs=tuple(logprob for logprob, *_ in scored),
        finish_reason=reason,
        weight_versions=_weight_versions(meta, len(ids)),
    )


def _weight_versions(meta: Mapping[str, Any], tokens: int) -> tuple[int, ...]:
    """The version of each token. SGLang gives spans (version, start, end) when weights changed meanwhile, else one."""
    spans: Sequence[Any] = meta.get("weight_versions") or [
        {"version": meta["weight_version"], "start": 0, "end": tokens}
    ]
    versions = tuple(int(span["version"]) for span in spans for _ in range(span["start"], span["end"]))
    if len(versions) != tokens:
        raise RuntimeError(f"SGLang: weight versions came for {len(versions)} tokens of {tokens}")
    return versions
