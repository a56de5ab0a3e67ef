"""Which engine a run samples with."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

from megatron_rl.config import Config
from megatron_rl.resharding.slices import Slices
from megatron_rl.rollout.embedded import EmbeddedEngine
from megatron_rl.rollout.engine import Engine
from megatron_rl.rollout.groups import EngineGroup
from megatron_rl.rollout.sglang import SglangEngine
from megatron_rl.training.hf_config import ModelSpec
from megatron_rl.training.model import DTYPES


class NoEngine:
    """In an engine's place on a rank that only trains."""

    def start(self) -> None:
        """Nothing."""

    submit = poll = abort = score = restart = None

    def buffer(self, size: int) -> torch.Tensor:
        """Nothing comes to this rank."""
        return torch.empty(size, dtype=torch.uint8)

    def load(self, slices: Slices, *, read_back: bool) -> torch.Tensor:
        """Nothing."""
        return torch.empty(0, dtype=torch.int64)

    def digests(self, names: Sequence[str]) -> list[int]:
        """Of no parameters."""
        return []

    def update_weights(self, tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Take part in the gather."""
        for _ in tensors:
            continue

    def end_update(self, version: int) -> None:
        """Nothing."""

    def health(self) -> bool:
        """It never can."""
        return False

    sleep = wake = resume = stop = begin_update = start


def make_engine(
    config: Config,
    spec: ModelSpec,
    group: EngineGroup,
    *,
    eos_token_ids: frozenset[int],
    vocabulary: int,
    ranks: dist.ProcessGroup | None = None,
) -> Engine:
    """The engine of this rank's group, as `rollout.engine` says; not started.

    Args:
        config: of the run.
        spec: the architecture.
        group: the ranks that share it.
        eos_token_ids: sampling one of them ends a response.
        vocabulary: ids from here on are never sampled.
        ranks: their process group, when there are several.
    """
    if config.rollout.engine == "sglang":
        return SglangEngine(config, spec, group, eos_token_ids=eos_token_ids, vocabulary=vocabulary, ranks=ranks)
    return EmbeddedEngine(
        config.model.path,
        eos_token_ids=eos_token_ids,
        vocabulary=vocabulary,
        dtype=DTYPES[config.trainer.dtype],
        max_concurrent=config.rollout.max_concurrent,
    )
