"""The SGLang engine of a group of ranks: its leader owns a server; all of them bring weights to it."""

from __future__ import annotations

import asyncio
import json
import math
import queue
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from megatron_rl.config import Config
from megatron_rl.errors import UserError
from megatron_rl.resharding.names import hf_shapes
from megatron_rl.rollout.engine import Request, Sampling
from megatron_rl.rollout.groups import EngineGroup
from megatron_rl.rollout.sglang_buckets import ALIGNMENT, BUCKET_BYTES, Buckets
from megatron_rl.rollout.sglang_client import SglangClient
from megatron_rl.rollout.sglang_control import SglangControl
from megatron_rl.rollout.sglang_server import SglangServer, local_gpus
from megatron_rl.training import cpu, setup
from megatron_rl.training.hf_config import ModelSpec
from megatron_rl.training.model import DTYPES
from megatron_rl.types import Response

WEIGHTS, CACHE = ("weights",), ("kv_cache", "cuda_graph")
"""What of a server's memory is taken to be synced, and what only to generate."""

ROOM = 8
"""Positions that SGLang keeps for itself at the end of a model's: it would cut the longest responses short."""

LOOK_S = 1.0
"""How often the server is looked after while responses are awaited."""


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
    ) -> None:
        """Describe the engine; `start` starts it.

        Args:
            config: of the run.
            spec: the architecture.
            group: the ranks that share it.
            eos_token_ids: sampling one of them ends a response.
            vocabulary: ids from here on are not in the engine's model: it has that many rows of embedding and output.

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
        self._ranks: dist.ProcessGroup | None = None
        self._has = {*WEIGHTS, *CACHE}  # of its memory
        self._generates, self.version = True, -1

    def start(self) -> None:
        """Start the server, with made-up weights, and wait for it; on all ranks of the run.

        Raises:
            UserError: it can't be started.
        """
        if self.group.size > 1:
            for engine in range(self.group.engines):  # every rank takes part in making every group
                first = self.group.leader_of(engine)
                patience = timedelta(seconds=self.config.collective_timeout_s)
                made = dist.new_group(list(range(first, first + self.group.size)), timeout=patience, backend="gloo")
                self._ranks = made if engine == self.group.number else self._ranks
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

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[tuple[int, int, Response]]:
        """See `Engine`.

        Raises:
            UserError: the server has ended.
            RuntimeError: it refused a request, or took too long.
        """
        if not self.health():
            raise RuntimeError("generate: the weights are undefined (asleep, or not updated since waking)")
        asked = [(number, 0, request) for number, request in enumerate(requests)]
        if self.config.rollout.deterministic:  # a seed is a request's, not a sample's
            asked = [
                (number, sample, replace(request, seeds=(seed,)))
                for number, request in enumerate(requests)
                for sample, seed in enumerate(request.seeds)
            ]

        async def answer(client: SglangClient, one: tuple[int, int, Request]) -> Any:
            number, first, request = one
            responses = await client.generate(request, sampling)
            return [(number, first + sample, response) for sample, response in enumerate(responses)]

        for responses in self._replies(asked, answer):
            yield from responses

    def score(self, sequences: Sequence[tuple[int, ...]]) -> list[tuple[float, ...]]:
        """See `Engine`."""

        async def answer(client: SglangClient, ids: tuple[int, ...]) -> Any:
            return await client.score(ids)

        # One after another: how requests meet in a batch would change their rounding from update to update.
        return [scores for ids in sequences for scores in self._replies([ids], answer)]

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
        if self._control and self._has:
            self._control.pause()
            self._control.flush()
            self._control.release([tag for tag in (*CACHE, *WEIGHTS) if tag in self._has])
        self._meet()
        cpu.wait_until_free()
        self._has.clear()
        self._generates, self.version = False, -1

    def wake(self) -> None:
        """See `Engine`."""
        self._take(WEIGHTS)

    def resume(self) -> None:
        """See `Engine`."""
        self._take(CACHE)
        if self._control and not self._generates:
            self._control.go_on()
        self._generates = True

    def health(self) -> bool:
        """See `Engine`."""
        return self._generates and self.version >= 0

    def stop(self) -> None:
        """See `Engine`."""
        if self._control:
            self._control.close()
        if self._server:
            self._server.stop()
        self._control = self._server = None

    def _take(self, tags: tuple[str, ...]) -> None:
        self._meet()  # the trainer's memory is free on the GPUs of all ranks
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

    def _replies(self, asked: Sequence[Any], answer: Any) -> Iterator[Any]:
        """What `answer(client, one)` gives for each of `asked`, as it comes, while a thread of its own asks."""
        server = self._server
        if server is None:
            raise RuntimeError("only the rank that leads the engine asks it")
        replies: queue.SimpleQueue[Any] = queue.SimpleQueue()
        closed = threading.Event()

        def ask() -> None:
            try:
                asyncio.run(self._ask(server, asked, answer, replies, closed))
            except BaseException as error:  # whatever it is, who waits must hear of it
                replies.put(error)

        asker = threading.Thread(target=ask, name="sglang", daemon=True)
        asker.start()
        try:
            for _ in asked:
                while True:
                    try:
                        reply = replies.get(timeout=LOOK_S)
                        break
                    except queue.Empty:
                        server.check()
                if isinstance(reply, BaseException):
                    server.check()  # the reason, if it has ended
                    raise reply
                yield reply
        finally:
            closed.set()
            asker.join()

    async def _ask(
        self, server: SglangServer, asked: Sequence[Any], answer: Any, replies: Any, closed: threading.Event
    ) -> None:
        options = self.config.rollout.sglang
        async with SglangClient(
            server.url,
            server.api_key,
            eos_token_ids=self.eos,
            max_concurrent=options.max_concurrent_prompts,
            timeout_s=options.request_timeout_s,
            seeded=self.config.rollout.deterministic,
        ) as client:

            async def one(what: Any) -> None:
                try:
                    replies.put(await answer(client, what))
                except Exception as error:
                    replies.put(error)

            tasks = {asyncio.create_task(one(what)) for what in asked}
            while tasks and not closed.is_set():
                _, tasks = await asyncio.wait(tasks, timeout=0.2)
            for task in tasks:
                task.cancel()


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
