"""The program as users start it: presets, their own functions, stopping and going on."""

import json
import math
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_rl.telemetry.writer import read_metrics
from tests.e2e.conftest import Job, start


def without_times(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without what differs from run to run: seconds, the memory of the process, work that was thrown away."""
    return [{k: v for k, v in row.items() if not k.startswith(("seconds/", "memory/peak", "work/"))} for row in rows]


TP2, PP2, DP2 = "trainer.tensor_parallel_size=2", "trainer.pipeline_parallel_size=2", "trainer.tensor_parallel_size=1"


PRESETS_IN = {
    **{"grpo": DP2, "dapo": TP2, "dapo_batch": DP2, "dr_grpo": PP2, "rloo": TP2, "gspo": TP2, "cispo": PP2},
    **{"dapo_ladder_2": PP2},
}


@pytest.mark.parametrize(("preset", "layout"), PRESETS_IN.items())
def test_every_preset_trains(job: Job, preset: str, layout: str) -> None:
    run = job.train(
        f"preset_{preset}", f"algorithm.preset={preset}", DP2, layout, "rollout.responses_per_prompt=3", processes=2
    )
    rows = read_metrics(run / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        assert row["train/grad_norm"] > 0
        assert row["mismatch/logprob_abs"] < 1e-5  # the engine sampled with the trainer's weights, in every step
        assert all(value is not None and math.isfinite(value) for value in row.values())
    mixed = rows[0]["rollout/mixed_groups"]
    assert 0 < mixed < 1
    # Some leave out the groups that are all right or all wrong, and draw further prompts for them.
    assert (rows[0]["rollout/rounds"] > 1) == (preset in ("dapo", "dapo_batch", "cispo"))


@pytest.mark.parametrize("place", ["loss", "reward"])
def test_kl_entropy_bonus_and_correction_train_and_resume(job: Job, place: str) -> None:
    """The reference policy is that of the beginning, also after going on: the parts equal the whole."""
    settings = [PP2, DP2, "algorithm.kl.coef=0.2", f"algorithm.kl.place={place}", "algorithm.entropy_coef=0.01"]
    settings += ["algorithm.correction.mode=mask", "algorithm.correction.floor=0.5", "algorithm.updates_per_rollout=1"]
    whole = job.train(f"kl_{place}_whole", "steps=3", *settings, processes=2)
    job.train(f"kl_{place}_parts", "steps=2", *settings, processes=2)
    parts = job.train(f"kl_{place}_parts", "steps=3", *settings, processes=2)
    rows, expected = (without_times(read_metrics(run / "metrics.jsonl")) for run in (parts, whole))
    assert rows == expected
    name = {"loss": "policy/kl", "reward": "batch/kl"}[place]
    assert abs(rows[0][name]) < 1e-3 < rows[2][name]  # the policy leaves the reference behind
    assert all(row["mismatch/correction"] == pytest.approx(1, abs=1e-4) for row in rows)


def test_a_loss_and_a_grader_of_ones_own(job: Job) -> None:
    run = job.train(
        "own_functions",
        DP2,
        "algorithm.loss=tests.e2e.functions:signed_loss",
        "algorithm.loss_kwargs.scale=2.5",
        "rewards.grader=tests.e2e.functions:last_digit",
        "rewards.max_ungraded=1",
    )
    rows = read_metrics(run / "metrics.jsonl")
    assert [row["loss/scale"] for row in rows] == [2.5, 2.5]
    samples = [json.loads(line) for line in (run / "samples/step_000001.jsonl").read_text().splitlines()]
    assert samples
    for sample in samples:
        if sample["prompt_index"] % 5 == 0:  # the grader raised: ungraded is not wrong
            assert sample["score"] is None
        else:
            assert sample["score"] == float(sample["response"][-1:] == sample["answer"])
    assert 0 < sum(row["rollout/ungraded"] for row in rows) < 2


def test_a_run_leaves_what_the_readme_promises(job: Job) -> None:
    run = job.train("leaves", TP2, processes=2)
    assert (run / "config.yaml").exists()
    assert list((run / "tensorboard").glob("events.*"))
    assert [path.name for path in sorted((run / "samples").iterdir())] == ["step_000001.jsonl", "step_000002.jsonl"]
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step_000002"]
    model, tokenizer = AutoModelForCausalLM.from_pretrained(run / "hf"), AutoTokenizer.from_pretrained(run / "hf")
    ids = tokenizer("123=", return_tensors="pt").input_ids
    assert model(ids).logits.shape == (1, 5, 23)
    base = load_file(job.directory / "base_seed0/model.safetensors")
    trained = load_file(run / "hf/model.safetensors")
    assert trained.keys() == base.keys()
    assert all(not torch.equal(trained[name], base[name]) for name in base)


def test_a_run_that_was_stopped_goes_on_as_if_it_was_not(job: Job) -> None:
    whole = job.train("whole", "steps=10", TP2, processes=2)
    command = job.command("stopped", "steps=10", TP2, processes=2)
    stopped = job.directory / "stopped"
    process = start(command)
    wait_for_steps(stopped, 2)
    process.send_signal(signal.SIGTERM)
    time.sleep(0.1)
    process.send_signal(signal.SIGTERM)  # as schedulers do: still one wish
    out, error = process.communicate(timeout=60)
    assert process.returncode == 75, error[-3000:]
    assert "asked to stop" in out
    saved = [path.name for path in (stopped / "checkpoints").iterdir()]
    assert len(saved) == 1
    assert saved[0] < "step_000010"

    again = start(command)
    out, error = again.communicate(timeout=240)
    assert again.returncode == 0, error[-3000:]
    assert f"going on after step {int(saved[0][-6:])}" in out
    rows, expected = (without_times(read_metrics(run / "metrics.jsonl")) for run in (stopped, whole))
    assert rows == expected
    for step in range(1, 11):
        name = f"samples/step_{step:06d}.jsonl"
        assert (stopped / name).read_text() == (whole / name).read_text()
    ours, theirs = (load_file(run / "hf/model.safetensors") for run in (stopped, whole))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_two_runs_in_one_directory_are_refused(job: Job) -> None:
    first = start(job.command("twice", "steps=3000", DP2))
    wait_for_steps(job.directory / "twice", 1)
    refusal(job.command("twice", "steps=3000", DP2), "error: run_dir: another run is writing to ")
    first.send_signal(signal.SIGTERM)
    first.communicate(timeout=60)
    assert first.returncode == 75


def test_a_damaged_checkpoint_is_named_and_the_one_before_goes_on(job: Job) -> None:
    run = job.train("damaged", "steps=2", "checkpoint.every=1", TP2, processes=2)
    before, newest = run / "checkpoints/step_000001", run / "checkpoints/step_000002"
    file = next(newest.glob("*.distcp"))
    whole = file.read_bytes()
    file.write_bytes(whole[:999] + bytes([whole[999] ^ 1]) + whole[1000:])
    process = start(job.command("damaged", "steps=3", "checkpoint.every=3", TP2, processes=2))
    out, error = process.communicate(timeout=240)
    assert process.returncode == 0, error[-3000:]
    assert f"warning: {newest} is damaged and not used: {file} has other bytes than were written" in out
    assert f"going on after step 1, from {before}" in out
    assert [row["step"] for row in read_metrics(run / "metrics.jsonl")] == [1, 2, 3]

    for checkpoint in (run / "checkpoints").glob("step_*"):
        (checkpoint / ".metadata").unlink()
    refusal(job.command("damaged", "steps=4", TP2, processes=2), f"error: {run}/checkpoints: no checkpoint is whole: ")


def test_a_full_disk_stops_the_run_and_leaves_the_checkpoint_before(job: Job) -> None:
    run = job.train("full", "steps=1", TP2, "telemetry.tensorboard=false", processes=2)
    command = job.command("full", "steps=2", TP2, "telemetry.tensorboard=false", processes=2)
    refusal([sys.executable, "-c", FULL_DISK, *command], f"error: {run}/checkpoints/step_000002 could not be saved: ")
    assert [path.name for path in (run / "checkpoints").glob("step_*")] == ["step_000001"]
    job.train("full", "steps=2", TP2, processes=2)


FULL_DISK = """import os, resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))  # a file that would be longer: the write fails
os.execv(sys.argv[1], sys.argv[1:])"""


def refusal(command: list[str], begins: str) -> None:
    """Run a command that must end with one line of error and exit code 2."""
    process = start(command)
    _, error = process.communicate(timeout=120)
    assert process.returncode == 2, error[-3000:]
    said = [line for line in error.splitlines() if line.startswith("error: ")]
    assert len(said) == 1
    assert said[0].startswith(begins)
    assert "Traceback" not in error


def test_going_on_with_other_data_or_another_seed_is_refused(job: Job) -> None:
    job.train("resumed", DP2)
    for change, word in (
        (f"data.train={job.directory / 'data_seed0/heldout.jsonl'}", "data.train"),
        ("seed=5", "seed"),
    ):
        refusal(job.command("resumed", "steps=3", DP2, change), f"error: {word}: ")


def test_torchrun_starts_it_and_stops_it(job: Job) -> None:
    program = job.command("torchrun", "steps=30", TP2, processes=2)[1:-2]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *program]
    process = start(command)
    wait_for_steps(job.directory / "torchrun", 2)
    process.send_signal(signal.SIGTERM)
    out, error = process.communicate(timeout=90)
    assert "asked to stop" in out, error[-3000:]
    saved = [path.name for path in (job.directory / "torchrun/checkpoints").glob("step_*")]
    assert len(saved) == 1
    again = start([*command, f"steps={int(saved[0][-6:]) + 1}"])
    out, error = again.communicate(timeout=240)
    assert again.returncode == 0, error[-3000:]
    assert f"going on after step {int(saved[0][-6:])}" in out


def test_bfloat16_trains_and_resumes_exactly(job: Job) -> None:
    settings = ("trainer.dtype=bfloat16", TP2)
    whole = job.train("bf16_whole", "steps=3", *settings, processes=2)
    job.train("bf16_parts", "steps=2", *settings, processes=2)
    parts = job.train("bf16_parts", "steps=3", *settings, processes=2)
    rows, expected = (without_times(read_metrics(run / "metrics.jsonl")) for run in (parts, whole))
    assert rows == expected
    assert 1e-5 < max(row["mismatch/logprob_abs"] for row in rows) < 2e-2  # two implementations, rounded to 8 bits
    ours, theirs = (load_file(run / "hf/model.safetensors") for run in (parts, whole))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert all(tensor.dtype == torch.bfloat16 for tensor in theirs.values())


def wait_for_steps(run: Path, steps: int) -> None:
    deadline = time.monotonic() + 120
    while len(read_metrics(run / "metrics.jsonl")) < steps:
        assert time.monotonic() < deadline
        time.sleep(0.05)
