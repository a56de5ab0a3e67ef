"""A grader that is a server: each answer is posted to it, and tried again while there is time."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx2

from megatron_rl.rewards.grade import one_line, shown
from megatron_rl.types import Prompt

FIRST_WAIT_S, LONGEST_WAIT_S = 0.25, 8.0
"""Between tries; each wait is twice the one before. A service that restarts is back within seconds."""

_clients: dict[asyncio.AbstractEventLoop, httpx2.AsyncClient] = {}
"""One for each event loop, of which a grader's process has one: connections are kept."""


async def ask(prompt: Prompt, text: str, finished: bool, *, url: str, timeout_s: float) -> Any:
    """What the server says of an answer: a number, or an object with `score`.

    It gets JSON: `prompt`, `answer` and `metadata` of the row, `response`, `finished`. Sent again when the connection
    fails and on statuses 429 and 5xx, so a server may be asked twice about one answer.

    Raises:
        RuntimeError: the server refused the request, or no answer came in time; with the last failure.
        ValueError: what came is no JSON.
    """
    body = {
        "prompt": prompt.text,
        "answer": prompt.answer,
        "metadata": dict(prompt.metadata),
        "response": text,
        "finished": finished,
    }
    failures: list[str] = []
    try:
        async with asyncio.timeout(timeout_s):
            return await _until_answered(url, body, failures)
    except TimeoutError:
        last = f" (try {len(failures)}: {failures[-1]})" if failures else ""
        raise RuntimeError(f"its server gave no answer within {timeout_s:g} s{last}") from None


async def _until_answered(url: str, body: dict[str, Any], failures: list[str]) -> Any:
    wait = FIRST_WAIT_S
    while True:
        try:
            reply = await _client().post(url, json=body)
        except httpx2.TransportError as error:
            failures.append(shown(error))
        else:
            if reply.is_success:
                return reply.json()
            said = one_line(f"{reply.status_code}: {reply.text[:200]}")
            if reply.status_code != 429 and reply.status_code < 500:
                raise RuntimeError(f"its server refused the request ({said})")
            failures.append(said)
        await asyncio.sleep(wait)
        wait = min(2 * wait, LONGEST_WAIT_S)


def _client() -> httpx2.AsyncClient:
    loop = asyncio.get_running_loop()
    if loop not in _clients:
        # The deadline is over all tries together, and as many answers are asked about at once as there are.
        _clients[loop] = httpx2.AsyncClient(timeout=None, limits=httpx2.Limits(max_connections=None))
    return _clients[loop]
