"""Run checkpoints, read: the newest whole one is found, and the trainer filled from it, whatever its layout."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from megatron_rl.agreement import from_leader
from megatron_rl.config import Config
from megatron_rl.errors import UserError
from megatron_rl.manifest import NAME, first_fault
from megatron_rl.resharding.torch_dist import ChunkReader
from megatron_rl.training import sharded_state
from megatron_rl.training.run_state import RunState, checkpoints_dir, complete
from megatron_rl.training.trainer import Trainer

PARTIAL = "partial_"
"""What the name of a checkpoint begins with that is not complete, or on its way out."""


def tidy(directory: Path) -> None:
    """Remove what a run that was killed left unfinished."""
    for path in directory.glob(f"{PARTIAL}*"):
        shutil.rmtree(path)


def newest_whole(config: Config, everyone: dist.ProcessGroup, say: Callable[[str], None]) -> Path | None:
    """The newest checkpoint of the run that is as it was written, or None if there is none at all. A collective.

    Every rank reads some of the files. One that is damaged is named and left where it is.

    Raises:
        UserError: on every rank; a file can't be read, not all ranks see the same, or all checkpoints are damaged.
    """
    found = from_leader(lambda: complete(checkpoints_dir(config)), everyone)
    faults = []
    for checkpoint in reversed(found):
        fault = _fault(checkpoint, everyone)
        if fault is None:
            return checkpoint
        faults.append(fault)
        say(f"warning: {checkpoint} is damaged and not used: {fault}")
    if faults:
        raise UserError(
            f"{checkpoints_dir(config)}: no checkpoint is whole: {faults[0]}; move the directory away to begin anew"
        )
    return None


def _fault(checkpoint: Path, everyone: dist.ProcessGroup) -> str | None:
    """What is wrong with a checkpoint, the same on every rank. A collective."""
    rank, world = dist.get_rank(everyone), dist.get_world_size(everyone)
    mine: tuple[bool, str | None, str | None]
    try:
        mine = (checkpoint / NAME).exists(), first_fault(checkpoint, number=rank, of=world), None
    except OSError as error:
        mine = True, None, f"{error.filename}: {error.strerror}; nothing was changed"
    gathered: list[tuple[bool, str | None, str | None] | None] = [None] * world
    dist.all_gather_object(gathered, mine, group=everyone)
    every = [one for one in gathered if one is not None]
    for refused in (refused for _, _, refused in every if refused):
        raise UserError(refused)
    for number, (sees, _, _) in enumerate(every):
        if sees != every[0][0]:
            raise UserError(
                f"run_dir: rank {number} does not see the files of rank 0 in {checkpoint}; share the directory"
            )
    return next((fault for _, fault, _ in every if fault), None)


def load_checkpoint(directory: Path, trainer: Trainer, state: RunState) -> None:
    """Put weights and optimizer of a checkpoint into the trainer, from any layout; each rank reads only its own.

    Raises:
        UserError: it does not hold all of them.
    """
    reader = ChunkReader(directory)
    try:
        sharded_state.load(trainer, reader, state.updates)
    finally:  # a mapped file that retention removes would keep its space
        reader.close()
