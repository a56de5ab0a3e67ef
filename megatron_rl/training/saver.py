"""Run checkpoints, written beside training: copied to the host at once, then written by a thread of each rank.

The thread of rank 0 waits for the others', writes what says where everything is, and gives the checkpoint its name when
all of it is on the disk. Threads meet on the store: no collective is pending while training goes on, however long a
disk takes.
"""

from __future__ import annotations

import json
import pickle
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Thread
from typing import Any

import torch.distributed as dist
from torch import Tensor

from megatron_rl.agreement import from_leader
from megatron_rl.config import Config
from megatron_rl.config_files import dump_config
from megatron_rl.errors import UserError, first_cause
from megatron_rl.files import sync
from megatron_rl.manifest import fingerprint, write_manifest
from megatron_rl.resharding.torch_dist import Chunk, finish, nothings, write_chunks
from megatron_rl.rollout.waiting import pause_s
from megatron_rl.training.checkpoint import PARTIAL
from megatron_rl.training.retention import remove_outdated
from megatron_rl.training.run_state import STATE, RunState, checkpoints_dir

BEAT_S = 1.0
LOOK_S = 5.0
LAST_WORDS_S = 120.0
"""How long a process that ends with an error waits for its part of a checkpoint."""


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """What one rank has of a step."""

    state: RunState
    layers: int
    """Of the model."""

    chunks: Mapping[Chunk, Tensor]
    """Of weights and optimizer, with the data: the trainer's own memory."""

    also: Callable[[Path], Sequence[str]]
    """Writes what this rank alone has into the directory, and says the names. Called by a thread: it must not look at
    anything that changes."""


class Saver:
    """Saves one checkpoint at a time. Every rank of the run has one and calls the same methods in the same order."""

    def __init__(
        self,
        config: Config,
        everyone: dist.ProcessGroup,
        store: dist.Store,
        say: Callable[[str], None],
        before_commit: Callable[[], None] = lambda: None,
    ) -> None:
        """Save the checkpoints of a run.

        Args:
            config: of the run.
            everyone: all its ranks.
            store: theirs.
            say: told what happens, on every rank.
            before_commit: called by rank 0's thread before a checkpoint gets its name.
        """
        self.config, self.everyone, self.store, self.say = config, everyone, store, say
        self._before_commit = before_commit
        self._writing: _Writing | None = None
        self.seconds: float = 0.0
        """How long the last checkpoint took from its beginning to its name; until there is one, a guess."""

    def begin(self, snapshot: Snapshot) -> None:
        """Copy a snapshot to the host and have it written, after the one before. A collective.

        Raises:
            UserError: on every rank; that one failed, or the directory can't be made.
        """
        self.wait()
        partial = checkpoints_dir(self.config) / f"{PARTIAL}step_{snapshot.state.step:06d}"
        begun = time.monotonic()
        name = from_leader(lambda: _make_empty(partial), self.everyone, "checkpoint")
        writing = _Writing(
            config=self.config,
            snapshot=snapshot,
            copies={chunk: tensor.detach().to("cpu", copy=True) for chunk, tensor in snapshot.chunks.items()},
            partial=partial,
            keys=_Keys(self.store, name, dist.get_world_size(self.everyone)),
            rank=dist.get_rank(self.everyone),
            before_commit=self._before_commit,
        )
        writing.begun = begun
        writing.thread.start()
        self._writing = writing

    @property
    def expected_s(self) -> float:
        """How long the next checkpoint will take, behind what is left of one that is being written."""
        left = max(0.0, self.seconds - (time.monotonic() - self._writing.begun)) if self._writing else 0.0
        return left + self.seconds

    def look(self) -> bool:
        """Whether a checkpoint failed, as far as this rank knows; says when one is complete."""
        if self._writing and self.store.check([self._writing.keys.over]):
            end = self._writing.keys.read_end(self.store)
            if end["fault"]:
                return True
            self._end(end)
        return False

    def wait(self) -> None:
        """Wait until no checkpoint is being written.

        Raises:
            UserError: on every rank; it failed.
        """
        writing = self._writing
        if writing is None:
            return
        patience = _Patience(self.config.collective_timeout_s)
        begun, said = time.monotonic(), False
        while not self.store.check([writing.keys.over]):
            if time.monotonic() - begun > LOOK_S and not said:
                self.say(f"waiting for the checkpoint of step {writing.snapshot.state.step} to be written")
                said = True
            patience.see(0, self.store.add(writing.keys.beat(0), 0))
            time.sleep(pause_s(time.monotonic() - begun))
        writing.thread.join()
        end = writing.keys.read_end(self.store)
        self._end(end)
        if end["fault"]:
            raise UserError(f"{writing.target} could not be saved: {end['fault']}; the checkpoints before it are whole")

    def _end(self, end: Mapping[str, Any]) -> None:
        assert self._writing
        for warning in end["warnings"]:
            self.say(warning)
        if not end["fault"]:
            self.seconds = end["seconds"]
            self.say(f"saved {self._writing.target} in {self.seconds:.1f}s")
        self._writing = None

    def close(self) -> None:
        """Let what is being written come to its end, if it does so soon: this process ends."""
        if self._writing:
            self._writing.thread.join(LAST_WORDS_S)


