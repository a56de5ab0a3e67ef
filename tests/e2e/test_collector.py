"""Batches over the borders of epochs, of steps and of a run: what is left over, also in checkpoints."""

import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from megatron_rl.telemetry.batches import read_batch
from megatron_rl.telemetry.writer import batch_file, read_metrics
from tests.e2e.conftest import Job, prompt_order, start, write_rows
from tests.e2e.test_graders import GRPO, samples
from tests.e2e.test_runs import DP2, without_times

FAST = (
    *(DP2, "algorithm.updates_per_rollout=1", "rewards.workers=2"),
    *("telemetry.tensorboard=false", "telemetry.keep_batches=9", "checkpoint.every=null"),
)
STALE = ("rollout.max_staleness=1",)


def batch_rows(run: Path, step: int) -> list[int]:
    """Places of a training batch's prompts; every group is whole."""
    groups, _ = read_batch(batch_file(run, step))
    assert {len(group.responses) for group in groups} <= {6}
    return [group.prompt.index - 1 for group in groups]


def test_a_data_set_smaller_than_a_batch(job: Job) -> None:
    """Five prompts, eight a step: every batch has an epoch's end in it, some have two."""
    data = write_rows(job, "five", 5, lambda place: {})
    run = job.train("five", *FAST, GRPO, f"data.train={data}", "steps=5")
    drawn = [row for step in range(1, 6) for row in batch_rows(run, step)]
    assert drawn == prompt_order(5, 40)
    assert all(sorted(drawn[first : first + 5]) == [0, 1, 2, 3, 4] for first in range(0, 40, 5))
    saved = [[row["prompt_index"] - 1 for row in samples(run, step)[::6]] for step in range(1, 6)]
    assert [row for step in saved for row in step] == drawn
    # A prompt that comes twice in a batch has other answers the second time.
    first = samples(run, 1)
    again = next(n for n in range(1, 8) if drawn[n] in drawn[:n])
    before = drawn.index(drawn[again])
    texts = [[row["response"] for row in first[6 * n : 6 * n + 6]] for n in (before, again)]
    assert texts[0] != texts[1]


def test_what_is_left_over_is_in_the_checkpoint(job: Job) -> None:
    """All groups are alike in the first step and not later. Parts equal the whole, groups that were left over too."""
    # The first step draws one batch, then, as it kept none, four at once in each of its three further rounds.
    first_step = set(prompt_order(400, 8 + 3 * 32))
    data = write_rows(job, "uniform", 400, lambda place: {"uniform": place in first_step})
    settings = (*FAST, *STALE, f"data.train={data}", "rewards.grader=tests.e2e.graders:by_row")
    whole = job.train("left_whole", *settings, "steps=4")
    rows = read_metrics(whole / "metrics.jsonl")
    assert [row["rollout/groups_kept"] for row in rows] == [0, 8, 8, 8]
    assert rows[0]["rollout/rounds"] == 4
    assert rows[0]["rollout/samples"] == 6 * 104
    assert "train/grad_norm" not in rows[0]
    assert all(row["train/grad_norm"] > 0 for row in rows[1:])
    assert rows[1]["rollout/groups_left_over"] > 0  # it drew by the keep rate of the first
    assert rows[2]["rollout/staleness"] > 0

    parts = job.train("left_parts", *settings, "steps=2")
    left = load_file(next((parts / "checkpoints/step_000002").glob("leftover_*.safetensors")))
    assert len(left["position"].unique()) == rows[1]["rollout/groups_left_over"]
    shutil.copytree(parts, job.directory / "left_dp2")
    job.train("left_parts", *settings, "steps=4")
    assert without_times(read_metrics(parts / "metrics.jsonl")) == without_times(rows)
    for step in (1, 2, 3, 4):
        assert samples(parts, step) == samples(whole, step)
    ours, theirs = (load_file(run / "hf/model.safetensors") for run in (parts, whole))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)

    other = job.train("left_dp2", *settings, "steps=4", processes=2)
    for step in (2, 3, 4):
        assert batch_rows(other, step) == batch_rows(whole, step)


