"""An engine's server through its restarts: found lost, started again, given up; put to sleep and woken."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress

from megatron_rl.errors import UserError
from megatron_rl.rollout.engine import EngineLost
from megatron_rl.rollout.options import RolloutConfig
from megatron_rl.rollout.sglang_asker import Asker
from megatron_rl.rollout.sglang_client import SglangClient
from megatron_rl.rollout.sglang_control import SglangControl, Unreachable
from megatron_rl.rollout.sglang_server import ServerEnded, SglangServer

WEIGHTS, CACHE = ("weights",), ("kv_cache", "cuda_graph")
"""What of a server's memory is taken to be synced, and what only to generate."""

log = logging.getLogger(__name__)


class KeptServer:
    """Only the rank that leads an engine has one. A loss raises nothing where other ranks wait for this one in a
    collective: the server is `lost`, and started again or `gone`."""

    def __init__(
        self, server: SglangServer, config: RolloutConfig, *, engine: int, eos_token_ids: frozenset[int]
    ) -> None:
        """Keep `server`, of engine number `engine`; `start` it."""
        self.server, self.config, self.engine, self.eos = server, config, engine, eos_token_ids
        self.control: SglangControl | None = None
        self.asker: Asker | None = None
        """Asks it, for as long as it lives; there is none before the first request."""

        self.lost = ""
        """Why it is lost, if it is."""

        self.gone = ""
        """Why it is not started again any more."""

        self.losses = 0
        self._starting = False  # and not awaited yet
        self._restarts = 0
        self._has = {*WEIGHTS, *CACHE}  # of its memory
        self._is_new = False  # started again, with all of its memory
        self._generates = True

    def start(self) -> None:
        """Start it and wait until it is healthy. Raises UserError if it can't be started."""
        self.server.start()
        self.control = SglangControl(self.server.url, self.server.admin_key)

    def stop(self) -> None:
        """End it."""
        self._disconnect()
        self.server.stop(at_once=bool(self.lost))

    @property
    def generates(self) -> bool:
        """Whether it would answer a request."""
        return self._generates and not self.lost

    def asking(self) -> Asker:
        """What asks it."""
        if self.asker is None:
            options = self.config.sglang
            client = SglangClient(
                self.server.url,
                self.server.api_key,
                eos_token_ids=self.eos,
                timeout_s=options.request_timeout_s,
                seeded=self.config.deterministic,
            )
            self.asker = Asker(client, max_concurrent=options.max_concurrent_prompts, hung_after_s=options.hung_after_s)
        return self.asker

    def tell(self, act: Callable[[SglangControl], None]) -> None:
        """Have it do something, unless it is lost; if it doesn't answer, it is."""
        if self.lost or self.control is None:
            return
        try:
            act(self.control)
        except Unreachable as error:
            self.lose(str(error))

    def lose(self, reason: str) -> None:
        """Take it for lost because of `reason`, or of what lies behind that."""
        with suppress(EngineLost):
            self.look()
        self._note(reason)

    def look(self) -> None:
        """Raise EngineLost if it has ended or hangs."""
        self._look_at_process()
        if self.asker and self.asker.silent_s >= self.config.sglang.hung_after_s:
            self._note(
                f"engine {self.engine}: its SGLang server gave no sign of life for {self.asker.silent_s:.0f} s "
                f"(rollout.sglang.hung_after_s); see {self.server.log_file}"
            )
        if self.lost:
            raise EngineLost(self.lost)

    def _look_at_process(self) -> None:
        try:
            self.server.check()
        except ServerEnded as error:
            self._note(f"engine {self.engine}: {error}")

    def _note(self, reason: str) -> None:
        if not self.lost:
            self.lost = reason
            self.losses += 1

    def restart(self) -> None:
        """Kill what is left of it, and start it again without waiting; nothing if that is under way.

        Raises:
            UserError: it is gone.
        """
        if not self._starting and not self.gone:
            self._note("it was asked to")
            self._start_again()
        if self.gone:
            raise UserError(self.gone)

    def _start_again(self) -> None:
        """Start it again without waiting, or give it up."""
        reason, limit = self.lost, self.config.engine_restarts
        self._disconnect()
        self.server.stop(at_once=True)
        if self._restarts >= limit:
            self._give_up(
                f"engine {self.engine} was lost and may not be started again (rollout.engine_restarts is {limit}); "
                f"nothing is lost, the last checkpoint stays; why it was lost: {reason}"
            )
            return
        self._restarts += 1
        log.warning("engine %d is started again, %d of %d: %s", self.engine, self._restarts, limit, reason)
        try:
            self.server.launch()
        except UserError as error:
            self._give_up(str(error))
            return
        self.control = SglangControl(self.server.url, self.server.admin_key)
        self._has = {*WEIGHTS, *CACHE}
        self.lost, self._starting, self._is_new, self._generates = "", True, True, False

    def _give_up(self, reason: str) -> None:
        self._note(reason)
        self.gone, self._starting = reason, False
        self._disconnect()
        self.server.stop(at_once=True)

    def _keep_up(self) -> bool:
        """Have a healthy server, started again where the one there was has died; False if it is gone."""
        self._look_at_process()
        if self.lost and not self.gone:
            self._start_again()
        while self._starting:
            try:
                self.server.wait_until_healthy()
                self._starting = False
            except ServerEnded as error:
                self._note(f"engine {self.engine}: {error}")
                self._start_again()
            except UserError as error:
                self._give_up(f"engine {self.engine}: {error}")
        return not self.gone

    def sleep(self) -> None:
        """Have it give all of its memory back, and generate no more. Nothing is under way."""
        if self._has:
            self._see_to(self._release)

    def wake(self) -> None:
        """Have it take memory for its weights."""
        self._see_to(self._take_weights)

    def resume(self) -> None:
        """Have it take the rest of its memory and generate; nothing if it is lost, or new: then it has no weights."""
        if not self._starting:
            self.tell(self._go_on)

    def _see_to(self, act: Callable[[SglangControl], None]) -> None:
        """Have it do something, and if it is lost over that the one that is started in its place, unless it is gone."""
        while self._keep_up():
            self.tell(act)
            if not self.lost:
                return

    def _release(self, control: SglangControl) -> None:
        control.pause(self.config.sglang.hung_after_s)  # nothing is under way
        control.flush()
        control.release([tag for tag in (*CACHE, *WEIGHTS) if tag in self._has])
        self._has.clear()
        self._is_new = self._generates = False

    def _take_weights(self, control: SglangControl) -> None:
        if self._is_new:
            self._release(control)
        self._take(control, WEIGHTS)

    def _go_on(self, control: SglangControl) -> None:
        self._take(control, CACHE)
        if not self._generates:
            control.go_on()
        self._generates = True

    def _take(self, control: SglangControl, tags: tuple[str, ...]) -> None:
        if self._has.isdisjoint(tags):
            control.resume(tags)
        self._has.update(tags)

    def _disconnect(self) -> None:
        if self.asker:
            self.asker.stop()
        if self.control:
            self.control.close()
        self.asker = self.control = None
