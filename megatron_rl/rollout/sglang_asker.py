"""Asks one SGLang server from a thread of its own: requests go in as they come, replies come out as they complete."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from dataclasses import replace

from megatron_rl.rollout.engine import Answer, Request, Sampling
from megatron_rl.rollout.sglang_client import SglangClient
from megatron_rl.types import Response

LOOK_S = 1.0
"""How often the server is looked after while replies are awaited."""

LONGEST_BETWEEN_PROBES_S, LONGEST_PROBE_S = 5.0, 30.0
"""Of the server's health. SGLang itself waits 20 s for a token before it calls itself ill."""

NOTHING = Response(ids=(), logprobs=(), finish_reason="abort", weight_versions=())


class Asker:
    """The requests that one server has of us. All methods are the main thread's; `stop` it.

    Replies are parsed in the thread, in one event loop.
    """

    def __init__(self, client: SglangClient, *, max_concurrent: int, hung_after_s: float) -> None:
        """Start the thread.

        Args:
            client: of this server; closed in the end.
            max_concurrent: requests that are under way at once; further ones wait here.
            hung_after_s: how often the server's health is looked at follows from it.
        """
        self.client = client
        self.silent_s = 0.0
        """How long the server, asked, has given no sign of life."""

        self._every_s = min(LONGEST_BETWEEN_PROBES_S, hung_after_s / 4)
        self._probe_s = min(LONGEST_PROBE_S, hung_after_s / 2)
        self._free = asyncio.Semaphore(max_concurrent)
        self._replies: queue.SimpleQueue[list[Answer] | Exception] = queue.SimpleQueue()
        self._under_way: set[tuple[int, int]] = set()
        self._asked = 0  # requests and scores that the loop has
        self._era = 0  # grows when all is called off
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="sglang", daemon=True)
        self._thread.start()

    @property
    def busy(self) -> bool:
        """Whether responses are under way."""
        return bool(self._under_way)

    def ask(self, key: int, request: Request, sampling: Sampling) -> None:
        """Send a request, when its turn comes. Its samples are one prompt; where a seed counts, one prompt each."""
        self._under_way.update((key, sample) for sample in range(len(request.seeds)))
        parts = [(0, request)]
        if self.client.seeded:
            parts = [(sample, replace(request, seeds=(seed,))) for sample, seed in enumerate(request.seeds)]
        for first, part in parts:
            asyncio.run_coroutine_threadsafe(self._answer(key, first, part, sampling, self._era), self._loop)

    def take(self, wait_s: float) -> list[Answer]:
        """What has come; waits at most `wait_s` for the first. Raises what the client raised."""
        found: list[Answer] = []
        while self._under_way:
            try:
                reply = self._replies.get(timeout=0 if found else wait_s)
            except queue.Empty:
                break
            if isinstance(reply, Exception):
                if not found:
                    raise reply
                self._replies.put(reply)  # the next time
                break
            self._under_way.difference_update((key, sample) for key, sample, _ in reply)
            found += reply
        return found

    def call_off(self) -> None:
        """Requests whose turn has not come yet are not sent any more: they come back aborted."""
        self._era += 1

    def give_up(self) -> list[Answer]:
        """Stop; what has come of all that was under way, and nothing of the rest."""
        self.stop()
        found: list[Answer] = []
        while not self._replies.empty():
            reply = self._replies.get()
            found += [] if isinstance(reply, Exception) else reply
        lost = self._under_way - {(key, sample) for key, sample, _ in found}
        self._under_way.clear()
        return found + [(key, sample, NOTHING) for key, sample in sorted(lost)]

    def score(self, ids: Sequence[int], look: Callable[[], None]) -> tuple[float, ...]:
        """Log-probs of a sequence (see `SglangClient.score`); `look` is called while they are awaited."""
        scores = asyncio.run_coroutine_threadsafe(self._score(ids), self._loop)
        while not wait([scores], LOOK_S).done:
            look()
        return scores.result()

    def stop(self) -> None:
        """Drop what is under way and end the thread. Again does nothing."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()

    def _run(self) -> None:
        watch = self._loop.create_task(self._watch())  # named, as the loop keeps weak references only
        self._loop.run_forever()
        watch.cancel()
        while under_way := asyncio.all_tasks(self._loop):  # what was just asked may begin meanwhile
            for task in under_way:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*under_way, return_exceptions=True))
        self._loop.run_until_complete(self.client.close())
        self._loop.close()

    async def _answer(self, key: int, first: int, request: Request, sampling: Sampling, era: int) -> None:
        self._asked += 1
        try:
            async with self._free:
                if era == self._era:
                    responses = await self.client.generate(request, sampling)
                    self.silent_s = 0.0
                else:
                    responses = (NOTHING,) * len(request.seeds)
            self._replies.put([(key, first + place, response) for place, response in enumerate(responses)])
        except Exception as error:  # whatever it is, who waits must hear of it
            self._replies.put(error)
        finally:
            self._asked -= 1

    async def _score(self, ids: Sequence[int]) -> tuple[float, ...]:
        self._asked += 1
        try:
            async with self._free:
                return await self.client.score(ids)
        finally:
            self._asked -= 1

    async def _watch(self) -> None:
        """Count the seconds without a sign of life. Each probe counts for no more than it may take: had this process
        itself been stopped for a while, that would not be the server's silence."""
        while True:
            await asyncio.sleep(self._every_s)
            begun = time.monotonic()
            if not self._asked or await self.client.is_well(self._probe_s):
                self.silent_s = 0.0
            else:
                self.silent_s += self._every_s + min(time.monotonic() - begun, self._probe_s)
