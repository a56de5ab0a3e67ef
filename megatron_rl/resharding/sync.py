"""The trainer's weights to the engines: the one call that the loop knows."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from itertools import product

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from megatron_rl.config import Config
from megatron_rl.errors import UserError
from megatron_rl.resharding.gather import gather_hf
from megatron_rl.resharding.layout import Layout
from megatron_rl.resharding.names import Shape, hf_shapes, parameters
from megatron_rl.resharding.pieces import Side, parts
from megatron_rl.resharding.plan import plan
from megatron_rl.resharding.shards import named_shards
from megatron_rl.resharding.sides import trainer_layout
from megatron_rl.resharding.transport import Transport
from megatron_rl.rollout.engine import Engine
from megatron_rl.rollout.groups import EngineGroup
from megatron_rl.training import cpu, setup
from megatron_rl.training.model import DTYPES


class WeightSync:
    """Brings the trainer's weights into all engines, as `reshard` in the config says."""

    def __init__(
        self, config: Config, shape: Shape, vocabulary: int, groups: setup.Groups, engine: Engine, group: EngineGroup
    ) -> None:
        """Plan it.

        Args:
            config: of the run.
            shape: of the model.
            vocabulary: ids that an SGLang engine has; the embedded one has all.
            groups: of the run's processes.
            engine: this rank's, awake when weights are pushed.
            group: the ranks that share it.
        """
        self.config, self.shape, self.groups, self.engine, self.group = config, shape, groups, engine, group
        self.dtype = DTYPES[config.trainer.dtype]
        side: Side = "sglang" if config.rollout.engine == "sglang" else "hf"
        self.target = Layout(
            side=side,
            shape=replace(shape, vocab=vocabulary) if side == "sglang" else shape,
            tensor=group.size,
            data=group.engines,
            gpus=tuple(group.all_ranks()),
        )
        self.bucket_bytes = config.reshard.bucket_mb * 2**20
        self._transport: Transport | None = None
        self._compared = False

    def push(self, chunks: Collection[GPTModel], version: int) -> None:
        """Bring the current weights to all engines. A collective of all ranks.

        Args:
            chunks: of the model, that this rank holds; none if it only samples.
            version: optimizer steps behind the weights.

        Raises:
            UserError: an engine has not loaded what was sent, or has other weights than by a gather; by name.
        """
        options = self.config.reshard
        if options.method == "gather":
            self._gather(chunks, version)
            return
        first = options.verify != "never" and not self._compared
        self._carry(chunks, version, verify=first or options.verify == "always")
        if first:
            compared = torch.tensor(int(self.compare(chunks, version)), device=cpu.device())
            dist.all_reduce(
                compared, dist.ReduceOp.MIN, group=self.groups.everyone
            )  # the next update is no one's alone
            self._compared = bool(compared)

    def _carry(self, chunks: Collection[GPTModel], version: int, *, verify: bool) -> None:
        transport = self._carrier()
        transport.verify = verify
        self.engine.begin_update()
        loaded = self._load(chunks, transport)
        self.engine.end_update(version)
        if verify:
            transport.check(loaded)

    def _load(self, chunks: Collection[GPTModel], transport: Transport) -> dict[int, int]:
        """Carry all buckets; by number of a move the digest of what the engine has of it, if they are wanted."""
        held = {(shard.entry.megatron, shard.layer): shard.parameter.data for shard in named_shards(chunks, self.shape)}
        loaded = dict[int, int]()
        for slices in transport.run(lambda name, layer: held[name, layer]):
            digests = self.engine.load(slices, read_back=transport.verify).tolist()
            loaded |= zip(slices.numbers, digests, strict=False)  # none of an engine that is lost
        return loaded

    def _carrier(self) -> Transport:
        if self._transport is None:
            options = self.config.reshard
            planned = plan(
                trainer_layout(self.config, self.shape, setup.trainers(self.config)),
                self.target,
                itemsize=self.dtype.itemsize,
                gpus_per_node=setup.ranks_per_node(),
                across=options.across_nodes,
                bucket_bytes=self.bucket_bytes,
            )
            self._transport = Transport(
                planned,
                self.groups.everyone,
                dtype=self.dtype,
                device=cpu.device(),
                allocate=self.engine.buffer,
                verify=False,
            )
        return self._transport

    def compare(self, chunks: Collection[GPTModel], version: int) -> bool:
        """Do the same update once more, by a gather, and by the engine's own reading of HF names. A collective.

        Returns:
            Whether all engines were compared; one that is lost meanwhile is not. The same on every rank.

        Raises:
            UserError: a parameter differs, by name; on every rank.
        """
        names = list(dict.fromkeys(self._names()))
        planned = self.engine.digests(names)
        self._gather(chunks, version)
        golden = self.engine.digests(names)
        wrong = next((name for name, *both in zip(names, planned, golden, strict=False) if both[0] != both[1]), None)
        mine = wrong, len(names) == len(planned) == len(golden)
        found = [mine] * dist.get_world_size(self.groups.everyone)
        dist.all_gather_object(found, mine, group=self.groups.everyone)
        for rank, (name, _) in enumerate(found):
            if name is not None:
                raise UserError(
                    f"reshard: {name} on rank {rank} has other values by the plan than by a gather: the table of names "
                    "is wrong for it; set reshard.method to gather"
                )
        return all(complete for _, complete in found)

    def _names(self) -> Iterator[str]:
        """Of the parameters of this rank's engine."""
        for (entry, layer), rank in product(parameters(self.target.shape), range(self.target.tensor)):
            if self.group.rank in self.target.holders((0,), rank):
                for part in parts(self.target.side, entry, self.target.shape, rank, self.target.tensor):
                    yield part.name.format(layer=layer)

    def _gather(self, chunks: Collection[GPTModel], version: int) -> None:
        separate = self.config.rollout.placement == "separate"
        if not separate:
            self.engine.update_weights(gather_hf(chunks, self.shape), version)
        elif chunks:
            for _, tensor in gather_hf(chunks, self.shape):
                if self.groups.weights is not None:
                    dist.broadcast(tensor, src=0, group=self.groups.weights)
        else:
            self.engine.update_weights(self._received(), version)

    def _received(self) -> Iterator[tuple[str, Tensor]]:
        """Whole tensors from rank 0, one after another."""
        for name, size in hf_shapes(self.shape).items():
            tensor = torch.empty(size, dtype=self.dtype, device=cpu.device())
            dist.broadcast(tensor, src=0, group=self.groups.weights)
            yield name, tensor
