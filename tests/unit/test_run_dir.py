"""A run directory that can't be used is refused at once, and two runs never share one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_rl.errors import UserError
from megatron_rl.run_dir import RunLock, check_run_dir


@pytest.mark.parametrize("name", ["", "checkpoints", "samples", "tensorboard", "hf"])
def test_a_file_where_a_folder_is_needed_is_named(name: str, tmp_path: Path) -> None:
    stands = tmp_path / "run" / name
    stands.parent.mkdir(exist_ok=True)
    stands.write_text("")
    with pytest.raises(UserError, match=f"^run_dir: {stands} is not a directory"):
        check_run_dir(tmp_path / "run")


@pytest.mark.parametrize("name", ["config.yaml", "metrics.jsonl"])
def test_a_folder_where_a_file_is_needed_is_named(name: str, tmp_path: Path) -> None:
    (tmp_path / name).mkdir()
    with pytest.raises(UserError, match=name):
        check_run_dir(tmp_path)


def test_a_directory_below_a_file_or_without_permission_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="can't be made or written to"):
        check_run_dir(tmp_path / "file/run")
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # tests may run as root, who may write anywhere
    with pytest.raises(UserError, match="can't be made or written to"):
        check_run_dir(tmp_path / "new/run")


def test_nothing_is_made_by_checking(tmp_path: Path) -> None:
    check_run_dir(tmp_path / "new/run")
    assert not (tmp_path / "new").exists()


def test_a_second_run_is_refused_until_the_first_has_ended(tmp_path: Path) -> None:
    with RunLock(tmp_path / "run"), pytest.raises(UserError, match="another run is writing to"):
        RunLock(tmp_path / "run")
    with RunLock(tmp_path / "run"):
        pass


def test_a_killed_run_holds_nothing(tmp_path: Path) -> None:
    program = (
        "import os, pathlib, sys; from megatron_rl.run_dir import RunLock; "
        "lock = RunLock(pathlib.Path(sys.argv[1])); os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", program, tmp_path / "run"]).returncode == -9
    with RunLock(tmp_path / "run"):
        pass
