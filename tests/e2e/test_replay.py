"""A step computed again on one process, from what a run on two processes kept of it."""

import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_rl.rollout.delivery import ALL, LOGPROBS, at_home
from megatron_rl.telemetry.batches import read_batch, write_batch
from megatron_rl.telemetry.writer import read_metrics
from tests.cases.responses import tokens_of
from tests.e2e.conftest import ROOT, Job, start

TP2 = "trainer.tensor_parallel_size=2"


@pytest.fixture(scope="module")
def run(job: Job) -> Path:
    """Two steps with a checkpoint after each, on two ranks that split every matrix."""
    return job.train("replayed", TP2, "checkpoint.every=1", "algorithm.updates_per_rollout=2", processes=2)


def replay(run: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "megatron_rl", "replay", str(run), *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=200, env=None)


def table(out: str) -> dict[str, list[str]]:
    """Rows of the first table, by objective."""
    rows = [
        [cell.strip() for cell in line.strip("│").split("│")]
        for line in out.split("share of")[0].splitlines()
        if line.startswith("│")
    ]
    return {row[0]: row[1:] for row in rows if len(row) == 5 and row[0]}


def test_it_takes_the_optimizer_steps_that_the_run_took(run: Path) -> None:
    ended = replay(run, "--step", "2", "--preset", "dapo", "--preset", "dr_grpo", "--preset", "rloo")
    assert ended.returncode == 0, ended.stderr[-3000:]
    steps = re.findall(r"optimizer step \d: loss (\S+), gradient norm (\S+)", ended.stdout)
    row = read_metrics(run / "metrics.jsonl")[1]
    assert len(steps) == 2
    assert sum(float(loss) for loss, _ in steps) / 2 == pytest.approx(row["loss/objective"], rel=1e-4)
    assert sum(float(norm) for _, norm in steps) / 2 == pytest.approx(row["train/grad_norm"], rel=1e-4)
    assert "all values are finite" in ended.stdout
    found = table(ended.stdout)
    assert list(found) == ["this", "dapo", "dr_grpo", "rloo"]
    assert found["this"][2] == "1.000000"
    assert found["dapo"] == found["this"]  # it is what the recipe trains with
    # RLOO is G/(G − 1) = 6/5 times Dr. GRPO: the same direction, and neither is DAPO's.
    assert found["rloo"][2] == found["dr_grpo"][2] != "1.000000"
    assert float(found["rloo"][1]) == pytest.approx(1.2 * float(found["dr_grpo"][1]), rel=1e-5)


def test_it_finds_what_a_run_failed_from(job: Job) -> None:
    command = job.command("failed", TP2, "algorithm.loss=tests.e2e.functions:spoilt_off_policy", processes=2)
    failed = start(command)
    _, error = failed.communicate(timeout=120)
    assert failed.returncode == 2
    assert "error: objective is nan in optimizer step 2; nothing of this rollout step is saved" in error
    assert "Traceback" not in error
    ended = replay(job.directory / "failed", "--step", "1", "--preset", "dapo")
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert "optimizer step 1: loss" in ended.stdout
    assert re.search(r"not finite: optimizer step 2, prompt \d+, sample \d+: its loss is nan", ended.stdout)
    assert "optimizer step 2 is not finite; the rest was not computed" in ended.stdout


def test_it_names_the_response_that_a_value_which_is_not_finite_came_from(run: Path, tmp_path: Path) -> None:
    path = run / "batches/step_000002.safetensors"
    groups, kl = read_batch(path)
    whole = path.read_bytes()
    spoilt = groups[3].responses[2]
    blocks = at_home([one for group in groups for one in group.responses], rows=ALL)
    number = sum(len(group.responses) for group in groups[:3]) + 2
    blocks[number][LOGPROBS].view(torch.float32)[1] = math.nan
    write_batch(path, groups, blocks, kl)
    ended = replay(run, "--step", "2", "--preset", "grpo")
    path.write_bytes(whole)
    assert ended.returncode == 0, ended.stderr[-3000:]
    token = f"token 1 (id {tokens_of(spoilt).ids[1]})"
    assert f"not finite: prompt {groups[3].prompt.index}, sample 2: the engine's log-prob of {token}" in ended.stdout
    assert "all values are finite" not in ended.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--step", "7"), "the batch of step 7 is not kept (kept: 1, 2)"),
        (("--step", "2", "--preset", "ppo"), "--preset: 'ppo' is not one of grpo, dapo"),
    ],
)
def test_what_it_can_not_replay_it_says_in_one_line(run: Path, arguments: tuple[str, ...], said: str) -> None:
    ended = replay(run, *arguments)
    assert ended.returncode == 2
    assert said in ended.stderr
    assert ended.stderr.count("\n") == 1
