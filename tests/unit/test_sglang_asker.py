"""The thread that asks a server, with a client that answers as it is told."""

import asyncio
import threading
import time
from collections.abc import Iterator, Sequence

import pytest

from megatron_rl.rollout.engine import Answer, EngineLost, Request, Sampling
from megatron_rl.rollout.sglang_asker import Asker
from megatron_rl.types import Response


class Told:
    """A client whose requests wait until they are let go, by their prompt's token."""

    def __init__(self) -> None:
        self.seeded, self.well, self.closed = False, True, False
        self.asked: list[int] = []
        self.most, self._open = 0, 0
        self.gates: dict[int, threading.Event] = {}

    def gate(self, token: int) -> threading.Event:
        return self.gates.setdefault(token, threading.Event())

    async def generate(self, request: Request, sampling: Sampling) -> tuple[Response, ...]:
        token = request.prompt_ids[0]
        self.asked.append(token)
        self._open += 1
        self.most = max(self.most, self._open)
        try:
            while not self.gate(token).is_set():
                await asyncio.sleep(0.005)
        finally:
            self._open -= 1
        if token == 13:
            raise EngineLost("bad luck")
        response = Response(ids=(token,), logprobs=(-1.0,), finish_reason="stop", weight_versions=(0,))
        return (response,) * len(request.seeds)

    async def score(self, ids: Sequence[int]) -> tuple[float, ...]:
        while not self.gate(ids[0]).is_set():
            await asyncio.sleep(0.005)
        return (-0.5,) * (len(ids) - 1)

    async def is_well(self, within_s: float) -> bool:
        return self.well

    async def close(self) -> None:
        self.closed = True


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def asker(told: Told) -> Iterator[Asker]:
    """Two requests at once, and a probe every 0.05 s."""
    made = Asker(told, max_concurrent=2, hung_after_s=0.2)  # type: ignore[arg-type]
    yield made
    made.stop()
    made.stop()
    assert told.closed


def ask(asker: Asker, *tokens: int, samples: int = 1) -> None:
    for token in tokens:
        asker.ask(token, Request(prompt_ids=(token,), seeds=tuple(range(samples)), max_tokens=9), Sampling())


def taken(asker: Asker, count: int) -> list[Answer]:
    found: list[Answer] = []
    while len(found) < count:
        found += asker.take(5.0)
    return found


def until(condition: object) -> None:
    deadline = time.monotonic() + 5
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_replies_come_as_they_complete(asker: Asker, told: Told) -> None:
    ask(asker, 3, 4, samples=2)
    assert asker.take(0.05) == []
    told.gate(4).set()
    assert [(key, sample, response.ids) for key, sample, response in taken(asker, 2)] == [(4, 0, (4,)), (4, 1, (4,))]
    assert asker.busy
    told.gate(3).set()
    taken(asker, 2)
    assert not asker.busy
    assert asker.take(9.0) == []  # at once


def test_no_more_requests_than_allowed_are_under_way(asker: Asker, told: Told) -> None:
    for token in range(3, 9):
        told.gate(token).set()
    ask(asker, *range(3, 9))
    assert {key for key, _, _ in taken(asker, 6)} == set(range(3, 9))
    assert told.most <= 2
    assert told.asked == list(range(3, 9))  # in their order


def test_where_seeds_count_each_sample_is_a_request(asker: Asker, told: Told) -> None:
    told.seeded = True
    told.gate(3).set()
    ask(asker, 3, samples=3)
    assert sorted(sample for _, sample, _ in taken(asker, 3)) == [0, 1, 2]
    assert told.asked == [3, 3, 3]


def test_what_is_called_off_before_its_turn_is_never_sent(asker: Asker, told: Told) -> None:
    ask(asker, 3, 4, 5, 6, samples=2)
    until(lambda: told.asked == [3, 4])
    asker.call_off()
    ask(asker, 7)  # asked since: it is sent
    for token in (3, 4, 7):
        told.gate(token).set()
    found = {(key, sample): response.finish_reason for key, sample, response in taken(asker, 9)}
    assert found == {
        **{(key, sample): "stop" for key in (3, 4) for sample in (0, 1)},
        **{(key, sample): "abort" for key in (5, 6) for sample in (0, 1)},
        (7, 0): "stop",
    }
    assert told.asked == [3, 4, 7]


def test_giving_up_keeps_what_has_come(asker: Asker, told: Told) -> None:
    told.gate(4).set()
    ask(asker, 3, 4, 5)
    until(lambda: not asker._replies.empty())
    found = {key: (response.finish_reason, response.ids) for key, _, response in asker.give_up()}
    assert found == {3: ("abort", ()), 4: ("stop", (4,)), 5: ("abort", ())}
    assert not asker.busy
    assert told.closed


def test_errors_come_after_what_came_before_them(asker: Asker, told: Told) -> None:
    told.gate(13).set()
    told.gate(3).set()
    ask(asker, 3, 13)
    until(lambda: asker._replies.qsize() == 2)
    assert [key for key, _, _ in asker.take(1.0)] == [3]
    with pytest.raises(EngineLost, match="bad luck"):
        asker.take(1.0)


def test_silence_is_counted_while_something_is_awaited(asker: Asker, told: Told) -> None:
    told.well = False
    time.sleep(0.2)
    assert asker.silent_s == 0
    ask(asker, 3)
    until(lambda: asker.silent_s > 0.2)
    told.well = True
    until(lambda: asker.silent_s == 0)
    told.well = False
    until(lambda: asker.silent_s > 0.2)
    told.gate(3).set()
    taken(asker, 1)
    until(lambda: asker.silent_s == 0)


def test_scores_are_awaited_with_an_eye_on_the_server(
    asker: Asker, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron_rl.rollout.sglang_asker.LOOK_S", 0.02)
    looks = 0

    def look() -> None:
        nonlocal looks
        looks += 1
        if looks == 3:
            told.gate(3).set()
        if looks == 9:
            raise EngineLost("gone")

    assert asker.score((3, 4, 5), look) == (-0.5, -0.5)
    assert looks >= 3
    with pytest.raises(EngineLost, match="gone"):
        asker.score((4, 5), look)
