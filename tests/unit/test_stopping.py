"""A signal is a wish, the same one soon after is no second one, and who insists gets out."""

import signal
import time
from collections.abc import Iterator

import pytest

from megatron_rl import stopping
from megatron_rl.stopping import StopWish

SIGNALS = (signal.SIGTERM, signal.SIGINT)


@pytest.fixture
def others() -> Iterator[list[int]]:
    """The signals that come to the handlers that were there before."""
    seen: list[int] = []
    before = {number: signal.signal(number, lambda got, frame: seen.append(got)) for number in SIGNALS}
    yield seen
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_is_a_wish_and_ends_nothing(number: signal.Signals, others: list[int]) -> None:
    with StopWish() as wish:
        assert not wish.asked
        signal.raise_signal(number)
        assert wish.asked
    assert others == []


def test_signals_within_moments_are_one_wish(others: list[int]) -> None:
    with StopWish() as wish:
        for number in (*SIGNALS, *SIGNALS):
            signal.raise_signal(number)
        assert wish.asked
    assert others == []


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("first", SIGNALS)
def test_who_asks_again_later_gets_what_the_signal_did_before(
    first: signal.Signals, number: signal.Signals, others: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stopping, "INSIST_S", 0.0)
    with StopWish() as wish:
        signal.raise_signal(first)
        time.sleep(0.01)
        assert (wish.asked, others) == (True, [])
        signal.raise_signal(number)
        assert others == [number]


def test_afterwards_the_handlers_are_those_of_before(others: list[int]) -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    with StopWish():
        assert not set(before) & {signal.getsignal(number) for number in SIGNALS}
    assert [signal.getsignal(number) for number in SIGNALS] == before
    signal.raise_signal(signal.SIGTERM)
    assert others == [signal.SIGTERM]
