"""Plan and transport beside a full gather: `torchrun --nproc-per-node 4 -m tests.benchmarks.bench_reshard`.

A model of 500 MB in float32 goes from four Megatron ranks, TP 2 × PP 2, into two engines of TP 2, several times each
way in turns. Engines are SGLang's parameters without a server. Bytes are as the kernel counts them on the loopback.
"""

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import psutil
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM

from megatron_rl.resharding.engine_side.megatron_rl_loader import apply, digest
from megatron_rl.resharding.names import Shape, parameters
from megatron_rl.resharding.pieces import Part, parts
from megatron_rl.resharding.sides import engine_group
from megatron_rl.resharding.slices import Slices
from megatron_rl.resharding.sync import WeightSync
from megatron_rl.rollout.engine import Engine
from megatron_rl.rollout.groups import EngineGroup
from megatron_rl.training import setup
from megatron_rl.training.hf_config import read_model_spec
from megatron_rl.training.trainer import Trainer
from tests.tiny import hf_config, run_config

SHAPE = Shape(
    layers=8, hidden=1024, heads=16, kv_heads=4, head_dim=64, intermediate=2816, vocab=32_000, tied=False
)  # fmt: skip
TIMES = 5


@dataclass
class Parameters:
    """The parameters of one TP rank of an engine, and the part of `Engine` that brings weights into them."""

    group: EngineGroup
    shape: Shape
    of: dict[str, Tensor] = field(default_factory=dict)
    _parts: list[Part] = field(default_factory=list)

    def __post_init__(self) -> None:
        rank = self.group.ranks.index(self.group.rank)
        for entry, layer in parameters(self.shape):
            for part in parts("sglang", entry, self.shape, rank, self.group.size):
                pieces = tuple(replace(piece, hf=piece.hf.format(layer=layer)) for piece in part.pieces)
                self._parts.append(replace(part, name=part.name.format(layer=layer), pieces=pieces))
        self.of = {part.name: torch.full(part.size, torch.nan) for part in self._parts}

    def begin_update(self) -> None:
        """Nothing."""

    def buffer(self, size: int) -> Tensor:
        """Plain memory: these engines are in the process."""
        return torch.empty(size, dtype=torch.uint8)

    def load(self, slices: Slices, *, read_back: bool) -> Tensor:
        """As our loader does in a server."""
        return apply([self.of[name] for name in slices.names], slices.moves, slices.bucket, read_back=read_back)

    def digests(self, names: Iterable[str]) -> list[int]:
        """Of whole parameters."""
        return [int(digest(self.of[name])) for name in names]

    def end_update(self, version: int) -> None:
        """Nothing."""

    def update_weights(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """As SGLang does: of each whole tensor the engine copies its slices."""
        wanted: dict[str, list[tuple[Tensor, Any]]] = {}
        for part in self._parts:
            for piece in part.pieces:
                wanted.setdefault(piece.hf, []).append((self.of[part.name][piece.shard_rows], piece.index))
            self.of[part.name][max(piece.shard_rows.stop for piece in part.pieces) :] = 0
        for name, tensor in tensors:
            for target, index in wanted[name]:
                target.copy_(tensor[index])


def lo_bytes() -> int:
    """What went over the loopback since the machine started."""
    return psutil.net_io_counters(pernic=True)["lo"].bytes_sent


def measured(act: Callable[[], None]) -> tuple[float, float]:
    """Seconds until all ranks are done, and MB on the wire."""
    dist.barrier()
    sent, begun = lo_bytes(), time.perf_counter()
    act()
    dist.barrier()
    return time.perf_counter() - begun, (lo_bytes() - sent) / 1e6


def main() -> None:
    """Print a Markdown table."""
    directory = [tempfile.mkdtemp()]
    sections: dict[str, Any] = {
        "trainer": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "dtype": "float32"},
        "rollout": {"engine": "sglang", "tensor_parallel_size": 2},
    }
    config = run_config(**sections)
    group = engine_group(config, SHAPE)
    groups = setup.start(config, group)
    dist.broadcast_object_list(directory, src=0)
    model = Path(directory[0])
    if dist.get_rank() == 0:
        AutoModelForCausalLM.from_config(hf_config(SHAPE)).save_pretrained(model)
    dist.barrier()
    config = run_config(**sections, model={"path": model})
    trainer = Trainer(config, read_model_spec(model), SHAPE.vocab)
    engine = Parameters(group, SHAPE)

    def sync(method: str, verify: str = "never") -> WeightSync:
        options = run_config(**sections, model={"path": model}, reshard={"method": method, "verify": verify})
        return WeightSync(options, SHAPE, SHAPE.vocab, groups, cast(Engine, engine), group)

    ways = {"full gather": sync("gather"), "plan": sync("plan"), "plan, `verify: always`": sync("plan", "always")}
    for way in ways.values():
        way.push(trainer.model, 0)  # the plan is made, and what all hold is compared
    ways["plan"].compare(trainer.model, 0)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for update in range(TIMES):
        for name, way in ways.items():
            found[name].append(measured(lambda way=way, update=update: way.push(trainer.model, update)))  # type: ignore[misc]
    if dist.get_rank() == 0:
        show(found)
    setup.stop(groups)


def show(found: dict[str, list[tuple[float, float]]]) -> None:
    """The medians."""
    seconds = {name: statistics.median(one for one, _ in runs) for name, runs in found.items()}
    size = {name: statistics.median(one for _, one in runs) for name, runs in found.items()}
    print("| | seconds | of a gather | MB on the wire, all ranks | of a gather |\n|---|---|---|---|---|")
    for name in found:
        shares = seconds[name] / seconds["full gather"], size[name] / size["full gather"]
        print(f"| {name} | {seconds[name]:.2f} | {shares[0]:.2f} | {size[name]:,.0f} | {shares[1]:.2f} |")
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
