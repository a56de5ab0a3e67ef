"""Resharding plans, simulated on numbered elements: each byte of each engine is written once, and is the right one."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_rl.resharding import cuts as cuts_module
from megatron_rl.resharding.cuts import Corner, Cut
from megatron_rl.resharding.layout import Layout
from megatron_rl.resharding.names import FAMILIES, Entry, Family, Shape, parameters
from megatron_rl.resharding.pieces import Part, Side, parts
from megatron_rl.resharding.placement import engine_gpus
from megatron_rl.resharding.plan import Across, Plan, plan
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
        where = (hf, layout.shape, layer, rank, layout.tensor)
        if layout.side == "hf":
            shards = {tensor.name: hf[tensor.name.format(layer=layer)] for tensor in entry.hf}
        elif layout.side == "sglang":
            shards = {entry.sglang: sglang_shard(entry.sglang, *where)}
        else:
            shards = {entry.megatron: megatron_shard(entry.megatron, *where)}
        for gpu, (name, shard) in product(layout.holders(layout.stages_of(entry, layer), rank), shards.items()):
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


@pytest.mark.parametrize("across", ["direct", "once"])
@pytest.mark.parametrize("step", [1, 2])
def test_on_several_nodes_with_fewer_ids_for_the_engines(across: Across, step: int) -> None:
    source = trainer(SHAPE, 4, 2, pipeline=2, context=2)
    target = engines(replace(SHAPE, vocab=83), 2, 32, step=step)
    check(plan(source, target, gpus_per_node=4, across=across, bucket_bytes=2000, itemsize=8))


def test_from_trainers_to_engines_on_other_gpus() -> None:
    planned = plan(trainer(SHAPE, 2, pipeline=2), engines(SHAPE, 4, 8, first=4), gpus_per_node=4)
    check(planned)
    assert planned.world == 12
    assert not planned.local.any()


def test_every_kind_of_layout_can_be_source_and_target() -> None:
    """Of an HF checkpoint, of an embedded engine on each GPU, and of a trainer with another layout."""
    hf = numbered(SHAPE)
    checkpoint = Layout(side="hf", shape=SHAPE)
    for source, target in (
        (checkpoint, trainer(SHAPE, 2, pipeline=4)),
        (trainer(SHAPE, 2, 2, pipeline=2), Layout(side="hf", shape=SHAPE, data=8)),
        (trainer(SHAPE, 8, pipeline=2), trainer(SHAPE, 2, 2, pipeline=4, gpus=tuple(range(15, -1, -1)))),
        (trainer(SHAPE, 4, 2), checkpoint),
    ):
        wanted = held(target, hf)
        for key, tensor in carried_out(plan(source, target), held(source, hf), wanted).items():
            assert torch.equal(tensor, wanted[key]), key


def test_ranks_are_counted_as_megatron_counts_them() -> None:
    layout = trainer(SHAPE, 2, 2, pipeline=2, context=2)
    assert [list(layout.holders([stage], rank)) for stage in (0, 1) for rank in (0, 1)] == [
        [0, 2, 4, 6], [1, 3, 5, 7], [8, 10, 12, 14], [9, 11, 13, 15],
    ]  # fmt: skip
    assert engine_gpus(2, 8, step=2) == (0, 2, 1, 3, 4, 6, 5, 7)
    assert engine_gpus(2, 4, first=4) == (4, 5, 6, 7)


@pytest.mark.parametrize("tied", [False, True])
def test_a_tied_embedding_comes_from_the_nearer_of_its_two_stages(tied: bool) -> None:
    source = trainer(replace(SHAPE, tied=tied), pipeline=2)
    planned = plan(source, engines(source.shape, 1, 2))
    places = {
        (int(sender), int(receiver))
        for slot, sender, receiver in zip(planned.slot, planned.sender, planned.receiver, strict=True)
        if planned.slots[slot].cut.hf == "model.embed_tokens.weight"
    }
    assert places == ({(0, 0), (1, 1)} if tied else {(0, 0), (0, 1)})


def test_buckets_are_bounded_and_all_stages_send_in_each() -> None:
    bound = 4000
    deep = replace(SHAPE, layers=24)
    planned = plan(trainer(deep, 2, pipeline=4), engines(deep, 4, 8), bucket_bytes=bound)
    bucket = np.array([slot.bucket for slot in planned.slots])[planned.slot]
    assert bucket.max() + 1 == planned.buckets > 3
    assert (np.diff(bucket) >= 0).all()
    for number in range(planned.buckets):
        inside = bucket == number
        for gpu in range(8):
            assert planned.nbytes[inside & (planned.receiver == gpu)].sum() <= bound
        if 0 < number < planned.buckets - 2:
            assert len({int(gpu) // 2 for gpu in planned.sender[inside]}) == 4


def test_a_tensor_larger_than_a_bucket_is_cut_at_whole_units() -> None:
    shape = replace(SHAPE, hidden=32, intermediate=256, vocab=128, heads=8, head_dim=8)
    planned = plan(trainer(shape, 4), engines(shape, 2, 4), bucket_bytes=700, unit=(8, 8))
    check(planned)
    for slot in planned.slots:
        assert slot.nbytes <= 700
        if len(slot.cut.columns) > 1:
            assert slot.cut.rows.start % 8 == slot.cut.columns.start % 8 == 0
    assert any(len(slot.cut.rows) == 8 for slot in planned.slots)


@pytest.mark.parametrize(("unit", "where"), [((16, 1), "embed_tokens"), ((1, 16), "o_proj")])
def test_layouts_that_cut_a_unit_are_refused_by_name(unit: tuple[int, int], where: str) -> None:
    with pytest.raises(ValueError, match=rf"{where}.*cut a unit of {unit[0]} × {unit[1]}"):
        plan(trainer(SHAPE, 4), engines(SHAPE, 1, 4), unit=unit)


def mutated(cut: Callable[[Part], Part], of: str) -> Callable[..., list[Part]]:
    """`parts` of SGLang, with a wrong line."""

    def wrong(side: Side, entry: Entry, *given: Any) -> list[Part]:
        found = parts(side, entry, *given)
        return [cut(part) if side == "sglang" and of in part.name else part for part in found]

    return wrong


def shifted(part: Part) -> Part:
    """Its last piece begins a row too late in the checkpoint."""
    *others, last = part.pieces
    rows = range(last.rows.start + 1, last.rows.stop + 1)
    return replace(part, pieces=(*others, replace(last, rows=rows)))


def swapped(part: Part) -> Part:
    """Gate and up, in each other's place."""
    gate, up = part.pieces
    return replace(part, pieces=(replace(gate, hf=up.hf), replace(up, hf=gate.hf)))


WRONG = {
    "dropped": (lambda part: replace(part, pieces=part.pieces[:-1]), "qkv_proj.weight", "qkv_proj.weight: its pieces"),
    "doubled": (
        lambda part: replace(part, pieces=(*part.pieces, part.pieces[-1])),
        "qkv_proj.bias",
        r"qkv_proj.bias: .*v_proj.bias begins in row 30",
    ),
    "shifted": (shifted, "gate_up_proj", "up_proj.weight: .* no source"),
    "swapped": (swapped, "gate_up_proj", "gate_up_proj"),
}


@pytest.mark.parametrize("fault", WRONG)
def test_a_wrong_table_is_found_with_the_name_of_the_tensor(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    change, name, told = WRONG[fault]
    monkeypatch.setattr(cuts_module, "parts", mutated(change, name))
    with pytest.raises((AssertionError, ValueError), match=told):
        check(plan(trainer(SHAPE, 2), engines(SHAPE, 2, 2)))
