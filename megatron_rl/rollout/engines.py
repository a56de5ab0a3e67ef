"""Which engine a run samples with."""

from __future__ import annotations

import torch.distributed as dist

from megatron_rl.config import Config
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

    update_weights = submit = poll = abort = score = restart = None

    def health(self) -> bool:
        """It never can."""
        return False

    sleep = wake = resume = stop = start


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
