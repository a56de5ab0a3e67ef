"""Wrong weights in a real engine end the run in the step in which they are pushed; right ones leave their figures."""

import math
import subprocess
import sys

import pytest

from megatron_rl.telemetry.writer import read_metrics
from tests.e2e.conftest import ROOT, Job

DP1, TP2, PP2 = (
    f"trainer.{name}_parallel_size={size}" for name, size in (("tensor", 1), ("tensor", 2), ("pipeline", 2))
)
FAST = ("rollout.prompts_per_step=4", "rollout.responses_per_prompt=4", "algorithm.preset=grpo")


def spoilt(job: Job, run: str, what: str, when: int, *overrides: str) -> "subprocess.CompletedProcess[str]":
    """Train on two processes with an engine that does `what` in its `when`-th update."""
    program = job.command(run, *FAST, *overrides)[3:-2]  # without the interpreter, -m megatron_rl and --processes
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launcher, "-m", "tests.e2e.spoilt", what, str(when), *program]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=ROOT)


@pytest.mark.parametrize("layout", [TP2, PP2])
def test_each_update_is_checked_and_leaves_nothing_undefined(job: Job, layout: str) -> None:
    name = f"parity_{layout[8:10]}"
    ended = spoilt(job, name, "nothing", 0, DP1, layout, "steps=3")
    assert ended.returncode == 0, ended.stderr[-3000:]
    for rank in (0, 1):
        for update in (1, 2, 3):
            assert f"rank {rank}, update {update}: finite True" in ended.stdout
    rows = read_metrics(job.directory / name / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3]
    for row in rows:
        assert 0 <= row["parity/mean"] <= row["parity/max"] < 1e-5
        assert row["parity/mean_exp"] == pytest.approx(1, abs=1e-5)
        assert row["train/grad_norm"] > 0  # so that there were updates


def test_the_check_is_in_the_row_of_the_first_rollout_after_the_update(job: Job) -> None:
    heldout = job.directory / "data_seed0/heldout.jsonl"
    evaluation = ("evaluation.every=1", "evaluation.samples_per_prompt=1", "evaluation.greedy=true")
    run = job.train("parity_eval", *FAST, DP1, f"data.eval={heldout}", *evaluation, "checkpoint.every=null")
    found = [(row["step"], "eval/accuracy" in row, "parity/mean" in row) for row in read_metrics(run / "metrics.jsonl")]
    assert found == [(0, True, True), (1, False, False), (1, True, True), (2, False, False), (2, True, True)]
    assert all(math.isfinite(row.get("parity/max", 0)) for row in read_metrics(run / "metrics.jsonl"))


@pytest.mark.parametrize(
    ("what", "when", "expected"),
    [
        ("skips a tensor", 1, "differ by"),
        ("swaps gate and up", 2, "differ by"),
        ("ignores the update", 1, "differ by"),
        ("ignores the update", 3, "has the weights of the update before"),
    ],
)
def test_wrong_weights_are_caught_in_their_step(job: Job, what: str, when: int, expected: str) -> None:
    name = f"spoilt_{what.split()[0]}_{when}"
    ended = spoilt(job, name, what, when, DP1, TP2, "steps=4", "reshard.verify=never")
    said = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
    assert len(said) == 1, ended.stderr[-3000:]
    assert said[0].startswith(f"error: parity: step {when}: ")
    assert expected in said[0]
    assert len(read_metrics(job.directory / name / "metrics.jsonl")) == when - 1  # those before were right


def test_a_first_update_that_is_not_that_of_a_gather_is_named(job: Job) -> None:
    ended = spoilt(job, "spoilt_first", "swaps gate and up", 1, DP1, TP2, "steps=2")
    said = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
    assert ended.returncode != 0
    assert said[0].startswith("error: reshard: model.layers.0.mlp.gate_proj.weight on rank ")
