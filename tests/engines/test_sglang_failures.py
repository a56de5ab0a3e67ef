"""Whole runs whose SGLang servers are killed or stopped in mid-rollout."""

import json
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from megatron_rl.telemetry.batches import read_batch
from megatron_rl.telemetry.writer import batch_file, read_metrics
from tests.e2e.conftest import Job, prompt_order, start
from tests.engines.conftest import PYTHON
from tests.engines.processes import writing_to

PROMPTS = 8
SETTINGS = [
    "rewards.grader=tests.engines.failing:grade",
    "trainer.tensor_parallel_size=1",
    "algorithm.preset=grpo",  # every group is trained on, so the batch of a step is known before
    f"rollout.prompts_per_step={PROMPTS}",
    "checkpoint.every=null",
    "telemetry.keep_batches=9",
]
SGLANG = [
    "rollout.engine=sglang",
    f"rollout.sglang.python={PYTHON}",
    "rollout.sglang.extra_args=[--max-total-tokens,'16384']",
    "rollout.sglang.max_concurrent_prompts=1",  # so that there is work left when the first answer is graded
    "rollout.sglang.hung_after_s=10",
]


@dataclass(frozen=True)
class Failure:
    """What happens to a server as soon as the first answer of `step` is graded."""

    step: int
    engine: int
    signal: str


@dataclass(frozen=True)
class Ended:
    """A run that has ended."""

    directory: Path
    code: int
    said: str
    hit: list[int]
    """Processes that got a signal."""

    seconds: float
    """From the last of these signals to the end."""

    def batch(self, step: int) -> list[tuple[int, int]]:
        """Row and size of each group."""
        groups, _ = read_batch(batch_file(self.directory, step))
        return [(group.prompt.index, len(group.responses)) for group in groups]

    def log(self, engine: int) -> Path:
        """Of a server."""
        return self.directory / f"engines/{engine}/server.log"


def run(job: Job, name: str, *overrides: str, failures: list[Failure], processes: int = 1) -> Ended:
    """Train with servers that fail."""
    directory = job.directory / name
    data = job.directory / f"{name}.jsonl"
    rows = [json.loads(line) for line in (job.directory / "data_seed0/train.jsonl").read_text().splitlines()][:100]
    drawn = prompt_order(len(rows), len(rows))
    onces = [job.directory / f"{name}_{number}" for number in range(len(failures))]
    for once, failure in zip(onces, failures, strict=True):
        log = directory / f"engines/{failure.engine}/server.log"
        fail = {"signal": failure.signal, "log": str(log), "once": str(once)}
        for row in drawn[(failure.step - 1) * PROMPTS : failure.step * PROMPTS]:
            rows[row]["fail"] = fail
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    process = start(job.command(name, *SETTINGS, f"data.train={data}", *overrides, processes=processes))
    try:
        out, error = process.communicate(timeout=400)
    except subprocess.TimeoutExpired:
        process.terminate()
        out, error = process.communicate(timeout=60)
        raise AssertionError(out[-2000:] + error[-3000:]) from None
    hit = [int(number) for once in onces for number in once.read_text().split()]
    seconds = time.time() - max((once.stat().st_mtime for once in onces), default=0)
    return Ended(directory, process.returncode, out + error, hit, seconds)


@pytest.fixture(scope="module")
def undisturbed(job: Job) -> Ended:
    """The same run with an engine that can't fail."""
    return run(job, "undisturbed", "steps=4", failures=[])


