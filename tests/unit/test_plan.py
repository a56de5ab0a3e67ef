"""Resharding plans, simulated on numbered elements: each byte of each engine is written once, and is the right one."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor

from megatron_rl.resharding.cuts import Corner, Cut
from megatron_rl.resharding.layout import Layout, engine_gpus
from megatron_rl.resharding.names import FAMILIES, Family, Shape, parameters
from megatron_rl.resharding.plan import Plan, plan
from tests.cases.sharded import megatron_shard, numbered, sglang_shard

SHAPE = Shape(
    layers=4, hidden=9, heads=16, kv_heads=4, head_dim=3, intermediate=40, vocab=101, tied=False
)  # fmt: skip
"""TP 8 goes through its key heads; a vocabulary that no TP divides."""

PIPELINES: dict[str, dict[str, object]] = {
    "PP 1": {},
    "PP 2": {"pipeline": 2},
    "PP 4": {"pipeline": 4},
    "uneven": {"pipeline": 3, "stage_layers": (2, 1, 1)},
    "VPP 2": {"pipeline": 2, "chunks": 2},
}
Held = dict[tuple[int, str, int], Tensor]
"""By GPU, name and layer."""


def trainer(shape: Shape, tensor: int = 1, data: int = 1, **more: object) -> Layout:
    return Layout(side="megatron", shape=shape, tensor=tensor, data=data, **more)  # type: ignore[arg-type]


def engines(shape: Shape, tensor: int, gpus: int, *, step: int = 1, first: int = 0) -> Layout:
    places = engine_gpus(tensor, gpus, step=step, first=first)
    return Layout(side="sglang", shape=shape, tensor=tensor, data=gpus // tensor, gpus=places)


def held(layout: Layout, hf: dict[str, Tensor]) -> Held:
    """What every GPU of a trainer has, and what every GPU of engines shall have."""
    found = {}
    for (entry, layer), rank in product(parameters(layout.shape), range(layout.tensor)):
        name = entry.megatron if layout.side == "megatron" else entry.sglang
        shard = (megatron_shard if layout.side == "megatron" else sglang_shard)(
            hf, layout.shape, name, layer, rank, layout.tensor
        )
        for gpu in layout.holders(layout.stages_of(entry, layer), rank):
            found[gpu, name, layer] = shard
    return found


def rectangle(tensor: Tensor, corner: Corner, cut: Cut) -> Tensor:
    """A view, of a vector as a column."""
    matrix = tensor if tensor.ndim == 2 else tensor.unsqueeze(1)
    return matrix[corner.row : corner.row + len(cut.rows), corner.column : corner.column + len(cut.columns)]


def carried_out(planned: Plan, has: Held, wanted: Held) -> Held:
    """What every GPU of the target has after all moves: −1 where nothing was written, and nothing is written twice."""
    got = {key: torch.where(tensor == 0, 0, -1) for key, tensor in wanted.items()}  # padding is set, not sent
    moves = (planned.slot.tolist(), planned.sender.tolist(), planned.receiver.tolist(), planned.forwarded.tolist())
    for slot, sender, receiver, forwarded in zip(*moves, strict=True):
        layer, cut = planned.slots[slot].layer, planned.slots[slot].cut
        target = rectangle(got[receiver, cut.target.tensor, layer], cut.target, cut)
        assert target.eq(-1).all(), f"{cut} twice on GPU {receiver}"
        if forwarded:
            target.copy_(rectangle(got[sender, cut.target.tensor, layer], cut.target, cut))
        else:
            target.copy_(rectangle(has[sender, cut.source.tensor, layer], cut.source, cut))
    return got


def check(planned: Plan) -> None:
    """Carry a plan out, and compare with what every GPU shall have."""
    hf = numbered(planned.source.shape)
    wanted = held(planned.target, hf)
    for key, tensor in carried_out(planned, held(planned.source, hf), wanted).items():
        assert torch.equal(tensor, wanted[key]), key


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("pipeline", PIPELINES)
@pytest.mark.parametrize("tensor", [1, 2, 4, 8])
def test_every_byte_of_every_engine_is_written_once_and_is_right(
    tensor: int, pipeline: str, family: Family, tied: bool
) -> None:
    shape = replace(SHAPE, family=family, tied=tied)
    for data, of_engine in product((1, 2), (1, 2, 4, 8)):
        source = trainer(shape, tensor, data, **PIPELINES[pipeline])
        gpus = -(-source.size // of_engine) * of_engine
        check(plan(source, engines(shape, of_engine, gpus), gpus_per_node=4))