def test_the_batches_are_the_same_to_the_bit_whenever_graders_are_done(job: Job) -> None:
    """On two engines, with groups that are left out, further rounds, and groups that are left over."""
    settings = (*FAST, *STALE, "steps=3")
    quick = job.train("quick", *settings, "rewards.grader=tests.e2e.graders:coin", processes=2)
    rows = without_times(read_metrics(quick / "metrics.jsonl"))
    assert max(row["rollout/rounds"] for row in rows) > 1
    other = job.train("now_and_then", *settings, "rewards.grader=tests.e2e.graders:now_and_then", processes=2)
    assert without_times(read_metrics(other / "metrics.jsonl")) == rows
    for step in (1, 2, 3):
        assert samples(other, step) == samples(quick, step)


def test_answers_pause_and_go_on_in_the_next_step_and_the_next_run(job: Job) -> None:
    """Where an answer pauses depends on the time that grading takes; what becomes of it doesn't."""
    data = write_rows(job, "partial", 100, lambda place: {})
    # An engine that samples two answers at once is still at the ninth group when the eighth, the last, is graded.
    settings = [*FAST, *STALE, GRPO, f"data.train={data}", "rollout.partial=true", "rollout.max_concurrent=2"]
    settings += ["rewards.grader=tests.e2e.graders:slow", "checkpoint.every=1", "checkpoint.keep=9"]
    run = job.train("partial", *settings, "steps=6")
    check_pauses(run, steps=6)
    rows = read_metrics(run / "metrics.jsonl")
    assert sum(row["work/continued"] for row in rows) > 0
    assert all(row["work/stopped"] <= 2 for row in rows)  # what only waited in the engine's queue was not begun
    versions = [answer["weight_versions"] for step in range(1, 7) for answer in samples(run, step)]
    assert any(len(each) == 2 and each[1] == each[0] + 1 for each in versions)

    assert left_in(run, 6)
    shutil.copytree(run, job.directory / "partial_dp2")
    other = job.train("partial_dp2", *settings, "steps=8", processes=2)
    check_pauses(other, steps=8)
    assert read_metrics(other / "metrics.jsonl")[6]["rollout/staleness"] > 0

    left = run / "checkpoints/step_000006/leftover_00000.safetensors"
    left_bytes = left.stat().st_size
    left.write_bytes(left.read_bytes()[:-100])
    process = start(job.command("partial", *settings, "steps=7", processes=2))
    out, error = process.communicate(timeout=120)
    assert process.returncode == 0, error[-3000:]
    assert f"{left} has {left_bytes - 100} bytes, {left_bytes} were written" in out
    assert "going on after step 5" in out
    assert [row["step"] for row in read_metrics(run / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6, 7]


def check_pauses(run: Path, steps: int) -> None:
    """Batches are in prompt order, and begin answers with the tokens of the checkpoint of the step before."""
    drawn = [row for step in range(1, steps + 1) for row in batch_rows(run, step)]
    assert drawn == prompt_order(100, 8 * steps)
    for step in range(1, steps + 1):
        groups, _ = read_batch(batch_file(run, step))
        for place, group in enumerate(groups):
            for sample, answer in enumerate(group.responses):
                assert answer.response is not None
                versions = list(answer.response.weight_versions)
                assert versions == sorted(versions)
                assert set(versions) <= {step - 2, step - 1}  # the weights of step n have n − 1 updates behind them
                begun = left_in(run, step - 1).get((8 * (step - 1) + place, sample))
                if begun:
                    assert list(answer.response.ids[: len(begun)]) == begun
                    assert set(versions[: len(begun)]) == {step - 2}
                assert versions.count(step - 2) == len(begun or ())


def left_in(run: Path, step: int) -> dict[tuple[int, int], list[int]]:
    """By position in the stream and number of the sample: tokens that the checkpoint of a step has."""
    found: dict[tuple[int, int], list[int]] = {}
    for path in (run / f"checkpoints/step_{step:06d}").glob("leftover_*.safetensors"):
        columns: dict[str, Any] = load_file(path)
        tokens = columns["ids"].split(columns["length"].tolist())
        for position, sample, ids in zip(columns["position"].tolist(), columns["sample"].tolist(), tokens, strict=True):
            found[position, sample] = ids.tolist()
    return found
