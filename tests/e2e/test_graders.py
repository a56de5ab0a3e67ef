"""Runs whose graders hang, crash and disagree about what a grade is."""

import json
import time
from pathlib import Path
from typing import Any

from megatron_rl.telemetry.writer import read_metrics
from tests.e2e.conftest import Job, prompt_order, start, write_rows
from tests.e2e.graders import sha256
from tests.e2e.test_runs import DP2, refusal, without_times

GRPO = "algorithm.preset=grpo"  # no dynamic sampling: all that is sampled is trained on
FAST = (GRPO, "checkpoint.export_hf=false", "telemetry.tensorboard=false", "rewards.workers=2")


def test_answers_whose_grader_fails_are_ungraded_and_too_many_end_the_run(job: Job) -> None:
    """An answer that hangs (one in fifty), crashes, is NaN or a power tower costs its own grade.

    No model of this size writes a power tower; the grader gives one to the library's `math` in place of an answer.
    """
    counter = job.directory / "counter"
    data = write_rows(job, "failing", 100, lambda place: {"counter": str(counter)})
    settings = (*FAST, DP2, f"data.train={data}", "rewards.timeout_s=1")
    process = start(job.command("failing", *settings, "rewards.grader=tests.e2e.graders:failing"))
    begun = time.monotonic()
    _, error = process.communicate(timeout=120)
    assert process.returncode == 0, error[-3000:]
    assert time.monotonic() - begun < 60
    run = job.directory / "failing"
    assert counter.stat().st_size == 96  # two steps of 8 times 6, and nothing was graded twice
    rows = read_metrics(run / "metrics.jsonl")
    assert [round(row["rollout/ungraded"] * 48) for row in rows] == [3, 2]
    assert all(row["train/grad_norm"] > 0 for row in rows)
    for step, count in ((1, 3), (2, 2)):
        assert sum(sample["score"] is None for sample in samples(run, step)) == count
    said = [line.split("an answer is ungraded: ")[1] for line in error.splitlines() if "is ungraded" in line]
    killed = "took longer than 1 s and was killed"  # each reason is said once a step; in the second both took too long
    assert sorted(said) == ["it returned NaN", "its process ended with exit code 3", killed, killed]


def test_a_grader_that_fails_on_too_many_ends_the_run_with_the_last_step_saved(job: Job) -> None:
    """And the run goes on from there when the grader is mended."""
    early = set(prompt_order(100, 16))  # the first two steps
    data = write_rows(job, "late", 100, lambda place: {"early": place in early})
    settings = (*FAST, DP2, f"data.train={data}", "checkpoint.every=null", "steps=3")
    failing = job.command("late", *settings, "rewards.grader=tests.e2e.graders:of_early_rows", processes=2)
    refusal(failing, "error: rewards.max_ungraded: step 3: ")
    run = job.directory / "late"
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step_000002"]
    job.train("late", *settings, "rewards.grader=tests.e2e.graders:coin", processes=2)
    whole = job.train("late_whole", *settings, "rewards.grader=tests.e2e.graders:coin", processes=2)
    assert without_times(read_metrics(run / "metrics.jsonl")) == without_times(read_metrics(whole / "metrics.jsonl"))


def test_each_saved_row_has_the_details_of_its_own_grade(job: Job) -> None:
    """Dicts from one grader and floats from another, on two ranks, in a batch that is packed and balanced."""
    data = write_rows(job, "two_graders", 100, lambda place: {"data_source": "dicts" if place % 2 else "floats"})
    run = job.train(
        "two_graders",
        *FAST,
        DP2,
        f"data.train={data}",
        "rewards.grader=tests.e2e.graders:coin",
        "rewards.graders.dicts=tests.e2e.graders:seen",
        "trainer.max_tokens_per_micro_batch=150",
        "trainer.micro_batch_size=null",
        processes=2,
    )
    for step in (1, 2):
        rows = samples(run, step)
        assert len(rows) == 48
        with_details = [row for row in rows if "details" in row]
        assert 0 < len(with_details) < 48
        for row in rows:
            text = row["response"]
            if "details" in row:
                assert row["details"] == {"row": row["prompt_index"], "sha256": sha256(text), "length": len(text)}
                right = row["finish_reason"] == "stop" and text.count("#") == 1
                assert row["score"] == float(right and text.split("#")[1] == row["answer"])
            else:
                assert row["score"] == int(sha256(text), 16) % 2
        # rows are counted from 1, places in the file from 0
        assert {row["prompt_index"] % 2 for row in with_details} == {0}
        assert {row["prompt_index"] % 2 for row in rows if "details" not in row} == {1}


def samples(run: Path, step: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / f"samples/step_{step:06d}.jsonl").read_text().splitlines()]
