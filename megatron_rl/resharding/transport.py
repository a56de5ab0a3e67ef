"""Carries out a plan: bucket after bucket, slices from rank to rank; the next one comes while this one is loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.errors import UserError
from megatron_rl.resharding.cuts import Cut, padding
from megatron_rl.resharding.engine_side.megatron_rl_loader import PADDING, digest, rectangle
from megatron_rl.resharding.names import parameters
from megatron_rl.resharding.pieces import parts
from megatron_rl.resharding.plan import ALIGNMENT, Plan
from megatron_rl.resharding.slices import Slices

Read = Callable[[str, int], Tensor]
"""The tensor of a name, with `{layer}` in it, and a layer, that this rank holds."""


@dataclass
class _Bucket:
    """One that is on its way."""

    buffer: Tensor
    numbers: list[int] = field(default_factory=list)
    """Moves that this rank receives, or has."""

    offsets: dict[int, int] = field(default_factory=dict)
    """Where each begins in the buffer, by slot."""

    works: list[dist.Work] = field(default_factory=list)
    sent: list[Tensor] = field(default_factory=list)
    """Kept until they have been."""


class Transport:
    """One rank's part in a plan, again and again."""

    def __init__(
        self,
        planned: Plan,
        group: dist.ProcessGroup,
        *,
        dtype: torch.dtype,
        device: torch.device,
        allocate: Callable[[int], Tensor],
        verify: bool,
    ) -> None:
        """Find out what this rank does.

        Args:
            planned: the plan, whose GPUs are the ranks of `group`.
            group: all ranks of the run.
            dtype: of all parameters.
            device: of this rank.
            allocate: makes a buffer of so many bytes, which the engine can read.
            verify: compare digests of what was sent with those of what was loaded.
        """
        self.plan, self.group, self.dtype, self.device, self.verify = planned, group, dtype, device, verify
        self.allocate = allocate
        self.rank = dist.get_rank(group)
        mine = np.flatnonzero((planned.sender == self.rank) | (planned.receiver == self.rank))
        bucket = np.array([slot.bucket for slot in planned.slots])[planned.slot[mine]]
        edges = np.searchsorted(bucket, np.arange(planned.buckets + 1))
        self._moves = [mine[start:end].tolist() for start, end in pairwise(edges)]
        self._size_of_bucket = max((self._room(moves) for moves in self._moves), default=0)
        self._buffers: list[Tensor] = []  # while it runs
        self._sent: dict[int, Tensor] = {}  # digests by slot

    def run(self, read: Read) -> Iterator[Slices]:
        """Send this rank's parts of the source, and give what comes, a bucket at a time. A collective.

        Every rank of the group iterates to the end. A bucket is overwritten when the next is asked for.

        Args:
            read: a parameter of the source that this rank holds.
        """
        self._sent.clear()
        self._buffers = [self.allocate(self._size_of_bucket) for _ in range(2)]
        on_its_way = self._start(0, read)
        for number in range(self.plan.buckets):
            here = on_its_way
            if number + 1 < self.plan.buckets:
                on_its_way = self._start(number + 1, read)
            self._finish(number, here)
            yield self._slices(number, here)
        self._buffers = []

    def check(self, loaded: Mapping[int, int]) -> None:
        """Compare all that was loaded with what was sent. A collective, after `run`.

        Args:
            loaded: by number of a move that this rank received its digest, as the engine read it back; padding is −1.

        Raises:
            UserError: naming the tensor, the slice and the ranks.
        """
        expected = self._exchange()
        for number, found in loaded.items():
            if number >= 0 and expected[number] != found:
                slot = self.plan.slots[self.plan.slot[number]]
                raise UserError(
                    f"reshard: {str(slot.cut).format(layer=slot.layer)} from rank {self.plan.sender[number]} is not "
                    f"what rank {self.rank} loaded into {slot.cut.target.tensor.format(layer=slot.layer)} (row "
                    f"{slot.cut.target.row}, column {slot.cut.target.column})"
                )

    def _cut(self, number: int) -> Cut:
        return self.plan.slots[self.plan.slot[number]].cut

    def _size(self, number: int) -> int:
        return self._cut(number).elements * self.plan.itemsize

    def _receives(self, number: int) -> bool:
        return bool(self.plan.receiver[number] == self.rank)

    def _room(self, moves: Sequence[int]) -> int:
        return sum(-(-self._size(number) // ALIGNMENT) * ALIGNMENT for number in moves if self._receives(number))

    def _start(self, number: int, read: Read) -> _Bucket:
        bucket = _Bucket(buffer=self._buffers[number % 2])
        end, operations = 0, list[dist.P2POp]()
        for move in self._moves[number]:
            slot, sender = int(self.plan.slot[move]), int(self.plan.sender[move])
            if self._receives(move):
                bucket.numbers.append(move)
                bucket.offsets[slot] = end
                end += self._room([move])
            if self.plan.forwarded[move]:
                continue
            if sender != self.rank:
                operations.append(self._operation(dist.irecv, self._view(bucket, move), sender, number, 0))
                continue
            source = self._source(move, read)
            if self._receives(move):
                self._view(bucket, move).copy_(source)
            else:
                bucket.sent.append(source)
                operations.append(self._operation(dist.isend, source, int(self.plan.receiver[move]), number, 0))
        bucket.works = dist.batch_isend_irecv(operations) if operations else []
        return bucket

    def _source(self, move: int, read: Read) -> Tensor:
        """The elements to be sent, row after row."""
        slot = int(self.plan.slot[move])
        taken = self.plan.slots[slot]
        corner, cut = taken.cut.source, taken.cut
        held = read(corner.tensor, taken.layer)
        found = rectangle(held, corner.row, corner.column, len(cut.rows), len(cut.columns)).contiguous().view(-1)
        if self.verify and slot not in self._sent:
            self._sent[slot] = digest(found)
        return found

    def _view(self, bucket: _Bucket, move: int) -> Tensor:
        offset = bucket.offsets[int(self.plan.slot[move])]
        return bucket.buffer[offset : offset + self._size(move)].view(self.dtype)

    def _operation(
        self, act: Callable[..., dist.Work | None], tensor: Tensor, peer: int, number: int, stage: int
    ) -> dist.P2POp:
        return dist.P2POp(act, tensor, group=self.group, group_peer=peer, tag=2 * (number % 2) + stage)

    def _finish(self, number: int, bucket: _Bucket) -> None:
        """Wait for what is on its way, and forward what others of the node keep too."""
        for work in bucket.works:
            work.wait()
        operations = []
        for move in self._moves[number]:
            if not self.plan.forwarded[move]:
                continue
            if self._receives(move):
                operations.append(
                    self._operation(dist.irecv, self._view(bucket, move), int(self.plan.sender[move]), number, 1)
                )
            else:
                slot, view = int(self.plan.slot[move]), self._view(bucket, move)
                if self.verify and slot not in self._sent:
                    self._sent[slot] = digest(view)
                operations.append(self._operation(dist.isend, view, int(self.plan.receiver[move]), number, 1))
        for work in dist.batch_isend_irecv(operations) if operations else []:
            work.wait()
        bucket.sent.clear()

    def _slices(self, number: int, bucket: _Bucket) -> Slices:
        names: dict[str, int] = {}
        rows, numbers = [], []
        for move in bucket.numbers:
            taken = self.plan.slots[int(self.plan.slot[move])]
            cut, name = taken.cut, taken.cut.target.tensor.format(layer=taken.layer)
            which = names.setdefault(name, len(names))
            offset = bucket.offsets[int(self.plan.slot[move])]
            rows.append((which, cut.target.row, cut.target.column, len(cut.rows), len(cut.columns), offset))
            numbers.append(move)
        if number == self.plan.buckets - 1:
            for name, where in self._padding():
                rows.append((names.setdefault(name, len(names)), *where, PADDING))
                numbers.append(-1)
        moves = torch.tensor(rows, dtype=torch.int64).reshape(-1, 6)
        return Slices(bucket=bucket.buffer, names=list(names), moves=moves, numbers=numbers)

    def _padding(self) -> Iterator[tuple[str, tuple[int, int, int, int]]]:
        """Rows of this rank's part of the vocabulary that nobody sends."""
        target = self.plan.target
        for entry, layer in parameters(target.shape):
            for tp_rank in range(target.tensor):
                if self.rank in target.holders(target.stages_of(entry, layer), tp_rank):
                    for part in parts(target.side, entry, target.shape, tp_rank, target.tensor):
                        if rows := padding(part):
                            yield part.name.format(layer=layer), (rows.start, 0, len(rows), part.size[1])

    def _exchange(self) -> dict[int, int]:
        """The sender's digest of each move that this rank received, or has."""
        moves = [move for of_bucket in self._moves for move in of_bucket]
        expected, operations, coming = dict[int, int](), list[dist.P2POp](), list[tuple[list[int], Tensor]]()
        peers: dict[tuple[int, int], list[int]] = {}
        for move in moves:
            peers.setdefault((int(self.plan.sender[move]), int(self.plan.receiver[move])), []).append(move)
        for (sender, receiver), shared in peers.items():
            if sender == self.rank:
                known = torch.stack([self._sent[int(self.plan.slot[move])] for move in shared])
                if receiver == self.rank:
                    expected.update(zip(shared, known.tolist(), strict=True))
                else:
                    operations.append(self._operation(dist.isend, known, receiver, 0, 0))
            else:
                room = torch.empty(len(shared), dtype=torch.int64, device=self.device)
                operations.append(self._operation(dist.irecv, room, sender, 0, 0))
                coming.append((shared, room))
        for work in dist.batch_isend_irecv(operations) if operations else []:
            work.wait()
        for shared, room in coming:
            expected.update(zip(shared, room.tolist(), strict=True))
        return expected
