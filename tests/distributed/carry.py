"""Carries out plans between processes, from shards that are written out row by row: run by test_transport.py.

torchrun --nproc-per-node 4 -m tests.distributed.carry DIRECTORY
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.errors import UserError
from megatron_rl.resharding.engine_side.megatron_rl_loader import apply
from megatron_rl.resharding.layout import Layout
from megatron_rl.resharding.names import Shape, parameters
from megatron_rl.resharding.placement import engine_gpus
from megatron_rl.resharding.plan import Plan, plan
from megatron_rl.resharding.slices import Slices
from megatron_rl.resharding.transport import Transport
from tests.cases.sharded import megatron_shard, numbered, sglang_shard

SHAPE = Shape(
    layers=4, hidden=9, heads=8, kv_heads=2, head_dim=3, intermediate=20, vocab=101, tied=False
)  # fmt: skip

Tensors = dict[tuple[str, int], Tensor]
Spoil = Callable[[Slices], Slices]


def plans() -> dict[str, Plan]:
    """By name; two nodes of two GPUs."""
    tied = replace(SHAPE, tied=True)

    def engines(shape: Shape, tensor: int, gpus: int = 4, **more: int) -> Layout:
        places = engine_gpus(tensor, gpus, **more)
        return Layout(side="sglang", shape=shape, tensor=tensor, data=gpus // tensor, gpus=places)

    def trainer(shape: Shape, **sizes: int) -> Layout:
        return Layout(side="megatron", shape=shape, **sizes)  # type: ignore[arg-type]

    options: dict[str, Any] = {"itemsize": 4, "gpus_per_node": 2, "bucket_bytes": 1500}
    split = trainer(SHAPE, tensor=2, pipeline=2)
    return {
        "TP 2 × PP 2 to TP 2": plan(split, engines(SHAPE, 2), **options),
        "to TP 2, once to each node": plan(split, engines(SHAPE, 2), across="once", **options),
        "to TP 2 on every second GPU": plan(split, engines(SHAPE, 2, step=2), across="once", **options),
        "to TP 4, through key heads": plan(trainer(SHAPE, tensor=4), engines(SHAPE, 4), **options),
        "to TP 1, with fewer ids": plan(split, engines(replace(SHAPE, vocab=83), 1), across="once", **options),
        "tied, PP 4": plan(trainer(tied, pipeline=4), engines(tied, 2), **options),
        "to others": plan(trainer(SHAPE, tensor=2), engines(SHAPE, 2, 2, first=2), **options),
    }


def held(layout: Layout, hf: dict[str, Tensor], rank: int) -> Tensors:
    """What a rank has, or shall have."""
    found = {}
    for (entry, layer), tp_rank in product(parameters(layout.shape), range(layout.tensor)):
        if rank in layout.holders(layout.stages_of(entry, layer), tp_rank):
            name, shard = (
                (entry.megatron, megatron_shard) if layout.side == "megatron" else (entry.sglang, sglang_shard)
            )
            found[name, layer] = shard(name, hf, layout.shape, layer, tp_rank, layout.tensor)
    return found


def read(sources: Tensors, name: str, layer: int) -> Tensor:
    return sources[name, layer]


def carry(planned: Plan, times: int, spoil: Spoil = lambda slices: slices) -> list[str]:
    """What is wrong after each of some updates; weights differ from update to update."""
    found = []
    transport = Transport(
        planned,
        dist.distributed_c10d._get_default_group(),
        dtype=torch.float32,
        device=torch.device("cpu"),
        allocate=lambda size: torch.empty(size, dtype=torch.uint8),
        verify=True,
    )
    for update in range(times):
        hf = {name: tensor.float() + update for name, tensor in numbered(planned.source.shape).items()}
        sources, wanted = (held(layout, hf, transport.rank) for layout in (planned.source, planned.target))
        engine = {
            name.format(layer=layer): torch.full_like(tensor, torch.nan) for (name, layer), tensor in wanted.items()
        }
        loaded = dict[int, int]()
        for slices in transport.run(partial(read, sources)):
            good = spoil(slices)
            digests = apply([engine[name] for name in good.names], good.moves, good.bucket, read_back=True)
            loaded |= zip(slices.numbers, digests.tolist(), strict=True)
        try:
            transport.check(loaded)
        except UserError as error:
            found.append(str(error))
        for (name, layer), tensor in wanted.items():
            if not torch.equal(engine[name.format(layer=layer)], tensor):
                found.append(f"update {update}: {name.format(layer=layer)} is wrong")
    return found


def flip(slices: Slices) -> Slices:
    """A bit of the first slice."""
    if len(slices.moves) and slices.moves[0, 5] == 0:
        slices.bucket[0] ^= 1
    return slices


def main() -> None:
    """Carry all plans out, and one with a fault in it."""
    dist.init_process_group("gloo")
    found = {name: carry(planned, times=3) for name, planned in plans().items()}
    found["a bit is flipped"] = carry(plans()["TP 2 × PP 2 to TP 2"], 1, flip)
    torch.save(found, Path(sys.argv[1]) / f"carried_{dist.get_rank()}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
