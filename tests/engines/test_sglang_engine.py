"""The engine of two Megatron ranks, and a whole run with it, on real servers of TP 2 and TP 1."""

import subprocess
import sys
from pathlib import Path

import pytest

from megatron_rl.telemetry.writer import read_metrics
from tests.e2e.conftest import Job
from tests.engines.conftest import PYTHON, Model
from tests.engines.processes import writing_to


@pytest.mark.parametrize(("layout", "engines"), [("tp2", 1), ("tp2pp2", 2)])
def test_ranks_push_their_weights_into_servers_of_two(layout: str, engines: int, model: Model, tmp_path: Path) -> None:
    (tmp_path / "model").symlink_to(model[0])
    torchrun = [str(Path(sys.executable).with_name("torchrun")), "--standalone", "--nproc-per-node", str(2 * engines)]
    command = [*torchrun, "-m", "tests.engines.worker", layout, str(tmp_path), str(PYTHON)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    assert sorted(done.stdout.splitlines()) == sorted(
        engines * [f"version {version} is right" for version in (0, 1, 2)]
    )
    for engine in range(engines):
        log = tmp_path / f"run_{layout}/engines/{engine}/server.log"
        assert "POST /update_weights_from_tensor" in log.read_text()
        assert writing_to(log) == []


SGLANG = [
    "rollout.engine=sglang",
    f"rollout.sglang.python={PYTHON}",
    "rollout.sglang.extra_args=[--max-total-tokens,'16384']",
]


def test_a_run_samples_with_a_server_for_each_rank(job: Job) -> None:
    run = job.train("sglang", *SGLANG, "trainer.tensor_parallel_size=2", processes=2)
    for row in read_metrics(run / "metrics.jsonl"):
        assert row["train/grad_norm"] > 0
        assert row["mismatch/logprob_abs"] < 1e-5  # in every step the weights are the trainer's
        assert 0 < row["parity/max"] < 1e-4
    for engine in (0, 1):
        log = run / f"engines/{engine}/server.log"
        assert "POST /update_weights_from_tensor" in log.read_text()
        assert writing_to(log) == []
