"""Which checkpoints of a run stay. Pure but for reading what the checkpoints say of themselves."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_rl.config import CheckpointConfig
from megatron_rl.training.run_state import STATE, complete, step_of


@dataclass(frozen=True)
class Kept:
    """A checkpoint that is there."""

    step: int
    figure: float | None
    """Its value of `checkpoint.keep_best`; None: it has none; NaN: that can't be told."""


def outdated(found: Sequence[Kept], config: CheckpointConfig, newest: int) -> list[int]:
    """The steps whose checkpoints go, when that of step `newest` is complete.

    Those of later steps stay: the run went on from before them, and they don't count. Of equal figures the newer is
    better; one whose figure can't be told stays.
    """
    ours = sorted((one for one in found if one.step <= newest), key=lambda one: one.step)
    stay = {one.step for one in ours[-config.keep :]} | {newest}
    if config.keep_every:
        stay |= {one.step for one in ours if one.step % config.keep_every == 0}
    if config.keep_best:
        stay |= {one.step for one in ours if one.figure is not None and math.isnan(one.figure)}
        rated = [(one.figure, one.step) for one in ours if one.figure is not None and not math.isnan(one.figure)]
        if rated:
            sign = 1 if config.best_is == "highest" else -1
            stay.add(max(rated, key=lambda pair: (sign * pair[0], pair[1]))[1])
    return [one.step for one in ours if one.step not in stay]


def figure_of(checkpoint: Path, name: str) -> float | None:
    """What a checkpoint notes of a metric."""
    try:
        figures = json.loads((checkpoint / STATE).read_text())["figures"]
        value = figures.get(name)
        return None if value is None else float(value)
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return math.nan


def remove_outdated(
    directory: Path, config: CheckpointConfig, newest: int, say: Callable[[str], None] = lambda text: None
) -> None:
    """Delete the checkpoints that don't stay; each is renamed before, so that none is ever half there."""
    name = config.keep_best
    found: Mapping[int, Path] = {step_of(path): path for path in complete(directory)}
    kept = [Kept(step, figure_of(path, name) if name else None) for step, path in found.items()]
    for step in outdated(kept, config, newest):
        leaving = directory / f"partial_removed_{step:06d}"
        try:
            found[step].rename(leaving)
            shutil.rmtree(leaving)
        except OSError as error:
            say(f"warning: {found[step]} should go and can't be removed: {error.strerror}: {error.filename}")