def _make_empty(directory: Path) -> str:
    """Make the directory; a name for the save that no other has."""
    if directory.exists():
        shutil.rmtree(directory)
    directory.mkdir(parents=True)
    return f"{directory.name}_{time.time_ns()}"


class _Patience:
    """Ends the wait for ranks that give no sign of life."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._beats: dict[int, int] = {}
        self._changed: dict[int, float] = {}

    def see(self, rank: int, beat: int) -> None:
        """Note the number of beats of a rank. Raises UserError if it has not changed for too long."""
        now = time.monotonic()
        if self._beats.get(rank) != beat:
            self._beats[rank], self._changed[rank] = beat, now
        elif now - self._changed[rank] > self._timeout_s:
            raise UserError(f"rank {rank} has written nothing for {self._timeout_s:.0f} s (collective_timeout_s)")


class _Keys:
    """What ranks tell each other of one save on the store. A thread has its own connection."""

    def __init__(self, store: dist.Store, name: str, world: int) -> None:
        self.store: dist.Store = store.clone()  # type: ignore[attr-defined]
        self._prefix, self.world = f"checkpoint/{name}", world

    @property
    def over(self) -> str:
        return f"{self._prefix}/over"

    def beat(self, rank: int) -> str:
        return f"{self._prefix}/beat/{rank}"

    def part(self, rank: int) -> str:
        return f"{self._prefix}/part/{rank}"

    def read_end(self, store: dist.Store) -> dict[str, Any]:
        end: dict[str, Any] = json.loads(store.get(self.over))
        return end

    def wait_for_parts(self, timeout_s: float, alive: Callable[[], None]) -> list[_Part]:
        """Of all ranks. Raises UserError when one is silent for too long."""
        patience, begun, looked = _Patience(timeout_s), time.monotonic(), 0.0
        ranks = range(self.world)
        while not self.store.check([self.part(rank) for rank in ranks]):
            alive()
            now = time.monotonic()
            if now - looked > LOOK_S:
                looked = now
                for rank in ranks:
                    if rank and not self.store.check([self.part(rank)]):
                        patience.see(rank, self.store.add(self.beat(rank), 0))
            time.sleep(pause_s(now - begun))
        found = [pickle.loads(self.store.get(self.part(rank))) for rank in ranks]
        for rank in ranks:
            self.store.delete_key(self.part(rank))
        return found


@dataclass(frozen=True, kw_only=True)
class _Part:
    """What one rank wrote."""

    chunks: Sequence[Chunk] = ()
    results: Sequence[Any] = ()
    files: Mapping[str, list[int]]
    fault: str = ""


class _Writing:
    """One rank's thread of one save."""

    def __init__(
        self,
        *,
        config: Config,
        snapshot: Snapshot,
        copies: dict[Chunk, Tensor],
        partial: Path,
        keys: _Keys,
        rank: int,
        before_commit: Callable[[], None],
    ) -> None:
        self.config, self.snapshot, self.partial, self.keys, self.rank = config, snapshot, partial, keys, rank
        self.target = partial.with_name(partial.name.removeprefix(PARTIAL))
        self.begun = time.monotonic()
        self.thread = Thread(target=self._run, name="checkpoint", daemon=True)
        self._copies, self._before_commit, self._beaten = copies, before_commit, 0.0

    def _run(self) -> None:
        try:
            part = self._write()
        except Exception as error:  # whatever it is: rank 0 must hear of it, or it would wait
            part = _Part(files={}, fault=first_cause(error))
        self.keys.store.set(self.keys.part(self.rank), pickle.dumps(part))  # type: ignore[arg-type]
        if self.rank == 0:
            warnings: list[str] = []
            try:
                fault = self._commit(warnings.append)
            except Exception as error:
                fault = first_cause(error)
            if fault:
                shutil.rmtree(self.partial, ignore_errors=True)
            end = {"fault": fault, "warnings": warnings, "seconds": time.monotonic() - self.begun}
            self.keys.store.set(self.keys.over, json.dumps(end))

    def _write(self) -> _Part:
        """What this rank has; its copies go as they are written."""
        if not self.partial.is_dir():
            return _Part(
                files={}, fault=f"rank {self.rank} does not see {self.partial}: run_dir is to be shared by nodes"
            )
        chunks = list(self._copies)
        empty = self._nothings if self.rank == 0 else []
        results = write_chunks(self.partial, chunks, self._take, number=self.rank, nothings=empty)
        names = list(self.snapshot.also(self.partial))
        for name in names:
            sync(self.partial / name)
        names += sorted({result.storage_data.relative_path for result in results})
        return _Part(chunks=chunks, results=results, files=self._fingerprints(names))

    @property
    def _nothings(self) -> list[str]:
        return nothings(self.snapshot.layers)

    def _take(self, chunk: Chunk) -> Tensor:
        self._beat()
        return self._copies.pop(chunk)

    def _fingerprints(self, names: Sequence[str]) -> dict[str, list[int]]:
        return {name: fingerprint(self.partial / name, self._beat) for name in names}

    def _beat(self) -> None:
        if time.monotonic() - self._beaten > BEAT_S:
            self._beaten = time.monotonic()
            self.keys.store.add(self.keys.beat(self.rank), 1)

    def _commit(self, warn: Callable[[str], None]) -> str:
        """Wait for all ranks, and give the checkpoint its name; or say why not."""
        parts = self.keys.wait_for_parts(self.config.collective_timeout_s, self._beat)
        for fault in (part.fault for part in parts if part.fault):
            return fault
        chunks = [chunk for part in parts for chunk in part.chunks]
        finish(self.partial, chunks, [part.results for part in parts], self._nothings)
        state = self.snapshot.state
        (self.partial / STATE).write_text(json.dumps(asdict(state), indent=2))
        (self.partial / "config.yaml").write_text(dump_config(self.config))
        own = [path.name for path in self.partial.iterdir() if not any(path.name in part.files for part in parts)]
        for name in own:
            sync(self.partial / name)
        files = {name: entry for part in parts for name, entry in part.files.items()}
        write_manifest(self.partial, files | self._fingerprints(own))
        self._before_commit()
        sync(self.partial)
        leaving = self.target.with_name(f"{PARTIAL}replaced_{self.target.name}")
        if self.target.exists():  # it was damaged, or the run would have gone on from it
            self.target.rename(leaving)
        self.partial.rename(self.target)
        sync(self.target.parent)
        shutil.rmtree(leaving, ignore_errors=True)
        remove_outdated(self.target.parent, self.config.checkpoint, state.step, warn)
        return ""
