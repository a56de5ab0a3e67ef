"""Plans carried out by real processes: every engine's parameters are right, update after update, from NaN."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.distributed.carry import plans
from tests.distributed.data import MODELS
from tests.tiny import write_model

Found = list[dict[str, list[str]]]


def launch(module: str, directory: Path, saved: str) -> Found:
    """What each of four processes found."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    command = [*torchrun, "-m", f"tests.distributed.{module}", str(directory)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return [torch.load(directory / f"{saved}_{rank}.pt") for rank in range(4)]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What was wrong, by rank and plan."""
    return launch("carry", tmp_path_factory.mktemp("carried"), "carried")


@pytest.mark.parametrize("name", plans())
def test_every_engine_has_its_shards_after_each_update(found: Found, name: str) -> None:
    assert [of_rank[name] for of_rank in found] == [[]] * 4


def test_a_bit_that_is_flipped_on_the_way_is_named(found: Found) -> None:
    for rank, of_rank in enumerate(found):
        told, *_ = of_rank["a bit is flipped"]
        assert "model.embed_tokens.weight[" in told
        assert f"is not what rank {rank} loaded into model.embed_tokens.weight (row 0, column 0)" in told


def test_four_ranks_push_a_real_models_weights_into_embedded_engines(tmp_path: Path) -> None:
    for kind, (shape, rope) in MODELS.items():
        write_model(tmp_path / kind, shape, 7, rms_norm_eps=1e-5, rope_parameters=rope)
    for of_rank in launch("pushing", tmp_path, "pushed"):
        (told,) = of_rank.pop("gate and up swapped")
        assert told.startswith("reshard: model.layers.0.mlp.gate_proj.weight on rank 0 has other values by the plan")
        assert of_rank == {kind: [] for kind in MODELS}
