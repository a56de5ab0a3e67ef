"""Which ranks share an engine: consecutive ones or every n-th, never across nodes. The first of them leads it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from megatron_rl.errors import UserError


@dataclass(frozen=True, kw_only=True)
class EngineGroup:
    """The engine of a rank, among all engines of the run. Pure: every rank knows everybody's."""

    rank: int
    """Of the process, in the world."""

    size: int
    """Ranks that share an engine (`rollout.tensor_parallel_size`)."""

    world: int
    """Ranks in all."""

    first: int = 0
    """Ranks before it only train, and belong to no engine."""

    step: int = 1
    """From each rank of an engine to its next: so many engines share a block of consecutive ranks."""

    @property
    def number(self) -> int:
        """Which engine this rank belongs to, from 0; negative: to none."""
        block, place = divmod(self.rank - self.first, self.size * self.step)
        return block * self.step + place % self.step

    @property
    def engines(self) -> int:
        """How many there are."""
        return (self.world - self.first) // self.size

    @property
    def leads(self) -> bool:
        """Whether this rank talks to the engine."""
        return self.rank >= self.first and self.rank == self.leader_of(self.number)

    def leader_of(self, engine: int) -> int:
        """The rank that leads an engine."""
        block, lane = divmod(engine, self.step)
        return self.first + block * self.size * self.step + lane

    @property
    def ranks(self) -> range:
        """The ranks of this rank's engine, its leader first."""
        first = self.leader_of(self.number)
        return range(first, first + self.size * self.step, self.step)

    def all_ranks(self) -> Iterator[int]:
        """The ranks of all engines, engine after engine."""
        for engine in range(self.engines):
            yield from replace(self, rank=self.leader_of(engine)).ranks


def check_engine_groups(size: int, world: int, per_node: int, first: int = 0) -> None:
    """Refuse engines that would not fill the ranks, or would lie across nodes.

    Args:
        size: ranks that share an engine.
        world: ranks in all.
        per_node: ranks of a node.
        first: ranks before it only train.

    Raises:
        UserError: naming the sizes.
    """
    if (world - first) % size or per_node % size or first % size:
        raise UserError(
            f"rollout.tensor_parallel_size: engines of {size} ranks don't divide {world - first} processes, {per_node} "
            "on each node; an engine never lies across nodes"
        )