def test_a_run_goes_on_with_a_server_killed_and_another_hung(job: Job, undisturbed: Ended) -> None:
    """SGLang promises no seeds, so answers depend on who samples; prompts and their order do not."""
    failures = [Failure(step=2, engine=0, signal="SIGKILL"), Failure(step=3, engine=1, signal="SIGSTOP")]
    ended = run(job, "disturbed", *SGLANG, "steps=4", failures=failures, processes=2)
    assert ended.code == 0, ended.said[-3000:]
    rows = read_metrics(ended.directory / "metrics.jsonl")
    assert [row["work/engines_lost"] for row in rows] == [0, 1, 1, 0]
    for row in rows:
        assert row["parity/max"] < 1e-4  # of both engines: those that were started again have the right weights
        assert row["mismatch/logprob_abs"] < 1e-5
    for step in (1, 2, 3, 4):
        assert ended.batch(step) == undisturbed.batch(step)
        assert {size for _, size in ended.batch(step)} == {6}
    assert "engine 0 was lost: engine 0: the SGLang server ended with exit code -9; the end of " in ended.said
    assert "engine 1 was lost: engine 1: its SGLang server gave no sign of life for " in ended.said
    for engine in (0, 1):
        assert f"engine {engine} is started again, 1 of 3: " in ended.said
        assert ended.log(engine).read_text().count("Uvicorn running") == 2
        assert writing_to(ended.log(engine)) == []
    assert not any(alive(process) for process in ended.hit)


def test_the_only_server_is_started_again_until_it_may_not_be(job: Job, undisturbed: Ended) -> None:
    """The first time the run goes on with the same step; the second time it saves the step before and ends."""
    failures = [Failure(step=2, engine=0, signal="SIGKILL"), Failure(step=3, engine=0, signal="SIGKILL")]
    ended = run(job, "only", *SGLANG, "rollout.engine_restarts=1", "steps=4", failures=failures)
    assert ended.code == 2, ended.said[-3000:]
    assert ended.said.count("all engines were lost; they are started again and get the weights once more") == 1
    rows = read_metrics(ended.directory / "metrics.jsonl")
    assert [row["work/engines_lost"] for row in rows] == [0, 1]
    assert all(row["parity/max"] < 1e-4 and row["mismatch/logprob_abs"] < 1e-5 for row in rows)
    assert [ended.batch(step) for step in (1, 2)] == [undisturbed.batch(step) for step in (1, 2)]
    check_given_up(ended, engine=0, limit=1, saved=2)


def test_without_restarts_the_last_step_is_saved_and_all_ranks_end(job: Job) -> None:
    failures = [Failure(step=2, engine=1, signal="SIGKILL")]
    ended = run(job, "given_up", *SGLANG, "rollout.engine_restarts=0", failures=failures, processes=2)
    assert ended.code == 2, ended.said[-3000:]
    check_given_up(ended, engine=1, limit=0, saved=1)
    assert ended.seconds < 15  # the launcher kills a rank that hangs after 20


@pytest.mark.parametrize("restarts", [0, 1])
def test_a_server_that_dies_while_all_train_leaves_no_rank_alone(job: Job, restarts: int) -> None:
    """It sleeps then, and is missed when it is to wake."""
    name = f"asleep_{restarts}"
    log, once = job.directory / name / "engines/1/server.log", job.directory / f"{name}_once"
    how = ["algorithm.loss=tests.engines.failing:loss", f"algorithm.loss_kwargs={{log: {log}, once: {once}}}"]
    limit = f"rollout.engine_restarts={restarts}"
    ended = run(job, name, *SGLANG, *how, limit, "steps=2", failures=[], processes=2)
    assert once.read_text()
    if restarts:
        assert ended.code == 0, ended.said[-3000:]
        rows = read_metrics(ended.directory / "metrics.jsonl")
        assert [row["work/engines_lost"] for row in rows] == [0, 1]
        assert all(row["parity/max"] < 1e-4 and row["mismatch/logprob_abs"] < 1e-5 for row in rows)
    else:
        assert ended.code == 2, ended.said[-3000:]
        check_given_up(ended, engine=1, limit=0, saved=1)


def check_given_up(ended: Ended, engine: int, limit: int, saved: int) -> None:
    """One error, the last finished step in a checkpoint, and nothing of any server left."""
    errors = [line for line in ended.said.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, ended.said[-3000:]
    assert errors[0].startswith(
        f"error: engine {engine} was lost and may not be started again (rollout.engine_restarts is {limit})"
    )
    assert "Traceback" not in ended.said
    assert [path.name for path in (ended.directory / "checkpoints").iterdir()] == [f"step_{saved:06d}"]
    for log in (ended.directory / "engines").glob("*/server.log"):
        assert writing_to(log) == []


def alive(process: int) -> bool:
    return Path(f"/proc/{process}").exists()
