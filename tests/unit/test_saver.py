"""Checkpoints beside training: whole or not there, found damaged, kept and dropped."""

import errno
import json
import math
import os
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_rl import manifest
from megatron_rl.config import CheckpointConfig, Config, StopConfig
from megatron_rl.errors import UserError
from megatron_rl.manifest import first_fault
from megatron_rl.resharding.torch_dist import Chunk, ChunkReader
from megatron_rl.stopping import TimeBudget, take_stop_file
from megatron_rl.training import saver as module
from megatron_rl.training.checkpoint import newest_whole, tidy
from megatron_rl.training.retention import Kept, outdated
from megatron_rl.training.run_state import RunState
from megatron_rl.training.saver import Saver, Snapshot
from megatron_rl.training.sharded_state import cut
from tests.tiny import run_config


@pytest.fixture(scope="module")
def everyone() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=60))
    yield dist.distributed_c10d._get_default_group()
    dist.destroy_process_group()


class Saving:
    """A saver of one rank, with what it said."""

    def __init__(self, run_dir: Path, everyone: dist.ProcessGroup, **checkpoint: Any) -> None:
        self.config: Config = run_config(run_dir=run_dir, checkpoint={"keep": 1, **checkpoint}, collective_timeout_s=2)
        self.directory = run_dir / "checkpoints"
        self.said: list[str] = []
        self.everyone = everyone
        self.saver = Saver(
            self.config, everyone, dist.distributed_c10d._get_default_store(), self.said.append, self.before_commit
        )
        self.go_on = threading.Event()
        self.go_on.set()

    def before_commit(self) -> None:
        assert self.go_on.wait(30)

    def save(
        self, step: int, *, wait: bool = True, figure: float | None = None, fault: Exception | None = None
    ) -> None:
        def also(directory: Path) -> list[str]:
            if fault:
                raise fault
            (directory / "own.txt").write_text(f"of {step}")
            return ["own.txt"]

        figures = {} if figure is None else {"eval/accuracy": figure}
        state = RunState(step=step, updates=2 * step, collector={}, fixed={}, figures=figures)
        self.data = torch.full((5, 3), float(step))
        chunk = Chunk("weights", (0, 0), (5, 3), (5, 3), torch.float32)
        self.saver.begin(Snapshot(state=state, layers=2, chunks={chunk: self.data}, also=also))
        if wait:
            self.saver.wait()

    def steps(self) -> list[str]:
        return sorted(path.name for path in self.directory.iterdir())

    def newest(self) -> Path | None:
        return newest_whole(self.config, self.everyone, self.said.append)


@pytest.fixture
def saving(tmp_path: Path, everyone: dist.ProcessGroup) -> Saving:
    return Saving(tmp_path, everyone)


def test_the_old_one_goes_only_when_the_new_one_is_complete(saving: Saving) -> None:
    saving.save(1)
    saving.go_on.clear()
    saving.save(2, wait=False)
    saving.data.fill_(-1)  # training goes on
    assert saving.steps() == ["partial_step_000002", "step_000001"]
    assert not saving.saver.look()
    saving.go_on.set()
    saving.saver.wait()
    assert saving.steps() == ["step_000002"]
    read = torch.empty(5, 3)
    ChunkReader(saving.directory / "step_000002").read("weights", (0, 0), read)
    assert torch.equal(read, torch.full((5, 3), 2.0))
    assert first_fault(saving.directory / "step_000002") is None
    files = set(json.loads((saving.directory / "step_000002/manifest.json").read_text())["files"])
    assert files == {path.name for path in (saving.directory / "step_000002").iterdir()} - {"manifest.json"}


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "own.txt"), "own.txt: No space left on device"),
        (MemoryError("of it"), "MemoryError: of it"),
        (UserError("as it is"), "as it is"),
    ],
)
def test_a_save_that_fails_leaves_nothing_and_the_one_before(saving: Saving, fault: Exception, said: str) -> None:
    saving.save(1)
    saving.save(2, wait=False, fault=fault)
    with pytest.raises(UserError) as caught:
        saving.saver.wait()
    target = saving.directory / "step_000002"
    assert str(caught.value) == f"{target} could not be saved: {said}; the checkpoints before it are whole"
    assert saving.steps() == ["step_000001"]
    saving.save(3)
    assert saving.steps() == ["step_000003"]


