"""Runs whose graders hang, crash and disagree about what a grade is."""

import json
import time
from pathlib import Path
from typing import Any

from megatron_rl.telemetry.writer import read_metrics
from tests.e2e.conftest import Job, start, write_rows
from tests.e2e.graders import sha256
from tests.e2e.test_runs import DP2, refusal

GRPO = "algorithm.preset=grpo"  # no dynamic sampling: all that is sampled is trained on
FAST = (GRPO, "checkpoint.export_hf=false", "telemetry.tensorboard=false", "rewards.workers=2")


def files_of(directory: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in sorted(directory.rglob("*")) if path.is_file()}


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

    before = files_of(run / "checkpoints")
    refusal(
        job.command("failing", *settings, "steps=3", "rewards.grader=tests.e2e.graders:mostly_nan", processes=2),
        "error: rewards.max_ungraded: step 3: ",
    )
    assert files_of(run / "checkpoints") == before != {}


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
