"""The demo, as `make demo` starts it, in each layout."""

import re

import pytest

from megatron_rl.telemetry.writer import read_metrics
from tests.e2e.conftest import RECIPE, Job, start

PARTIAL = ["rollout.partial=true", "rollout.max_staleness=2"]
ASYNC = ["rollout.placement=separate", "rollout.ranks=1", "rollout.async_steps=1"]


@pytest.mark.parametrize(("layout", "settings"), [("tp2", []), ("pp2", PARTIAL), ("cp2", []), ("dp2", ASYNC)])
def test_the_demo_learns(job: Job, layout: str, settings: list[str]) -> None:
    """Alike in each layout, with answers that pause, and one step ahead of the trainer."""
    command = job.command("unused")[:3]
    where = ["--layout", layout, "--directory", str(job.directory), "--recipe", str(RECIPE)]
    demo = start([*command, "demo", *where, *settings])
    out, error = demo.communicate(timeout=400)
    assert demo.returncode == 0, error[-3000:]
    last = re.fullmatch(r"held-out accuracy: (\d\.\d\d) -> (\d\.\d\d)", out.strip().splitlines()[-1])
    assert last is not None, out[-2000:]
    before, after = map(float, last.groups())
    assert 0.25 < before < 0.45
    assert after >= 0.9
    run = job.directory / f"{layout}_seed0"
    assert (run / "curves.png").stat().st_size > 10_000
    rows = [row for row in read_metrics(run / "metrics.jsonl") if "train/grad_norm" in row]
    assert len(rows) == 40
    of_other_weights = max(row["mismatch/logprob_abs"] for row in rows) > 1e-5
    assert of_other_weights == bool(settings)
    assert rows[-1]["rollout/length"] > rows[0]["rollout/length"] + 3  # it learned to write out the sum
