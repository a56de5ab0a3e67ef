"""Run checkpoints in Megatron's distributed format: weights, optimizer, where the run stands; committed by a rename."""

from __future__ import annotations

import json
import queue
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core import parallel_state as mpu
from megatron.core.dist_checkpointing.strategies import filesystem_async

from megatron_rl.config import Config
from megatron_rl.errors import UserError
from megatron_rl.training.optimizer import load_optimizer_state, sharded_optimizer_state
from megatron_rl.training.trainer import Trainer

_STATE = "run_state.json"


@dataclass(frozen=True, kw_only=True)
class RunState:
    """Where a run stands after a rollout step; beside the weights it is all that the next step depends on."""

    step: int
    """Rollout steps done."""

    updates: int
    """Optimizer steps done."""

    prompts_drawn: int
    """Position of the prompt stream."""

    seed: int
    data_fingerprint: str
    """Of the training prompts (`PromptSet.fingerprint`)."""


def checkpoints_dir(config: Config) -> Path:
    """Where the run's checkpoints are."""
    return config.run_dir / "checkpoints"


def latest_checkpoint(config: Config) -> Path | None:
    """The newest complete checkpoint of the run, or None. Unfinished ones have another name."""
    found = _complete(config)
    return found[-1] if found else None


def _complete(config: Config) -> list[Path]:
    """Complete checkpoints of the run, oldest first; whatever else lies there is not ours."""
    return sorted(path for path in checkpoints_dir(config).glob("step_*") if path.name[5:].isdecimal())


def save_checkpoint(config: Config, trainer: Trainer, state: RunState) -> Path:
    """Write the state of the run under a temporary name, then rename it. A collective.

    Older checkpoints beyond `checkpoint.keep` go only after that.
    """
    target = checkpoints_dir(config) / f"step_{state.step:06d}"
    partial = target.with_name(f"partial_{target.name}")
    if dist.get_rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier()
    # Megatron's own queue lives in a spawned process, which a signal to the process group ends and a killed rank leaves
    # behind. This save is synchronous: a queue in this process does.
    filesystem_async._results_queue = queue.Queue()
    dist_checkpointing.save(
        _sharded_state(trainer, loading=False),
        str(partial),
        content_metadata=_metadata(stored=True),
    )
    if dist.get_rank() == 0:
        (partial / _STATE).write_text(json.dumps(asdict(state), indent=2))
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)
        for old in _complete(config)[: -config.checkpoint.keep]:
            shutil.rmtree(old)
    dist.barrier()
    return target


def read_run_state(directory: Path, config: Config, data_fingerprint: str) -> RunState:
    """The state file of a checkpoint, checked against the run that wants to go on from it.

    Raises:
        UserError: the state can't be read, or the run has other prompts or another seed now.
    """
    try:
        state = RunState(**json.loads((directory / _STATE).read_text()))
    except (OSError, ValueError) as error:
        raise UserError(f"{directory / _STATE}: {error}; move {directory} away to go on from the one before") from None
    except TypeError as error:
        raise UserError(f"{directory / _STATE}: written by another version of megatron_rl ({error})") from None
    if state.data_fingerprint != data_fingerprint:
        raise UserError(
            f"data.train: {config.data.train} is not the data that {directory} was made with; "
            "give that file back, or start a new run_dir"
        )
    if state.seed != config.seed:
        raise UserError(f"seed: {directory} was made with seed {state.seed}; set it, or start a new run_dir")
    return state


def load_checkpoint(directory: Path, trainer: Trainer, state: RunState) -> None:
    """Put weights and optimizer of a checkpoint into the trainer, from any layout. A collective."""
    loaded = dist_checkpointing.load(_sharded_state(trainer, loading=True), str(directory))
    trainer.model.load_state_dict(loaded["model"])
    load_optimizer_state(trainer.optimizer, loaded["optimizer"])
    trainer.updates_done = state.updates


def _sharded_state(trainer: Trainer, *, loading: bool) -> dict[str, Any]:
    model = trainer.model.sharded_state_dict(metadata=_metadata())
    optimizer = sharded_optimizer_state(trainer.optimizer, model, _metadata(), loading=loading)
    return {"model": model, "optimizer": optimizer}


def _metadata(*, stored: bool = False) -> dict[str, Any]:
    """How Megatron lays out the optimizer state: independent of the layout that wrote it."""
    metadata: dict[str, Any] = {"distrib_optim_sharding_type": "fully_reshardable"}
    if not stored:
        metadata["dp_cp_group"] = mpu.get_data_parallel_group(with_context_parallel=True)
    return metadata