@pytest.mark.parametrize("name", ["finish", "write_manifest"])
def test_a_full_disk_in_the_last_files_is_told_too(saving: Saving, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    saving.save(1)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module, name, full)
    with pytest.raises(UserError, match="No space left on device"):
        saving.save(2)
    assert "step_000001" in saving.steps()
    assert not [step for step in saving.steps() if step.startswith("partial")]


def test_a_rank_that_is_silent_is_given_up(saving: Saving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOK_S", 0.1)
    monkeypatch.setattr(module.dist, "get_world_size", lambda group: 2)  # and the other one never says anything
    with pytest.raises(UserError, match=r"rank 1 has written nothing for 2 s \(collective_timeout_s\)"):
        saving.save(1)
    assert saving.steps() == []


def damage(checkpoint: Path, how: str) -> str:
    file = checkpoint / "__0_0.distcp"
    if how == "shorter":
        os.truncate(file, 100)
        return f"{file} has 100 bytes, "
    if how == "missing":
        file.unlink()
        return f"{file} is missing"
    if how == "other bytes":
        data = bytearray(file.read_bytes())
        data[777] ^= 4
        file.write_bytes(data)
        return f"{file} has other bytes than were written"
    if how == "no manifest":
        (checkpoint / manifest.NAME).unlink()
        return f"{checkpoint}/manifest.json is missing: it was not finished, or written by a version before"
    (checkpoint / manifest.NAME).write_text('{"files": {}}')
    return f"{checkpoint}/manifest.json: lists no files"


@pytest.mark.parametrize("how", ["shorter", "missing", "other bytes", "no manifest", "empty manifest"])
def test_a_damaged_one_is_named_and_passed_over(how: str, tmp_path: Path, everyone: dist.ProcessGroup) -> None:
    saving = Saving(tmp_path, everyone, keep=2)
    saving.save(1)
    saving.save(2)
    said = damage(saving.directory / "step_000002", how)
    assert saving.newest() == saving.directory / "step_000001"
    assert f"warning: {saving.directory / 'step_000002'} is damaged and not used: {said}" in saving.said[-1]
    assert saving.steps() == ["step_000001", "step_000002"]
    damage(saving.directory / "step_000001", how)
    with pytest.raises(UserError, match=r"no checkpoint is whole: .*move the directory away to begin anew"):
        saving.newest()


def test_going_on_from_before_a_damaged_one_does_not_count_it(tmp_path: Path, everyone: dist.ProcessGroup) -> None:
    saving = Saving(tmp_path, everyone, keep=1)
    saving.save(4)
    damage(saving.directory / "step_000004", "missing")
    saving.save(3)
    assert saving.steps() == ["step_000003", "step_000004"]
    assert saving.newest() == saving.directory / "step_000003"
    saving.save(4)  # takes the name
    assert saving.steps() == ["step_000004"]
    assert saving.newest() == saving.directory / "step_000004"


def test_a_file_that_cannot_be_read_is_no_damage(saving: Saving, monkeypatch: pytest.MonkeyPatch) -> None:
    saving.save(1)

    def broken(path: Path, *_: object) -> list[int]:
        raise OSError(errno.EIO, "Input/output error", str(path))

    monkeypatch.setattr(manifest, "fingerprint", broken)
    with pytest.raises(UserError, match=r"Input/output error; nothing was changed"):
        saving.newest()


def test_what_was_unfinished_goes_at_the_next_start(saving: Saving) -> None:
    saving.save(1)
    for name in ("partial_step_000002", "partial_removed_000000"):
        (saving.directory / name).mkdir()
        (saving.directory / name / "x").touch()
    tidy(saving.directory)
    assert saving.steps() == ["step_000001"]


# ---- which stay


def kept(*figures: float | None) -> list[Kept]:
    """Of steps 1, 2, ..."""
    return [Kept(step, figure) for step, figure in enumerate(figures, 1)]


@pytest.mark.parametrize(
    ("options", "figures", "stay"),
    [
        ({"keep": 2}, [None] * 6, [5, 6]),
        ({"keep": 1, "keep_every": 2}, [None] * 6, [2, 4, 6]),
        ({"keep": 1, "keep_every": 2}, [None] * 5, [2, 4, 5]),
        ({"keep": 1, "keep_best": "a"}, [0.1, 0.7, 0.7, 0.2, None], [3, 5]),  # of equal ones the newer
        ({"keep": 1, "keep_best": "a", "best_is": "lowest"}, [0.1, 0.7, 0.1, 0.2, None], [3, 5]),
        ({"keep": 1, "keep_best": "a"}, [0.1, math.nan, 0.3, 0.2], [2, 3, 4]),  # it can't be told of 2
        ({"keep": 1, "keep_best": "a"}, [None, None, None], [3]),
    ],
)
def test_which_stay(options: dict[str, Any], figures: list[float | None], stay: list[int]) -> None:
    found = kept(*figures)
    gone = outdated(found, CheckpointConfig.model_validate(options), newest=len(found))
    assert [one.step for one in found if one.step not in gone] == stay


def test_those_of_later_steps_neither_go_nor_count() -> None:
    assert outdated(kept(None, None, None, None), CheckpointConfig(keep=1), newest=2) == [1]


def test_the_best_survives_other_runs_of_the_program(tmp_path: Path, everyone: dist.ProcessGroup) -> None:
    for step, figure in ((1, 0.2), (2, 0.9), (3, 0.5), (4, None), (5, 0.9)):
        saving = Saving(tmp_path, everyone, keep_best="eval/accuracy")  # as after a resume
        saving.save(step, figure=figure)
        best = {1: 1, 2: 2, 3: 2, 4: 2, 5: 5}[step]
        assert saving.steps() == sorted({f"step_00000{best}", f"step_00000{step}"})


# ---- stopping


def test_a_budget_leaves_time_for_a_step_and_its_save() -> None:
    budget = TimeBudget(100.0, begun=0.0)
    assert budget.spent(10.0, now=5.0) is None
    assert budget.spent(10.0, now=25.0) is None  # a step of 20
    assert budget.spent(10.0, now=30.0) is None  # of 5: the longest counts
    assert budget.spent(10.0, now=70.0) is not None  # 40 + 40 + 10 would be fine, 70 + 40 + 10 is not
    late = TimeBudget(100.0, begun=0.0)
    assert late.spent(30.0, now=71.0) is None  # one step is always made
    assert late.spent(30.0, now=75.0) == "stop.after: 75 of 100 s are gone, a step takes up to 4 s, saving 30 s"
    assert TimeBudget(None, begun=0.0).spent(1e9, now=1e9) is None


@pytest.mark.parametrize(
    ("text", "seconds"), [("3h50m", 13800), ("45m", 2700), ("90s", 90), ("90", 90), (90, 90), ("1d2h", 93600)]
)
def test_times_are_written_as_people_do(text: Any, seconds: int) -> None:
    assert StopConfig.model_validate({"after": text}).after == seconds


@pytest.mark.parametrize("text", ["", "h", "3 hours", "50m3h", "-5", "0", "1.5h"])
def test_other_times_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="after"):
        StopConfig.model_validate({"after": text})


def test_the_stop_file_is_taken_once(tmp_path: Path) -> None:
    assert not take_stop_file(tmp_path)
    (tmp_path / "stop").touch()
    assert take_stop_file(tmp_path)
    assert not take_stop_file(tmp_path)


# ---- rectangles


@pytest.mark.parametrize("size", [(7,), (1, 5), (4, 3), (3, 1)])
def test_any_run_of_elements_is_at_most_three_rectangles(size: tuple[int, ...]) -> None:
    whole = torch.arange(torch.Size(size).numel()).view(size)
    for start in range(whole.numel() + 1):
        for stop in range(start, whole.numel() + 1):
            found, next_one = [], start
            for begin, offset, extent in cut(start, stop, size):
                assert begin == next_one
                rectangle = whole[tuple(slice(o, o + e) for o, e in zip(offset, extent, strict=True))]
                assert rectangle.shape == extent
                found += rectangle.flatten().tolist()
                next_one += rectangle.numel()
            assert found == list(range(start, stop))
            assert len(list(cut(start, stop, size))) <= 3
