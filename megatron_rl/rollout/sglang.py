"""The SGLang engine of a group of ranks: its leader owns a server; all of them bring weights to it."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist
from torch import Tensor

from megatron_rl.config import Config
from megatron_rl.errors import UserError
from megatron_rl.resharding.names import hf_shapes
from megatron_rl.rollout.engine import Answer, EngineLost, Request, Sampling
from megatron_rl.rollout.groups import EngineGroup
from megatron_rl.rollout.sglang_asker import LOOK_S, Asker
from megatron_rl.rollout.sglang_buckets import ALIGNMENT, BUCKET_BYTES, Buckets
from megatron_rl.rollout.sglang_client import SglangClient
from megatron_rl.rollout.sglang_control import SglangControl, Unreachable
from megatron_rl.rollout.sglang_server import ServerEnded, SglangServer, local_gpus
from megatron_rl.training import cpu, setup
from megatron_rl.training.hf_config import ModelSpec
from megatron_rl.training.model import DTYPES

WEIGHTS, CACHE = ("weights",), ("kv_cache", "cuda_graph")
"""What of a server's memory is taken to be synced, and what only to generate."""

ROOM = 8
"""Positions that SGLang keeps for itself at the end of a model's: it would cut the longest responses short."""

ABORT_EVERY_S, LONGEST_ABORT_S = 0.2, 30.0
"""All that a server has is aborted again and again until every reply has come: a request may have been on its way. One
that lets nothing come for so long is lost."""

log = logging.getLogger(__name__)


