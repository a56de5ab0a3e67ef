"""Engines on ranks of their own: the same numbers as beside the trainer, and one step ahead of it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megatron_rl.telemetry.writer import read_metrics
from tests.e2e.conftest import Job, start

TP1, TP2 = "trainer.tensor_parallel_size=1", "trainer.tensor_parallel_size=2"
SEPARATE = ["rollout.placement=separate", "rollout.ranks=1"]
OF_PLACE = ("seconds/", "memory/", "work/")
"""Metrics that depend on time, or on who shares a process with whom."""


def rows(run: Path) -> list[dict[str, Any]]:
    found = read_metrics(run / "metrics.jsonl")
    return [{key: value for key, value in row.items() if not key.startswith(OF_PLACE)} for row in found]


def weights_are_equal(run: Path, other: Path) -> bool:
    ours, theirs = (load_file(each / "hf/model.safetensors") for each in (run, other))
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)


def samples(run: Path, step: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / f"samples/step_{step:06d}.jsonl").read_text().splitlines()]


def test_a_rank_that_only_samples_changes_no_number(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # two threads sum in another order
    beside = job.train("beside", TP1, "steps=3")
    apart = job.train("apart", TP1, "steps=3", *SEPARATE, processes=2)
    assert rows(apart) == rows(beside)
    assert [samples(apart, step) for step in (1, 2, 3)] == [samples(beside, step) for step in (1, 2, 3)]
    assert weights_are_equal(apart, beside)


def test_a_step_is_sampled_while_the_one_before_is_trained_on_and_goes_on_exactly(job: Job) -> None:
    """Two ranks train (TP 2), one samples; the divergence goes through the reward, so that all ranks need it."""
    settings = [TP2, *SEPARATE, "rollout.async_steps=1", "algorithm.kl.coef=0.05", "algorithm.kl.place=reward"]
    whole = job.train("ahead_whole", "steps=5", "checkpoint.every=1", "checkpoint.keep=5", *settings, processes=3)
    for step in range(1, 6):
        versions = {version for row in samples(whole, step) for version in row["weight_versions"]}
        assert versions == {2 * max(0, step - 2)}  # two optimizer steps a rollout step
    assert all(row["mismatch/correction"] > 0 for row in rows(whole))  # on by default
    assert rows(whole)[0]["mismatch/logprob_abs"] < 1e-5 < rows(whole)[3]["mismatch/logprob_abs"]
    parts = job.train("ahead_parts", "steps=5", "checkpoint.every=1", "checkpoint.keep=5", *settings, processes=3)
    assert rows(parts) == rows(whole)
    # As if it had been killed after step 3, when step 4 was sampled already.
    for step in (4, 5):
        checkpoint = parts / f"checkpoints/step_{step:06d}"
        for file in sorted(checkpoint.rglob("*"), reverse=True):
            file.unlink()
        checkpoint.rmdir()
    assert max(path.name for path in (parts / "checkpoints").iterdir()) == "step_000003"
    job.train("ahead_parts", "steps=5", *settings, processes=3)
    assert rows(parts) == rows(whole)
    assert samples(parts, 4) == samples(whole, 4)
    assert weights_are_equal(parts, whole)


def test_somebody_has_to_train(job: Job) -> None:
    process = start(job.command("nobody", "rollout.placement=separate", "rollout.ranks=2", TP1, processes=2))
    _, error = process.communicate(timeout=60)
    assert process.returncode == 2, error
    assert "rollout.ranks: 2 of 2 processes can't sample while others train" in error
