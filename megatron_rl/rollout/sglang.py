"""The SGLang engine of a group of ranks: its leader owns a server; all of them bring weights to it."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.config import Config
from megatron_rl.errors import UserError
from megatron_rl.resharding.names import hf_shapes
from megatron_rl.resharding.slices import Slices
from megatron_rl.rollout.engine import Answer, EngineLost, Request, Sampling
from megatron_rl.rollout.groups import EngineGroup
from megatron_rl.rollout.sglang_asker import LOOK_S
from megatron_rl.rollout.sglang_buckets import ALIGNMENT, BUCKET_BYTES, Buckets, buffer, payload
from megatron_rl.rollout.sglang_control import SglangControl, Unreachable
from megatron_rl.rollout.sglang_kept import KeptServer
from megatron_rl.rollout.sglang_server import LOADER, SglangServer, local_gpus
from megatron_rl.training import cpu, setup
from megatron_rl.training.hf_config import ModelSpec
from megatron_rl.training.model import DTYPES

ROOM = 8
"""Positions that SGLang keeps for itself at the end of a model's: it would cut the longest responses short."""

ABORT_EVERY_S, LONGEST_ABORT_S = 0.2, 30.0
"""All that a server has is aborted again and again until every reply has come: a request may have been on its way. One
that lets nothing come for so long is lost."""


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
        self.config, self.spec, self.group = config, spec, group
        self.eos, self.vocabulary = eos_token_ids, vocabulary
        self.directory = config.run_dir / "engines" / str(group.number)
        self._sizes = hf_shapes(replace(spec.shape, vocab=vocabulary))
        of_model = sum(math.prod(size) for size in self._sizes.values()) * DTYPES[config.trainer.dtype].itemsize
        self._buckets = Buckets(cpu.device(), min(BUCKET_BYTES, of_model + ALIGNMENT * len(self._sizes)))
        self._kept: KeptServer | None = None  # the leader's
        self._ranks = ranks
        self._awake, self.version = True, -1
        self._served = False  # whether an update goes to a server; it may be lost meanwhile

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
        per_node = setup.ranks_per_node()
        node = self.group.rank // per_node
        server = SglangServer(
            self.config.rollout.sglang,
            model,
            number=sum(self.group.leader_of(engine) // per_node == node for engine in range(self.group.number)),
            tensor_parallel_size=self.group.size,
            gpus=local_gpus(rank % per_node for rank in self.group.ranks),
            dtype=self.config.trainer.dtype,
            deterministic=self.config.rollout.deterministic,
            log_file=self.directory / "server.log",
        )
        self._kept = KeptServer(server, self.config.rollout, engine=self.group.number, eos_token_ids=self.eos)
        self._kept.start()

    def submit(self, key: int, request: Request, sampling: Sampling) -> None:
        """See `Engine`."""
        kept = self._leading()
        if kept.lost:
            raise EngineLost(kept.lost)
        if not self.health():
            raise RuntimeError("submit: the weights are undefined (asleep, or not updated since waking)")
        kept.asking().ask(key, request, sampling)

    def poll(self, wait_s: float) -> list[Answer]:
        """See `Engine`.

        Raises:
            EngineLost: the server has ended, hangs, can't be reached, or took too long.
            UserError: it refused the key, or its cache is too small.
            RuntimeError: it refused a request.
        """
        kept, deadline = self._leading(), time.monotonic() + wait_s
        while not kept.lost and kept.asker and kept.asker.busy:
            left = deadline - time.monotonic()
            try:
                found = kept.asker.take(min(LOOK_S, max(left, 0)))
            except EngineLost as error:
                kept.lose(str(error))
                break
            except (UserError, RuntimeError):
                kept.look()
                raise
            if found:
                return found
            kept.look()
            if left <= 0:
                break
        if kept.lost:
            raise EngineLost(kept.lost)
        return []

    def abort(self) -> list[Answer]:
        """See `Engine`. Not by a pause: that would hold up, and later let go, what was on its way to the server."""
        ended: list[Answer] = []
        kept, heard = self._leading(), time.monotonic()
        patience = min(self.config.rollout.sglang.hung_after_s, LONGEST_ABORT_S)
        if kept.asker:
            kept.asker.call_off()
        while not kept.lost and kept.asker and kept.asker.busy and kept.control:
            try:
                kept.control.abort(patience)
                found = kept.asker.take(ABORT_EVERY_S)
            except (EngineLost, Unreachable) as error:
                kept.lose(str(error))
                break
            ended += found
            heard = time.monotonic() if found else heard
            if time.monotonic() - heard > patience:
                kept.lose(f"engine {self.group.number}: nothing came for {patience:g} s after an abort")
        if kept.asker and kept.asker.busy:
            ended += kept.asker.give_up()
            kept.asker = None
        return ended

    def score(self, sequences: Sequence[tuple[int, ...]]) -> list[tuple[float, ...]]:
        """See `Engine`. Raises as `poll`."""
        kept = self._leading()
        if not self.health():
            raise RuntimeError("score: the weights are undefined (asleep, or not updated since waking)")
        # One after another: how requests meet in a batch would change their rounding from update to update.
        try:
            return [kept.asking().score(ids, kept.look) for ids in sequences]
        except EngineLost as error:
            kept.lose(str(error))
            raise EngineLost(kept.lost) from error

    def restart(self) -> None:
        """See `Engine`."""
        self._leading().restart()

    def _leading(self) -> KeptServer:
        if self._kept is None:
            raise RuntimeError("only the rank that leads the engine asks it, and starts it again")
        return self._kept

    def update_weights(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """See `Engine`. A collective of the group: each rank hands the whole tensors to the TP rank on its own GPU.

        Where the server is lost, also meanwhile, the tensors go nowhere.

        Raises:
            RuntimeError: a tensor is unknown, came twice or is missing, or SGLang could not load it.
        """
        missing = dict(self._sizes)
        self.begin_update()
        for held, last in self._buckets.fill(self._cut(tensors, missing)):
            if self._served:  # else nobody would read it, and on a GPU an unread bucket is never free again
                self._hand_over(self._buckets.payload(held), "flattened_bucket", version if last else None)
        if missing:
            raise RuntimeError(f"update_weights: {next(iter(missing))} was not sent")
        self._finish(version)

    def begin_update(self) -> None:
        """See `Engine`. A collective of the group, as all that follows up to `end_update`."""
        if not self._awake:
            raise RuntimeError("update_weights: the engine sleeps; wake it first")
        self.version = -1
        self._tell(SglangControl.begin_update)
        self._served = self._is_served()

    def buffer(self, size: int) -> Tensor:
        """See `Engine`."""
        return buffer(cpu.device(), size)

    def load(self, slices: Slices, *, read_back: bool) -> Tensor:
        """See `Engine`. `[0]` also where the server is lost.

        Raises:
            RuntimeError: the engine has no such parameter, or not this place in it.
        """
        tensors = {"moves": slices.moves, "bucket": slices.bucket}
        return self._speak_of(slices.names, tensors, reports=len(slices.moves) if read_back else 0)

    def digests(self, names: Sequence[str]) -> list[int]:
        """See `Engine`. None where the server is lost. Raises as `load`."""
        version = self.version
        self.begin_update()
        found = self._speak_of(names, {}, reports=len(names))
        self._finish(version)
        return found.tolist()

    def end_update(self, version: int) -> None:
        """See `Engine`."""
        self._speak_of((), {}, reports=0, version=version)
        self._finish(version)

    def _speak_of(
        self, names: Sequence[str], tensors: Mapping[str, Tensor], *, reports: int, version: int | None = None
    ) -> Tensor:
        """Give our loader something to do with parameters; its report, `[reports]`, or `[0]`."""
        if not self._served:
            return torch.empty(0, dtype=torch.int64)
        text = torch.tensor(list("\n".join(names).encode()), dtype=torch.uint8)
        report = self.buffer(8 * (1 + reports)).view(torch.int64)
        told = {"parameters": text, **tensors, "report": report}
        self._hand_over(payload([one for one in told.items() if one[1].numel()]), LOADER, version)
        if not self._served:
            return torch.empty(0, dtype=torch.int64)
        status, digests = int(report[0]), report[1:].cpu()
        if status >= 0:
            raise RuntimeError(f"SGLang's model has no parameter {names[status]}, or not that place in it")
        return digests

    def _hand_over(self, payload: str, load_format: str, version: int | None) -> None:
        """Have the server read the payloads of all ranks. Then what they speak of is free again."""
        payloads = self._gathered(payload)
        self._tell(partial(SglangControl.update, payloads=payloads, load_format=load_format, version=version))
        self._served = self._is_served()

    def _finish(self, version: int) -> None:
        self._tell(SglangControl.end_update)
        self._buckets.drop()
        self.version = version

    def sleep(self) -> None:
        """See `Engine`. What is under way is aborted, the cache forgotten, then the memory released."""
        if self._kept:
            self.abort()
            self._kept.sleep()
        self._meet()
        cpu.wait_until_free()
        self._awake, self.version = False, -1

    def wake(self) -> None:
        """See `Engine`."""
        self._meet()  # the trainer's memory is free on the GPUs of all ranks
        if self._kept:
            self._kept.wake()
        self._awake = True

    def resume(self) -> None:
        """See `Engine`."""
        self._meet()
        if self._kept:
            self._kept.resume()

    def health(self) -> bool:
        """See `Engine`."""
        return self.version >= 0 and self._kept is not None and self._kept.generates

    @property
    def losses(self) -> int:
        """See `Engine`."""
        return self._kept.losses if self._kept else 0

    def stop(self) -> None:
        """See `Engine`."""
        kept, self._kept = self._kept, None
        if kept:
            kept.stop()

    def _tell(self, act: Callable[[SglangControl], None]) -> None:
        if self._kept:
            self._kept.tell(act)

    def _is_served(self) -> bool:
        """Whether there is a server that takes weights; all ranks learn it from the leader, and wait for that."""
        told = [self._kept is not None and not self._kept.lost]
        if self._ranks:
            dist.broadcast_object_list(told, src=self.group.ranks[0], group=self._ranks)
        return told[0]

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
