"""Runs that are killed at any moment and go on as if nothing had happened; and how they stop by themselves."""

import json
import random
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from checkpoints_tools.hf_to_megatron import hf_to_megatron
from checkpoints_tools.inspect import describe
from checkpoints_tools.megatron_to_hf import megatron_to_hf
from megatron_rl.errors import UserError
from megatron_rl.resharding.torch_dist import ChunkReader
from megatron_rl.telemetry.writer import read_metrics
from tests.e2e.conftest import Job, start, write_rows
from tests.e2e.test_runs import wait_for_steps, without_times

STEPS, KILLS = 8, 10
TP1, TP2, PP2 = (
    "trainer.tensor_parallel_size=1",
    "trainer.tensor_parallel_size=2",
    "trainer.pipeline_parallel_size=2",
)
SMALL = (
    *(f"steps={STEPS}", "checkpoint.every=1", "checkpoint.keep=1", "rollout.prompts_per_step=5"),
    *("algorithm.loss=tests.e2e.functions:noisy_loss", "evaluation.every=3", "evaluation.samples_per_prompt=1"),
    *("algorithm.loss_kwargs={}", "rollout.responses_per_prompt=4", "checkpoint.export_hf=false"),
)
"""Steps, evaluations, an epoch's end, and a loss that draws random numbers."""


def small(job: Job) -> list[str]:
    """Options of a run whose epoch ends within a step."""
    few, some = (write_rows(job, name, count, lambda place: {}) for name, count in (("few", 12), ("some", 7)))
    return [*SMALL, f"data.train={few}", f"data.eval={some}"]


def tensors(run: Path) -> dict[str, torch.Tensor]:
    """All of the newest checkpoint, whole."""
    newest = max((run / "checkpoints").glob("step_*"))
    reader = ChunkReader(newest)
    found = {}
    for key, tensor in reader.tensors.items():
        found[key] = torch.full(tuple(tensor.size), torch.nan, dtype=tensor.properties.dtype)
        reader.read(key, (0,) * len(tensor.size), found[key])
    return found


def state(run: Path) -> dict[str, Any]:
    newest = max((run / "checkpoints").glob("step_*"))
    found: dict[str, Any] = json.loads((newest / "run_state.json").read_text())
    found["collector"].pop("work")  # with what was thrown away, which depends on timing
    return found


def assert_same(run: Path, whole: Path) -> None:
    """Bit by bit, and each step once."""
    rows, expected = (without_times(read_metrics(one / "metrics.jsonl")) for one in (run, whole))
    assert rows == expected
    ours, theirs = (sorted((one / "samples").iterdir()) for one in (run, whole))
    assert [path.name for path in ours] == [path.name for path in theirs]
    assert all(a.read_text() == b.read_text() for a, b in zip(ours, theirs, strict=True))
    found, wanted = tensors(run), tensors(whole)
    assert found.keys() == wanted.keys()
    assert any(key.startswith("optimizer.state.exp_avg_sq") for key in found)
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)
    assert state(run) == state(whole)


@pytest.mark.parametrize(
    ("name", "options", "processes"),
    [
        ("one", (TP1, "trainer.distributed_optimizer=false"), 1),
        ("two", (TP1, "trainer.distributed_optimizer=true"), 2),
    ],
)
def test_killed_at_random_moments_it_equals_the_run_that_was_not(
    job: Job, name: str, options: tuple[str, ...], processes: int
) -> None:
    whole = job.train(f"never_killed_{name}", *small(job), *options, processes=processes)
    run, command = (
        job.directory / f"killed_{name}",
        job.command(f"killed_{name}", *small(job), *options, processes=processes),
    )
    draw, killed, saving = random.Random(5), 0, 0
    while killed < KILLS:
        process = start(command)
        if killed % 3 == 0:  # in the midst of a save
            saving += caught(run, draw)
        elif killed % 3 == 1:  # between two
            before, deadline = len(read_metrics(run / "metrics.jsonl")), time.monotonic() + 120
            while len(read_metrics(run / "metrics.jsonl")) <= before and process.poll() is None:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            time.sleep(draw.uniform(0, 0.2))
        else:  # while it starts, or just after
            time.sleep(draw.uniform(2, 8))
        if process.poll() is not None:  # it was done before
            break
        end_all(process.pid)
        process.communicate(timeout=60)
        killed += 1
    process = start(command)
    out, error = process.communicate(timeout=240)
    assert process.returncode == 0, error[-3000:]
    assert killed >= 4, out
    assert saving >= 1
    assert_same(run, whole)
    assert not list((run / "checkpoints").glob("partial_*"))
    again = start(command)  # a finished run
    out, error = again.communicate(timeout=240)
    assert again.returncode == 0, error[-3000:]
    assert_same(run, whole)


