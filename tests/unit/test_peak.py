"""The most memory in use while something runs."""

import time

from megatron_rl.telemetry.peak import Peak


def test_the_beginning_the_end_and_what_lasts_in_between_are_seen() -> None:
    values = iter([5])
    now = 5
    peak = Peak(lambda: next(values, now), every_s=0.01)
    with peak.watch():
        assert peak.bytes == 5
        now = 9
        time.sleep(0.1)
        now = 2
    assert peak.bytes == 9
    with peak.watch():
        now = 11
    assert peak.bytes == 11
