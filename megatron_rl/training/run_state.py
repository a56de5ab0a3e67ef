"""Where a run stands beside its weights, and where its checkpoints are."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megatron_rl.config import Config
from megatron_rl.errors import UserError
from megatron_rl.resharding.names import Shape

STATE = "run_state.json"


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

    layout: Mapping[str, int] = field(default_factory=dict)
    """Of the ranks that wrote it (`layout_of`): what each rank alone has goes on where it is the same."""

    evaluated: int | None = None
    """The step after which the last evaluation was made."""

    parity: Mapping[str, Any] = field(default_factory=dict)
    """Of the parity check (`Parity.state`)."""

    figures: Mapping[str, float] = field(default_factory=dict)
    """The metric by which the best checkpoint is told (`checkpoint.keep_best`), if it was measured after this step."""


def unchangeable(config: Config, shape: Shape, data_fingerprint: str) -> dict[str, Any]:
    """By option: what a run that goes on must share with the checkpoint it goes on from."""
    return {
        "data.train": f"data of SHA-256 {data_fingerprint[:16]}",
        "seed": config.seed,
        "model.path": asdict(shape),
        "trainer.dtype": config.trainer.dtype,
    }


def layout_of(config: Config, world: int) -> dict[str, int]:
    """How the ranks of a run are numbered."""
    trainer = config.trainer
    return {
        "tensor": trainer.tensor_parallel_size,
        "pipeline": trainer.pipeline_parallel_size,
        "chunks": trainer.pipeline_chunks,
        "context": trainer.context_parallel_size,
        "sampling": config.rollout.ranks,
        "world": world,
    }


def checkpoints_dir(config: Config) -> Path:
    """Where the run's checkpoints are."""
    return config.run_dir / "checkpoints"


def complete(directory: Path) -> list[Path]:
    """Checkpoints that have their final name, oldest first; whatever else lies there is not ours.

    Raises:
        OSError: the directory is there and can't be read: nobody must take that for an empty one.
    """
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return []
    ours = (name for name in names if name.startswith("step_") and name[5:].isdecimal())
    return sorted((directory / name for name in ours), key=step_of)


def step_of(checkpoint: Path) -> int:
    """The step after which a checkpoint was written."""
    return int(checkpoint.name.removeprefix("step_"))


def latest_checkpoint(config: Config, until: int | None = None) -> Path | None:
    """The newest checkpoint of the run that has its final name (of no step after `until`), or None."""
    found = [path for path in complete(checkpoints_dir(config)) if until is None or step_of(path) <= until]
    return found[-1] if found else None


def read_run_state(directory: Path, fixed: Mapping[str, Any]) -> RunState:
    """The state file of a checkpoint, checked against the run that wants to go on from it.

    Raises:
        UserError: the state can't be read, or something differs that may not (`unchangeable`).
    """
    try:
        state = RunState(**json.loads((directory / STATE).read_text()))
    except (OSError, ValueError) as error:
        raise UserError(f"{directory / STATE}: {error}") from None
    except TypeError as error:
        raise UserError(f"{directory / STATE}: written by another version of megatron_rl ({error})") from None
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
