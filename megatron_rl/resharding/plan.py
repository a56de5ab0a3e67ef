"""The plan of a resharding: who sends which slice to whom, in which bucket. Pure, and the same on every rank.

Each GPU receives exactly the bytes that it will keep and does not have, each from the nearest GPU that has it (itself,
its node, anywhere), and GPUs that hold the same bytes share the sending. Nothing is decided while bytes move.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from megatron_rl.resharding.cuts import Cut, Unit, cuts, padding
from megatron_rl.resharding.layout import Layout
from megatron_rl.resharding.names import Entry, entries
from megatron_rl.resharding.pieces import parts

Ranks = NDArray[np.int64]
Across = Literal["direct", "once"]

ALIGNMENT = 16
"""Bytes; slices begin at multiples of it in a bucket, where a tensor of any dtype may begin."""


@dataclass(frozen=True, kw_only=True)
class Slot:
    """A cut of one layer, taken by all GPUs that keep it."""

    entry: Entry
    layer: int
    cut: Cut
    nbytes: int
    bucket: int


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Moves, in the order of their buckets. Element i of each array is one move: a slot from one GPU to another."""

    source: Layout
    target: Layout
    itemsize: int
    gpus_per_node: int
    slots: Sequence[Slot]
    slot: Ranks
    """The number of the move's slot."""

    sender: Ranks
    receiver: Ranks
    forwarded: NDArray[np.bool_]
    """Whether the sender itself received it a moment ago, in the same bucket, from another node."""

    @property
    def world(self) -> int:
        """GPUs in all."""
        return 1 + max(int(gpu) for layout in (self.source, self.target) for gpu in _gpus(layout))

    @property
    def buckets(self) -> int:
        """How many there are."""
        return self.slots[-1].bucket + 1

    @cached_property
    def nbytes(self) -> Ranks:
        """Of each move."""
        return np.array([slot.nbytes for slot in self.slots])[self.slot]

    @cached_property
    def local(self) -> NDArray[np.bool_]:
        """Of each move: whether it is a copy on one GPU."""
        local: NDArray[np.bool_] = self.sender == self.receiver
        return local

    @cached_property
    def across(self) -> NDArray[np.bool_]:
        """Of each move: whether it goes to another node."""
        across: NDArray[np.bool_] = self.sender // self.gpus_per_node != self.receiver // self.gpus_per_node
        return across

    def total(self, of: Ranks, which: NDArray[np.bool_]) -> Ranks:
        """Bytes of some moves, for each GPU: as `of` (senders or receivers)."""
        return np.bincount(of[which], self.nbytes[which], self.world).astype(np.int64)

    @cached_property
    def padding(self) -> Ranks:
        """Bytes of padding rows that each GPU sets to 0."""
        rows = np.zeros(self.world, np.int64)
        for entry in entries(self.target.shape):
            if entry.fusion == "vocabulary":
                for rank in range(self.target.tensor):
                    for part in parts(self.target.side, entry, self.target.shape, rank, self.target.tensor):
                        stages = self.target.stages_of(entry, -1)
                        gpus = list(self.target.holders(stages, rank))
                        rows[gpus] += len(padding(part)) * part.size[1]
        return rows * self.itemsize


def plan(
    source: Layout,
    target: Layout,
    *,
    itemsize: int = 2,
    gpus_per_node: int = 8,
    across: Across = "direct",
    bucket_bytes: int = 512 * 2**20,
    unit: Unit = (1, 1),
) -> Plan:
    """Plan how a target gets its parts of a model from a source.

    Args:
        source: who has it.
        target: who wants it; its GPUs are counted together with the source's.
        itemsize: bytes of an element.
        gpus_per_node: GPUs 0, 1, ... of this number share a node, and so on.
        across: between nodes, each GPU receives for itself (`direct`), or each node receives every byte `once`, by one
            of the GPUs that keep it, which forwards it to the others.
        bucket_bytes: what a GPU has room for at a time, of what it receives, and of what it sends.
        unit: rows and columns of what must stay whole.

    Raises:
        ValueError: a unit would be cut, or something of the target has no source.
    """
    making = _Making(source, target, gpus_per_node, across, bucket_bytes)
    most = bucket_bytes // itemsize
    found: dict[Entry, dict[Cut, list[int]]] = {}
    for entry in entries(target.shape):
        keepers = found[entry] = {}  # TP ranks of the target: several, of what TP does not split
        for rank in range(target.tensor):
            for cut in cuts(entry, source, target, rank, most=most, unit=unit):
                keepers.setdefault(cut, []).append(rank)
    for entry, layer in source.interleaved():
        for cut, ranks in found[entry].items():
            making.take(entry, layer, tuple(ranks), cut, cut.elements * itemsize)
    return Plan(
        source=source,
        target=target,
        itemsize=itemsize,
        gpus_per_node=gpus_per_node,
        slots=making.slots,
        slot=np.repeat(making.numbers, [len(one) for one in making.senders]),
        sender=np.concatenate(making.senders),
        receiver=np.concatenate(making.receivers),
        forwarded=np.repeat(making.forwards, [len(one) for one in making.senders]),
    )


@dataclass(frozen=True)
class _Routes:
    """GPUs that want the same bytes, by how near they are to one that has them.

    `near` and `far` hold pairs of tables with a row for each node: those who can send, and those who want.
    """

    local: Ranks
    near: list[tuple[Ranks, Ranks]]
    far: list[tuple[Ranks, Ranks]]