class SglangEngine:
    """See `Engine`. All ranks of the group make the same calls; only the leader talks to the server."""

    def __init__(
        self,
        config: Config,
        spec: ModelSpec,
        group: EngineGroup,
        *,
        eos_token_ids: frozenset[int],
        vocabulary: int,
        ranks: dist.ProcessGroup | None = None,
    ) -> None:
        """Describe the engine; `start` starts it.

        Args:
            config: of the run.
            spec: the architecture.
            group: the ranks that share it.
            eos_token_ids: sampling one of them ends a response.
            vocabulary: ids from here on are not in the engine's model: it has that many rows of embedding and output.
            ranks: their process group (gloo), when there are several.

        Raises:
            UserError: seeds are to count, on a CPU.
        """
        if config.rollout.deterministic and not cpu.has_cuda():
            raise UserError(
                "rollout.deterministic: SGLang on a CPU has no deterministic attention; set it to false, or "
                "rollout.engine to embedded"
            )
        self.config, self.group, self.eos, self.vocabulary = config, group, eos_token_ids, vocabulary
        self.directory = config.run_dir / "engines" / str(group.number)
        self._sizes = hf_shapes(replace(spec.shape, vocab=vocabulary))
        of_model = sum(math.prod(size) for size in self._sizes.values()) * DTYPES[config.trainer.dtype].itemsize
        self._buckets = Buckets(cpu.device(), min(BUCKET_BYTES, of_model + ALIGNMENT * len(self._sizes)))
        self._server: SglangServer | None = None
        self._control: SglangControl | None = None
        self._asker: Asker | None = None
        self._ranks = ranks
        self._has = {*WEIGHTS, *CACHE}  # of its memory
        self._generates, self.version = True, -1
        self._lost = ""  # why
        self._starting, self._restarts = False, 0

    def start(self) -> None:
        """Start the server, with made-up weights, and wait for it; on all ranks of the group.

        Raises:
            UserError: it can't be started.
        """
        if self.group.leads:
            self._start_server()
        self._meet()

    def _start_server(self) -> None:
        model = self.directory / "model"
        write_engine_model(model, self.config.model.path, self.vocabulary, self.eos)
        local = self.group.rank % setup.ranks_per_node()
        self._server = SglangServer(
            self.config.rollout.sglang,
            model,
            number=local // self.group.size,
            tensor_parallel_size=self.group.size,
            gpus=local_gpus(local, self.group.size),
            dtype=self.config.trainer.dtype,
            deterministic=self.config.rollout.deterministic,
            log_file=self.directory / "server.log",
        )
        self._server.start()
        self._control = SglangControl(self._server.url, self._server.admin_key)

    def submit(self, key: int, request: Request, sampling: Sampling) -> None:
        """See `Engine`."""
        if self._lost:
            raise EngineLost(self._lost)
        if not self.health():
            raise RuntimeError("submit: the weights are undefined (asleep, or not updated since waking)")
        self._asking().ask(key, request, sampling)

    def poll(self, wait_s: float) -> list[Answer]:
        """See `Engine`.

        Raises:
            EngineLost: the server has ended, hangs, can't be reached, or took too long.
            UserError: it refused the key, or its cache is too small.
            RuntimeError: it refused a request.
        """
        deadline = time.monotonic() + wait_s
        while not self._lost and self._asker and self._asker.busy:
            left = deadline - time.monotonic()
            try:
                found = self._asker.take(min(LOOK_S, max(left, 0)))
            except EngineLost as error:
                self._lose(error)
                break
            except (UserError, RuntimeError):
                self._look()
                raise
            if found:
                return found
            self._look()
            if left <= 0:
                break
        if self._lost:
            raise EngineLost(self._lost)
        return []

    def abort(self) -> list[Answer]:
        """See `Engine`. Not by a pause: that would hold up, and later let go, what was on its way to the server."""
        ended: list[Answer] = []
        patience = min(self.config.rollout.sglang.hung_after_s, LONGEST_ABORT_S)
        heard = time.monotonic()
        if self._asker:
            self._asker.call_off()
        while not self._lost and self._asker and self._asker.busy and self._control:
            try:
                self._control.abort(patience)
                found = self._asker.take(ABORT_EVERY_S)
            except (EngineLost, Unreachable) as error:
                self._lose(error)
                break
            ended += found
            heard = time.monotonic() if found else heard
            if time.monotonic() - heard > patience:
                self._lost = f"engine {self.group.number}: nothing came for {patience:g} s after an abort"
        if self._asker and self._asker.busy:
            ended += self._asker.give_up()
            self._asker = None
        return ended

    def score(self, sequences: Sequence[tuple[int, ...]]) -> list[tuple[float, ...]]:
        """See `Engine`. Raises as `poll`."""
        if not self.health():
            raise RuntimeError("score: the weights are undefined (asleep, or not updated since waking)")
        # One after another: how requests meet in a batch would change their rounding from update to update.
        try:
            return [self._asking().score(ids, self._look) for ids in sequences]
        except EngineLost as error:
            self._lose(error)
            raise EngineLost(self._lost) from error

    def _asking(self) -> Asker:
        """What asks the server, for as long as that lives."""
        if self._server is None:
            raise RuntimeError("only the rank that leads the engine asks it")
        if self._asker is None:
            options = self.config.rollout.sglang
            client = SglangClient(
                self._server.url,
                self._server.api_key,
                eos_token_ids=self.eos,
                timeout_s=options.request_timeout_s,
                seeded=self.config.rollout.deterministic,
            )
            self._asker = Asker(
                client, max_concurrent=options.max_concurrent_prompts, hung_after_s=options.hung_after_s
            )
        return self._asker

    def _lose(self, error: Exception) -> None:
        """Take it for lost because of `error`, or of what lies behind that."""
        with suppress(EngineLost):
            self._look()
        self._lost = self._lost or str(error)

    def _look(self) -> None:
        """Raise EngineLost if the server has ended or hangs."""
        assert self._server
        assert self._asker
        try:
            self._server.check()
        except ServerEnded as error:
            self._lost = f"engine {self.group.number}: {error}"
        if not self._lost and self._asker.silent_s >= self.config.rollout.sglang.hung_after_s:
            self._lost = (
                f"engine {self.group.number}: its SGLang server gave no sign of life for {self._asker.silent_s:.0f} s "
                f"(rollout.sglang.hung_after_s); see {self._server.log_file}"
            )
        if self._lost:
            raise EngineLost(self._lost)

    def restart(self) -> None:
        """See `Engine`."""
        self._start_again(self._lost or "it was asked to")

    def _start_again(self, reason: str) -> None:
        """Kill what is left of the server, and start it again without waiting."""
        server, limit = self._server, self.config.rollout.engine_restarts
        if server is None:
            raise RuntimeError("only the rank that leads the engine starts it again")
        if self._restarts >= limit:
            raise UserError(
                f"engine {self.group.number} was lost and may not be started again (rollout.engine_restarts is "
                f"{limit}); nothing is lost, the last checkpoint stays; why it was lost: {reason}"
            )
        self._restarts += 1
        log.warning("engine %d is started again, %d of %d: %s", self.group.number, self._restarts, limit, reason)
        self._disconnect()
        server.stop(at_once=True)
        server.launch()
        self._control = SglangControl(server.url, server.admin_key)
        self._has = {*WEIGHTS, *CACHE}
        self._lost, self._starting, self._generates, self.version = "", True, False, -1

    def _keep_up(self) -> bool:
        """Have a healthy server, started again where the one there was has died; whether it is a new one."""
        assert self._server
        try:
            self._server.check()
        except ServerEnded as error:
            self._lost = self._lost or str(error)
        if self._lost:
            self._start_again(self._lost)
        is_new = self._starting
        while self._starting:
            try:
                self._server.wait_until_healthy()
                self._starting = False
            except ServerEnded as error:
                self._start_again(str(error))
        return is_new

    def update_weights(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """See `Engine`. A collective of the group: each rank hands the whole tensors to the TP rank on its own GPU.

        Raises:
            RuntimeError: a tensor is unknown, came twice or is missing, or SGLang could not load it.
        """
        if self._has.isdisjoint(WEIGHTS):
            raise RuntimeError("update_weights: the engine sleeps; wake it first")
        self.version = -1
        missing = dict(self._sizes)
        if self._control:
            self._control.begin_update()
        for held, last in self._buckets.fill(self._cut(tensors, missing)):
            payloads = self._gathered(self._buckets.payload(held))
            if self._control:
                self._control.update(payloads, version=version if last else None)
            self._meet()  # in shared memory the buffer is free again
        if missing:
            raise RuntimeError(f"update_weights: {next(iter(missing))} was not sent")
        if self._control:
            self._control.end_update()
        self._buckets.drop()
        self.version = version

    def sleep(self) -> None:
        """See `Engine`. What is under way is aborted, the cache forgotten, then the memory released."""
        if self._server and self._has:
            self.abort()
            self._keep_up()
            try:
                self._release()
            except Unreachable as error:  # it hung, and nobody had noticed
                self._lost = str(error)
                self._keep_up()
                self._release()
        self._meet()
        cpu.wait_until_free()
        self._has.clear()
        self._generates, self.version = False, -1

    def wake(self) -> None:
        """See `Engine`."""
        self._meet()  # the trainer's memory is free on the GPUs of all ranks
        self._sleep_if_new()
        try:
            self._take(WEIGHTS)
        except Unreachable as error:  # it is dying at this moment
            self._lost = str(error)
            self._sleep_if_new()
            self._take(WEIGHTS)

    def _sleep_if_new(self) -> None:
        """Have a healthy server; a new one has all of its memory."""
        if self._server and self._keep_up():
            self._release()
            self._has.clear()

    def resume(self) -> None:
        """See `Engine`."""
        self._meet()
        if self._starting:  # it has no weights, and answers nobody yet
            return
        self._take(CACHE)
        if self._control and not self._generates:
            self._control.go_on()
        self._generates = True

    def health(self) -> bool:
        """See `Engine`."""
        return self._generates and self.version >= 0 and not self._lost

    def stop(self) -> None:
        """See `Engine`."""
        self._disconnect()
        if self._server:
            self._server.stop(at_once=bool(self._lost))
        self._server = None

    def _disconnect(self) -> None:
        if self._asker:
            self._asker.stop()
        if self._control:
            self._control.close()
        self._asker = self._control = None

    def _release(self) -> None:
        """Have the server give its memory back, and generate no more."""
        assert self._control
        self._control.pause(within_s=self.config.rollout.sglang.hung_after_s)  # nothing is under way
        self._control.flush()
        self._control.release([tag for tag in (*CACHE, *WEIGHTS) if tag in self._has])

    def _take(self, tags: tuple[str, ...]) -> None:
        if self._control and self._has.isdisjoint(tags):
            self._control.resume(tags)
        self._has.update(tags)

    def _cut(
        self, tensors: Iterable[tuple[str, Tensor]], missing: dict[str, tuple[int, ...]]
    ) -> Iterator[tuple[str, Tensor]]:
        """The tensors as the engine has them: without the rows of ids that are never sampled."""
        for name, tensor in tensors:
            if name not in missing:
                raise RuntimeError(f"update_weights: the engine has no parameter {name}, or got it twice")
            size = missing.pop(name)
            if tensor.shape[1:] != size[1:] or len(tensor) < size[0]:
                raise RuntimeError(f"update_weights: {name} is {tuple(tensor.shape)}, not {size}")
            yield name, tensor[: size[0]]

    def _meet(self) -> None:
        """Wait for the other ranks of the group."""
        if self._ranks:
            dist.barrier(self._ranks)

    def _gathered(self, payload: str) -> list[str]:
        """The payloads of all ranks of the group, on the leader."""
        if self._ranks is None:
            return [payload]
        payloads: list[str] | None = [""] * self.group.size if self.group.leads else None
        dist.gather_object(payload, payloads, dst=self.group.ranks[0], group=self._ranks)
        return payloads or []


def write_engine_model(directory: Path, source: Path, vocabulary: int, eos: frozenset[int]) -> None:
    """Write the config.json of the engine's model: the trained one's, with only the ids that may be sampled.

    So they are outside the engine's softmax as they are outside the trainer's, and no request can ask for them.
    """
    directory.mkdir(parents=True, exist_ok=True)
    fields = json.loads((source / "config.json").read_text())
    fields |= {"vocab_size": vocabulary, "eos_token_id": sorted(eos)}
    if "max_position_embeddings" in fields:
        fields["max_position_embeddings"] += ROOM
    (directory / "config.json").write_text(json.dumps(fields, indent=2))
