"""Local processes: what they are told, how their ends become one exit code, and that they don't outlive the launcher.

In place of `python -m megatron_rl ARGUMENTS` a shell runs the first argument as a program, in the same environment.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_rl import local_launch
from megatron_rl.local_launch import launch_local

ROOT = Path(__file__).parents[2]
SHELL = '#!/bin/sh\n[ "$1 $2" = "-m megatron_rl" ] || exit 99\nexec /bin/sh -c "$3"\n'


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What is run instead of Python, in an empty folder."""
    script = tmp_path / "shell"
    script.write_text(SHELL)
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    return script


def wait_for(*files: Path) -> None:
    deadline = time.monotonic() + 20
    while not all(file.exists() for file in files):
        assert time.monotonic() < deadline, files
        time.sleep(0.01)


@pytest.mark.usefixtures("shell")
@pytest.mark.parametrize(
    ("program", "code"),
    [
        ("exit 0", 0),
        ("exit 75", 75),
        ("[ $RANK = 1 ] && exit 0; sleep 1; exit 4", 4),
        ("[ $RANK = 2 ] && exit 7; exit 0", 7),
        ("[ $RANK = 0 ] && exit 2; sleep 2; exit 3", 2),
        ("[ $RANK = 2 ] && exit 3; sleep 2; exit 2", 3),
        ("[ $RANK = 1 ] && kill -KILL $$; exit 0", 128 + signal.SIGKILL),
        ("[ $RANK = 1 ] && kill -TERM $$; sleep 2; exit 1", 128 + signal.SIGTERM),
    ],
)
def test_the_exit_code_is_that_of_the_first_that_failed(program: str, code: int) -> None:
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    assert launch_local(3, [program]) == code
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == handlers


@pytest.mark.usefixtures("shell")
def test_after_a_failure_the_others_may_end_by_themselves() -> None:
    assert launch_local(2, ["[ $RANK = 0 ] && exit 5; sleep 0.3; touch ended"]) == 5
    assert Path("ended").exists()


@pytest.mark.usefixtures("shell")
def test_those_that_do_not_are_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_launch, "GRACE_S", 0.1)
    begun = time.monotonic()
    assert launch_local(3, ["[ $RANK = 1 ] && exit 5; exec sleep 30"]) == 5
    assert launch_local(3, ["[ $RANK = 1 ] && exit 0; exec sleep 30"]) == 128 + signal.SIGKILL
    assert time.monotonic() - begun < 15


@pytest.mark.usefixtures("shell")
@pytest.mark.parametrize("threads", [None, "3"])
def test_a_process_is_told_its_place(threads: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if threads:
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")
    assert launch_local(2, [f"echo {' '.join(f'${name}' for name in names)} > of_$RANK"]) == 0
    first, second = (dict(zip(names, Path(f"of_{rank}").read_text().split(), strict=True)) for rank in (0, 1))
    assert (first["RANK"], first["LOCAL_RANK"], second["RANK"], second["LOCAL_RANK"]) == ("0", "0", "1", "1")
    assert first | {"RANK": "1", "LOCAL_RANK": "1"} == second
    assert (first["WORLD_SIZE"], first["LOCAL_WORLD_SIZE"], first["MASTER_ADDR"]) == ("2", "2", "127.0.0.1")
    assert 0 < int(first["MASTER_PORT"]) < 2**16
    assert first["OMP_NUM_THREADS"] == (threads or str(max(1, (os.cpu_count() or 1) // 2)))


LOOP = "touch ready_$RANK; while :; do sleep 0.05; done"


@pytest.fixture
def launcher(shell: Path) -> Callable[[str], "subprocess.Popen[bytes]"]:
    """Starts a launcher of two processes in a process of its own, and waits until both run."""

    def start(program: str) -> "subprocess.Popen[bytes]":
        driver = (
            "import sys; from megatron_rl.local_launch import launch_local\n"
            "sys.executable = sys.argv[1]; sys.exit(launch_local(2, sys.argv[2:]))"
        )
        python = Path(sys.prefix) / "bin" / "python"
        process = subprocess.Popen(
            [python, "-c", driver, shell, program + LOOP], env={**os.environ, "PYTHONPATH": str(ROOT)}
        )
        wait_for(Path("ready_0"), Path("ready_1"))
        return process

    return start


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_passed_on_and_the_processes_say_how_it_ends(
    number: signal.Signals, launcher: Callable[[str], "subprocess.Popen[bytes]"]
) -> None:
    process = launcher("trap 'sleep 0.2; touch saved_$RANK; exit 75' TERM; ")
    process.send_signal(number)
    assert process.wait(20) == 75
    assert Path("saved_0").exists()
    assert Path("saved_1").exists()


def test_a_killed_launcher_leaves_no_process_behind(launcher: Callable[[str], "subprocess.Popen[bytes]"]) -> None:
    process = launcher("trap 'touch ended_$RANK; exit' TERM; ")
    process.kill()
    assert process.wait(20) == -signal.SIGKILL
    wait_for(Path("ended_0"), Path("ended_1"))


def test_the_real_command_says_its_mistake_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(tmp_path)
    assert launch_local(2, ["train", "missing.yaml"]) == 2
    assert capfd.readouterr().err == "error: missing.yaml: no such recipe\n"
