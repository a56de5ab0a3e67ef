"""What a run says, and the picture that it leaves."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_rl.telemetry.curves import draw_curves
from megatron_rl.telemetry.progress import Progress

ROOT = Path(__file__).parents[2]


def test_a_step_is_one_line_with_its_figures_and_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    metrics = {
        "batch/reward": -0.25,
        "rollout/accuracy": 0.5,
        "rollout/length": 7.25,
        "policy/entropy": 1.5,
        "loss/clip_fraction": 0.0125,
        "seconds/rollout": 1.5,
        "seconds/train": 2.25,
    }
    Progress(40, quiet=False).step(3, metrics)
    line = capsys.readouterr().out
    assert line.count("\n") == 1
    assert line.startswith("step  3/40  ")
    for text in (
        "reward -0.250",
        "acc 0.500",
        "len 7.2",
        "entropy 1.500",
        "clip 0.0125",
        "rollout 1.50s",
        "train 2.25s",
    ):
        assert text in line


def test_a_step_without_figures_is_no_reason_to_fail(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress(2, quiet=False)
    progress.step(1, {})
    progress.step(2, {})
    assert capsys.readouterr().out.splitlines()[1].endswith("0s left")


def test_brackets_are_text(capsys: pytest.CaptureFixture[str]) -> None:
    Progress(1, quiet=False).say("runs/[bold]x.jsonl")
    assert capsys.readouterr().out == "runs/[bold]x.jsonl\n"


def test_a_reader_that_went_away_does_not_end_the_run(tmp_path: Path) -> None:
    program = (
        "import time; from megatron_rl.telemetry.progress import Progress\n"
        "progress = Progress(1, quiet=False); progress.say('first'); time.sleep(1)\n"
        "progress.say('lost'); progress.say('lost'); open('went_on', 'w').close()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"first\n"
    process.stdout.close()
    process.wait(20)
    assert (tmp_path / "went_on").exists()


def test_other_ranks_are_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress(2, quiet=True)
    progress.say("x")
    progress.step(1, {"rollout/accuracy": 1.0})
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [{"step": 0, "eval/accuracy": 0.2}],
        [{"step": 1, "rollout/accuracy": 0.2, "policy/entropy": None}, {"step": 2, "rollout/length_right": 3.0}],
    ],
)
def test_curves_are_drawn_from_whatever_rows_there_are(rows: list[dict[str, float]], tmp_path: Path) -> None:
    draw_curves(rows, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