def caught(run: Path, draw: random.Random) -> bool:
    """Wait until a checkpoint is being written, or for some seconds; whether it was. The killed ones' don't count."""
    begun, deadline = time.time(), time.monotonic() + 20
    wait = draw.choice((0.0, 0.002, 0.01))
    while time.monotonic() < deadline:
        for partial in (run / "checkpoints").glob("partial_step_*"):
            with suppress(FileNotFoundError):
                if partial.stat().st_mtime > begun:
                    time.sleep(wait)
                    return True
        time.sleep(0.0005)
    return False


def end_all(pid: int) -> None:
    """SIGKILL a process and what it started."""
    import psutil

    parent = psutil.Process(pid)
    for process in (parent, *parent.children(recursive=True)):
        try:
            process.send_signal(signal.SIGKILL)
        except psutil.NoSuchProcess:
            continue


@pytest.mark.parametrize(("first", "then"), [((TP1, TP2), (TP1, PP2)), ((TP1,), (TP1, TP2))])
def test_another_layout_goes_on_from_it(job: Job, first: tuple[str, ...], then: tuple[str, ...]) -> None:
    name = f"layouts_{len(first)}"
    options = (*small(job), "algorithm.loss=ppo_clip", "evaluation.every=null", "data.eval=null")
    whole = job.train(f"{name}_whole", *options, *first, "steps=3", processes=2)
    job.train(name, *options, *first, "steps=2", processes=2)
    run = job.train(name, *options, *then, "steps=3", processes=2)
    found, wanted = tensors(run), tensors(whole)
    assert found.keys() == wanted.keys()
    for key, tensor in wanted.items():
        if "qkv.bias" in key:
            continue  # gradients of key biases are rounding, of which Adam takes the sign
        assert (found[key] - tensor).norm() < 1e-3 * tensor.norm(), key
    rows, expected = (read_metrics(one / "metrics.jsonl") for one in (run, whole))
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert rows[2]["batch/reward"] == pytest.approx(expected[2]["batch/reward"], abs=0.2)


def test_training_starts_from_either_format_and_its_checkpoint_goes_home(job: Job) -> None:
    base, converted = job.directory / "base_seed0", job.directory / "base_megatron"
    hf_to_megatron(base, converted)
    options = (TP1, TP2, "trainer.dtype=bfloat16")
    runs = [
        job.train(f"from_{model.name}", *options, f"model.path={model}", processes=2) for model in (base, converted)
    ]
    assert_same(runs[1], runs[0])
    ours, theirs = (load_file(run / "hf/model.safetensors") for run in runs)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)

    newest = runs[1] / "checkpoints/step_000002"
    megatron_to_hf(newest, job.directory / "home")
    home = load_file(job.directory / "home/model.safetensors")
    assert home.keys() == ours.keys()
    assert all(torch.equal(home[name], ours[name]) for name in ours)
    said = "\n".join(describe(newest))
    assert "step         2 (4 optimizer steps)" in said
    assert "tensor 2, pipeline 1" in said
    file = next(newest.glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(UserError, match=r"is damaged: .*distcp has "):
        megatron_to_hf(newest, job.directory / "nowhere")


def test_stop_file_and_time_budget(job: Job) -> None:
    command = job.command("stops", "steps=3000", TP1, "checkpoint.every=null", "checkpoint.export_hf=false")
    run = job.directory / "stops"
    process = start(command)
    wait_for_steps(run, 2)
    (run / "stop").touch()
    out, error = process.communicate(timeout=60)
    assert process.returncode == 75, error[-3000:]
    assert "asked to stop by the stop file; stopping after step " in out
    assert not (run / "stop").exists()
    saved = state(run)["step"]
    assert saved >= 2

    begun = time.monotonic()
    timed = start([*command, "stop.after=20s"])
    out, error = timed.communicate(timeout=90)
    assert timed.returncode == 75, error[-3000:]
    assert time.monotonic() - begun < 26  # the last save is done before; then the process ends
    assert f"going on after step {saved}" in out
    assert "stop.after: " in out
    assert state(run)["step"] > saved
