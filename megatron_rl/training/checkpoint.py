"""Run checkpoints in Megatron's distributed format: weights, optimizer, where the run stands; committed by a rename."""

from __future__ import annotations

import json
import queue
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core import parallel_state as mpu
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.strategies import filesystem_async
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException

from megatron_rl.config import Config
from megatron_rl.errors import UserError
from megatron_rl.resharding.names import Shape
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

    collector: Mapping[str, Any]
    """Of the collector (`Collector.state`): the position in the prompt stream, what is carried over, ..."""

    fixed: Mapping[str, Any]
    """What may not change when the run goes on (`unchangeable`)."""


def unchangeable(config: Config, shape: Shape, data_fingerprint: str) -> dict[str, Any]:
    """By option: what a run that goes on must share with the checkpoint it goes on from."""
    return {
        "data.train": f"data of SHA-256 {data_fingerprint[:16]}",
        "seed": config.seed,
        "model.path": asdict(shape),
        "trainer.dtype": config.trainer.dtype,
        "trainer.distributed_optimizer": config.trainer.distributed_optimizer,
    }


def checkpoints_dir(config: Config) -> Path:
    """Where the run's checkpoints are."""
    return config.run_dir / "checkpoints"


def latest_checkpoint(config: Config, until: int | None = None) -> Path | None:
    """The newest complete checkpoint of the run (of no step after `until`), or None. Unfinished ones are not found."""
    found = [path for path in _complete(config) if until is None or step_of(path) <= until]
    return found[-1] if found else None


def unfinished(config: Config, step: int) -> Path:
    """Where the checkpoint of a step is written before it is complete."""
    return checkpoints_dir(config) / f"partial_step_{step:06d}"


def step_of(checkpoint: Path) -> int:
    """The step after which a checkpoint was written."""
    return int(checkpoint.name.removeprefix("step_"))


def _complete(config: Config) -> list[Path]:
    """Complete checkpoints of the run, oldest first; whatever else lies there is not ours."""
    return sorted(path for path in checkpoints_dir(config).glob("step_*") if path.name[5:].isdecimal())


def save_checkpoint(
    config: Config, trainer: Trainer, state: RunState, also: Callable[[Path], None] = lambda directory: None
) -> Path:
    """Write the state of the run under a temporary name, then rename it. A collective.

    Older checkpoints beyond `checkpoint.keep` go only after that.

    Args:
        config: of the run.
        trainer: its weights and optimizer.
        state: everything else that every rank knows.
        also: a collective of the run's ranks, in which each writes what it alone has into the directory.
    """
    target, partial = checkpoints_dir(config) / f"step_{state.step:06d}", unfinished(config, state.step)
    if dist.get_rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier()
    # Megatron's own queue lives in a spawned process, which a signal to the process group ends and a killed rank leaves
    # behind. This save is synchronous: a queue in this process does.
    filesystem_async._results_queue = queue.Queue()
    try:
        dist_checkpointing.save(
            _sharded_state(trainer, loading=False),
            str(partial),
            content_metadata=_metadata(stored=True),
        )
        also(partial)
    except CheckpointException as error:  # on every rank; rank 0 alone knows why
        reason = [_reason(error)]
        dist.broadcast_object_list(reason, src=0)
        raise UserError(f"{target} could not be saved: {reason[0]}; {_UNSAVED}") from None
    except (CheckpointingException, OSError) as error:
        raise UserError(f"{target} could not be saved: {_reason(error)}; {_UNSAVED}") from None
    if dist.get_rank() == 0:
        (partial / _STATE).write_text(json.dumps(asdict(state), indent=2))
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)
        for old in _complete(config)[: -config.checkpoint.keep]:
            shutil.rmtree(old)
    dist.barrier()
    return target


def read_run_state(directory: Path, fixed: Mapping[str, Any]) -> RunState:
    """The state file of a checkpoint, checked against the run that wants to go on from it.

    Raises:
        UserError: the state can't be read, or something differs that may not (`unchangeable`).
    """
    try:
        state = RunState(**json.loads((directory / _STATE).read_text()))
    except (OSError, ValueError) as error:
        raise UserError(f"{directory / _STATE}: {error}; {_MOVE.format(directory)}") from None
    except TypeError as error:
        raise UserError(f"{directory / _STATE}: written by another version of megatron_rl ({error})") from None
    for option, now in fixed.items():
        then = state.fixed.get(option)
        if then != now:
            raise UserError(
                f"{option}: {directory} was made with {_difference(then, now)}; set it back, or start a new run_dir"
            )
    return state


def _difference(then: Any, now: Any) -> str:
    """How what a checkpoint was made with differs from what it is now."""
    if isinstance(then, dict) and isinstance(now, dict):
        parts = (f"{key} {then.get(key)} (now {now[key]})" for key in now if then.get(key) != now[key])
        return ", ".join(parts)
    return f"{then} (now {now})"


def load_checkpoint(directory: Path, trainer: Trainer, state: RunState) -> None:
    """Put weights and optimizer of a checkpoint into the trainer, from any layout. A collective.

    Raises:
        UserError: it is damaged.
    """
    loaded = _load(directory, _sharded_state(trainer, loading=True))
    for number, chunk in enumerate(trainer.model):
        chunk.load_state_dict(loaded["model"][str(number)])
    load_optimizer_state(trainer.optimizer, loaded["optimizer"])
    trainer.updates_done = state.updates


def _load(directory: Path, state: dict[str, Any]) -> dict[str, Any]:
    try:
        FileSystemReader(directory).read_metadata()  # torch would log a traceback on every rank and go on without
        return dist_checkpointing.load(state, str(directory))
    except _DAMAGE as error:
        raise UserError(f"{directory} can't be loaded: {_reason(error)}; {_MOVE.format(directory)}") from None


_UNSAVED = "make room, then start the same command again: the checkpoints before it are whole"
_MOVE = "move {} away to go on from the one before"
# What Megatron, torch and pickle raise on files that are cut off, overwritten or missing, and on a full disk.
# torch's CheckpointException is no Exception, and holds those of all ranks.
_DAMAGE: tuple[type[BaseException], ...] = (
    *(CheckpointException, CheckpointingException, OSError, RuntimeError, ValueError, LookupError, EOFError),
    *(UnpicklingError, AttributeError, TypeError, AssertionError),
)


def _reason(error: BaseException) -> str:
    """The first cause, on one line."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _sharded_state(trainer: Trainer, *, loading: bool) -> dict[str, Any]:
    model = {str(number): chunk.sharded_state_dict(metadata=_metadata()) for number, chunk in enumerate(trainer.model)}
    optimizer = sharded_optimizer_state(trainer.optimizer, model, _metadata(), loading=loading)
    return {"model": model, "optimizer": optimizer}


def _metadata(*, stored: bool = False) -> dict[str, Any]:
    """How Megatron lays out the optimizer state: independent of the layout that wrote it."""
    metadata: dict[str, Any] = {"distrib_optim_sharding_type": "fully_reshardable"}
    if not stored:
        metadata["dp_cp_group"] = mpu.get_data_parallel_group(with_context_parallel=True)
    return metadata