@dataclass
class _Making:
    """A plan in the making: bytes that were given to each GPU to send, and to receive, so far."""

    source: Layout
    target: Layout
    gpus_per_node: int
    across: Across
    bucket_bytes: int
    slots: list[Slot] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    forwards: list[bool] = field(default_factory=list)
    senders: list[Ranks] = field(default_factory=list)
    receivers: list[Ranks] = field(default_factory=list)

    def __post_init__(self) -> None:
        world = 1 + max(max(_gpus(self.source)), max(_gpus(self.target)))
        self.sent, self.received = np.zeros(world, np.int64), np.zeros(world, np.int64)
        self.in_bucket = np.zeros((2, world), np.int64)
        self.bucket = 0
        self._routes: dict[tuple[object, ...], _Routes] = {}

    def take(self, entry: Entry, layer: int, keepers: tuple[int, ...], cut: Cut, nbytes: int) -> None:
        """Plan the moves of one cut of one layer to some TP ranks."""
        stages = (self.source.stages_of(entry, layer), self.target.stages_of(entry, layer))
        key = (*stages, cut.holders, keepers)
        if key not in self._routes:
            holders = {gpu for rank in cut.holders for gpu in self.source.holders(stages[0], rank)}
            wanting = {gpu for rank in keepers for gpu in self.target.holders(stages[1], rank)}
            self._routes[key] = self._find(sorted(holders), sorted(wanting))
        routes = self._routes[key]
        first = len(self.senders)
        self._add(routes.local, routes.local, forwarded=False)
        for can, want in routes.near:
            self._add(self._spread(can, want, nbytes), want, forwarded=False)
        for can, want in routes.far:
            self._send_far(can, want, nbytes)
        self._fill(first, nbytes)
        self.slots.append(Slot(entry=entry, layer=layer, cut=cut, nbytes=nbytes, bucket=self.bucket))

    def _find(self, holders: list[int], wanting: list[int]) -> _Routes:
        has = np.array(holders)
        local = np.array([gpu for gpu in wanting if gpu in set(holders)], np.int64)
        near: dict[tuple[int, int], list[tuple[Ranks, Ranks]]] = {}
        far: dict[int, list[Ranks]] = {}
        for node in sorted({gpu // self.gpus_per_node for gpu in wanting}):
            want = np.array([gpu for gpu in wanting if gpu // self.gpus_per_node == node and gpu not in set(holders)])
            can = has[has // self.gpus_per_node == node]
            if len(want) and len(can):
                near.setdefault((len(can), len(want)), []).append((can, want))
            elif len(want):
                far.setdefault(len(want), []).append(want)
        everywhere = [(has[None], np.stack(nodes)) for nodes in far.values()]
        if self.across == "direct" and far:
            everywhere = [(has[None], np.concatenate([want for nodes in far.values() for want in nodes])[None])]
        here = [(np.stack([c for c, _ in nodes]), np.stack([w for _, w in nodes])) for nodes in near.values()]
        return _Routes(local, here, everywhere)

    def _send_far(self, can: Ranks, want: Ranks, nbytes: int) -> None:
        """To GPUs of nodes that have nothing of it: a row for each node, or all in one."""
        if self.across == "direct":
            self._add(self._spread(can, want, nbytes), want, forwarded=False)
            return
        nodes = np.arange(len(want))
        first = self.received[want].argmin(1)
        firsts = want[nodes, first]
        self.received[firsts] += nbytes
        self._add(self._spread(can, firsts[None], nbytes), firsts, forwarded=False)
        others = np.delete(want, first + nodes * want.shape[1]).reshape(len(want), -1)
        if others.size:
            self.sent[firsts] += nbytes * others.shape[1]
            self._add(np.repeat(firsts, others.shape[1]), others, forwarded=True)

    def _spread(self, can: Ranks, want: Ranks, nbytes: int) -> Ranks:
        """A sender for each that wants, row by row: all the same number, and one more those that sent the least."""
        rank = np.take_along_axis(can, self.sent[can].argsort(1, kind="stable"), 1)
        chosen: Ranks = rank[:, np.arange(want.shape[1]) % can.shape[1]]
        np.add.at(self.sent, chosen, nbytes)
        return chosen

    def _add(self, senders: Ranks, receivers: Ranks, *, forwarded: bool) -> None:
        if receivers.size:
            self.numbers.append(len(self.slots))
            self.forwards.append(forwarded)
            self.senders.append(senders.ravel())
            self.receivers.append(receivers.ravel())

    def _fill(self, first: int, nbytes: int) -> None:
        """Put the moves since the `first` into the bucket, or into the next one."""
        size = -(-nbytes // ALIGNMENT) * ALIGNMENT
        more = np.zeros_like(self.in_bucket)
        for senders, receivers, forwarded in zip(
            self.senders[first:], self.receivers[first:], self.forwards[first:], strict=True
        ):
            np.add.at(more[0], receivers, size)
            if not forwarded:  # that is sent from where it was received
                more[1][senders] = size  # once, to however many
        if (self.in_bucket + more).max() > self.bucket_bytes and self.in_bucket.any():
            self.bucket += 1
            self.in_bucket[:] = 0
        self.in_bucket += more


def _gpus(layout: Layout) -> Sequence[int]:
    return layout.gpus or range(layout.size)
