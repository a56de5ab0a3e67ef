"""Who trains on which responses. Pure: alike on all ranks, also on those that only sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from megatron_rl.config import Config
from megatron_rl.resharding.names import Shape
from megatron_rl.training.flops import sequence_flops
from megatron_rl.training.micro_batches import Place, shares
from megatron_rl.training.setup import data_parallel_ranks
from megatron_rl.types import TrainedResponse


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """How optimizer steps are divided over the ranks of a run."""

    config: Config
    shape: Shape
    trainers: int
    """Ranks that train: the first ones."""

    world: int
    """All ranks."""

    def place(self, *, rank: int = 0, context_rank: int = 0) -> Place:
        """Which data a rank works on, by its data-parallel and its context-parallel rank."""
        trainer = self.config.trainer
        model = trainer.tensor_parallel_size * trainer.pipeline_parallel_size * trainer.context_parallel_size
        fp8 = trainer.implementation.fp8 is not None
        return Place(
            rank=rank,
            ranks=self.trainers // model,
            context_rank=context_rank,
            context_ranks=trainer.context_parallel_size,
            multiple=(trainer.tensor_parallel_size if trainer.sequence_parallel else 1) * (32 if fp8 else 1),
        )

    def scheduled(self, update: Sequence[TrainedResponse]) -> list[list[list[int]]]:
        """What every data-parallel rank does in an optimizer step; see `shares`."""
        trainer = self.config.trainer
        return shares(
            update,
            self.place(),
            flops=sequence_flops(self.shape),
            micro_batch_size=trainer.micro_batch_size,
            max_tokens=trainer.max_tokens_per_micro_batch,
            multiple=self.rounds_of,
        )

    def wanted(self, of_ranks: Sequence[Sequence[Sequence[int]]]) -> list[list[int]]:
        """Of each rank of the run, the responses whose tokens it needs for that."""
        trainer = self.config.trainer
        trains = [list(chain.from_iterable(of_rank)) for of_rank in of_ranks]
        replicas = data_parallel_ranks(
            self.trainers,
            tensor=trainer.tensor_parallel_size,
            context=trainer.context_parallel_size,
            pipeline=trainer.pipeline_parallel_size,
        )
        return [trains[replica] for replica in replicas] + [[] for _ in range(self.world - self.trainers)]

    @property
    def rounds_of(self) -> int:
        """What the number of micro-batches is a multiple of: the interleaved schedule runs rounds over the stages."""
        trainer = self.config.trainer
        return trainer.pipeline_parallel_size if trainer.pipeline_chunks > 1 else 1
