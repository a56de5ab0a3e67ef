"""Whole runs whose SGLang servers are killed or stopped in mid-rollout."""

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path

from megatron_rl.data.stream import PromptStream
from megatron_rl.telemetry.batches import read_batch
from megatron_rl.telemetry.writer import batch_file, read_metrics
from tests.e2e.conftest import Job, job, start
from tests.engines.conftest import PYTHON
from tests.engines.processes import writing_to

__all__ = ["job"]  # the fixture

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

    def batch(self, step: int) -> list[tuple[int, int]]:
        """Row and size of each group."""
        groups, _ = read_batch(batch_file(self.directory, step))
        return [(group.prompt.index, len(group.responses)) for group in groups]

    def log(self, engine: int) -> Path:
        return self.directory / f"engines/{engine}/server.log"


def run(job: Job, name: str, *overrides: str, failures: list[Failure], processes: int = 1) -> Ended:
    """Train with servers that fail."""
    directory = job.directory / name
    data = job.directory / f"{name}.jsonl"
    rows = [json.loads(line) for line in (job.directory / "data_seed0/train.jsonl").read_text().splitlines()][:100]
    order = [number for _, number in PromptStream(range(len(rows)), seed=0).draw(len(rows))]  # type: ignore[arg-type]
    for number, failure in enumerate(failures):
        fail = {
            "signal": failure.signal,
            "log": str(directory / f"engines/{failure.engine}/server.log"),
            "once": str(job.directory / f"{name}_{number}"),
        }
        for row in order[(failure.step - 1) * PROMPTS : failure.step * PROMPTS]:
            rows[row]["fail"] = fail
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    process = start(job.command(name, *SETTINGS, f"data.train={data}", *overrides, processes=processes))
    try:
        out, error = process.communicate(timeout=400)
    except subprocess.TimeoutExpired:
        process.terminate()
        out, error = process.communicate(timeout=60)
        raise AssertionError(out[-2000:] + error[-3000:]) from None
    return Ended(directory, process.returncode, out + error)


def errors(ended: Ended) -> list[str]:
    return [line for line in ended.said.splitlines() if line.startswith("error: ")]


def test_a_run_goes_on_with_a_server_killed_and_another_hung(job: Job) -> None:
    undisturbed = run(job, "undisturbed", "steps=4", failures=[])
    failures = [Failure(step=2, engine=0, signal="SIGKILL"), Failure(step=3, engine=1, signal="SIGSTOP")]
    ended = run(job, "disturbed", *SGLANG, "steps=4", failures=failures, processes=2)
    print(ended.said)
    assert ended.code == 0, ended.said[-3000:]
    rows = read_metrics(ended.directory / "metrics.jsonl")
    for row in rows:
        print({k: row[k] for k in row if k.startswith(("work", "parity", "seconds", "mismatch"))})
    assert [row["work/engines_lost"] for row in rows] == [0, 1, 1, 0]
    for row in rows:
        assert row["parity/max"] < 1e-4
        assert row["mismatch/logprob_abs"] < 1e-5
    for step in (1, 2, 3, 4):
        assert ended.batch(step) == undisturbed.batch(step)
    assert "engine 0 was lost: " in ended.said
    for engine in (0, 1):
        assert writing_to(ended.log(engine)) == []
