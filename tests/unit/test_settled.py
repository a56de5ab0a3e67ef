"""Waiting until memory that others give back is there."""

import logging
import time
from itertools import chain, repeat

import pytest

from megatron_rl.training.cpu import wait_until_settled


def test_it_waits_over_a_pause_until_nothing_falls_any_more() -> None:
    values = chain([9, 9, 9, 7, 7, 4], repeat(4))
    seen: list[int] = []

    def read() -> int:
        seen.append(next(values))
        return seen[-1]

    wait_until_settled(read, quiet_s=0.1)
    assert seen[5] == 4
    assert len(seen) > 10  # and for a while after


def test_what_rises_is_no_reason_to_wait() -> None:
    begun, values = time.monotonic(), iter(range(10**6))
    wait_until_settled(lambda: next(values), quiet_s=0.05)
    assert time.monotonic() - begun < 1


def test_what_falls_for_ever_is_told(caplog: pytest.LogCaptureFixture) -> None:
    values = iter(range(10**6, 0, -1))
    with caplog.at_level(logging.WARNING):
        wait_until_settled(lambda: next(values), quiet_s=0.05, timeout_s=0.2)
    assert "still falls after 0.2 s" in caplog.text
