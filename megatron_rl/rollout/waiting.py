"""How ranks wait while engines generate: on the store, with a heartbeat, and no collective pending.

A collective would run into its timeout, and with NCCL keep a kernel spinning on every GPU that an engine wants. A
leader's beat shows that its process lives, not that responses come: an engine may take minutes to its first, and the
engine's client has deadlines of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from torch.distributed import Store

from megatron_rl.background import repeated
from megatron_rl.errors import UserError
from megatron_rl.rollout.groups import EngineGroup

LONGEST_BETWEEN_BEATS_S = 5.0
LONGEST_BETWEEN_POLLS_S = 0.5
SHARE_LOST_BETWEEN_POLLS = 0.02
"""Of the time that was waited: short samplings of small models end at once, long ones don't load the store."""


def pause_s(waited_s: float) -> float:
    """How long to wait before one looks again, after so long a wait."""
    return min(LONGEST_BETWEEN_POLLS_S, 0.001 + SHARE_LOST_BETWEEN_POLLS * waited_s)


class EngineWait:
    """Waits of one rank, one for each sampling. All ranks take part in each, in the same order."""

    def __init__(self, store: Store, group: EngineGroup, *, timeout_s: float) -> None:
        """Wait on `store`.

        Args:
            store: all ranks'.
            group: of this rank.
            timeout_s: a leader without a beat for so long is taken for hung.
        """
        self.store, self.group, self.timeout_s = store, group, timeout_s
        self.beat_s = min(LONGEST_BETWEEN_BEATS_S, timeout_s / 4)
        self._number = 0

    @property
    def number(self) -> int:
        """How many waits there were, this one included; the same on every rank."""
        return self._number

    @contextmanager
    def until_all_are_done(self) -> Iterator[Callable[[], None]]:
        """Leaders generate inside; leaving it waits for all of them.

        Between two of these all ranks must meet in a collective: then nobody looks at the first one's keys any more.

        Yields:
            What a leader that waits for others calls now and then; it raises as below.

        Raises:
            UserError: a leader gave no sign of life for `timeout_s`; names rank and engine.
        """
        leads, engine = self.group.leads, self.group.number
        if leads and self._number:
            for key in (self._beat(engine), self._done(engine)):  # or the store would grow
                self.store.delete_key(key)
        self._number += 1
        look = self._looker()
        if leads:
            with repeated(self._give_sign, every_s=self.beat_s, name="heartbeat"):
                yield look
            self.store.set(self._done(engine), "")  # not where an exception came: it ends the process
        else:
            yield look
        begun = time.monotonic()
        done = [self._done(engine) for engine in range(self.group.engines)]
        while not self.store.check(done):
            look()
            time.sleep(pause_s(time.monotonic() - begun))

    def _looker(self) -> Callable[[], None]:
        """A function that raises when a leader has hung; it asks the store no more often than beats come."""
        looked = time.monotonic()
        beats: dict[int, int] = {}
        changed = dict.fromkeys(range(self.group.engines), looked)

        def look() -> None:
            nonlocal looked
            now = time.monotonic()
            if now - looked < self.beat_s:
                return
            looked = now
            for engine in changed:
                if (beat := self.store.add(self._beat(engine), 0)) != beats.get(engine):
                    beats[engine], changed[engine] = beat, now
                elif now - changed[engine] >= self.timeout_s and not self.store.check([self._done(engine)]):
                    raise UserError(
                        f"rollout.heartbeat_timeout_s: rank {self.group.leader_of(engine)}, which leads engine "
                        f"{engine}, has given no sign of life for {now - changed[engine]:.0f} s; see its log"
                    )

        return look

    def _give_sign(self) -> None:
        with suppress(RuntimeError):  # the process that holds the store has ended: so will this one
            self.store.add(self._beat(self.group.number), 1)

    def _beat(self, engine: int) -> str:
        return f"rollout/{self._number}/beat/{engine}"

    def _done(self, engine: int) -> str:
        return f"rollout/{self._number}/done/{engine}"
