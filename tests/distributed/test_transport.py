"""Plans carried out by real processes: every engine's parameters are right, update after update, from NaN."""

import os
import subprocess
import sys

import pytest
import torch

from tests.distributed.carry import plans

Found = list[dict[str, list[str]]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What was wrong, by rank and plan."""
    directory = tmp_path_factory.mktemp("carried")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    command = [*torchrun, "-m", "tests.distributed.carry", str(directory)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return [torch.load(directory / f"carried_{rank}.pt") for rank in range(4)]


@pytest.mark.parametrize("name", plans())
def test_every_engine_has_its_shards_after_each_update(found: Found, name: str) -> None:
    assert [of_rank[name] for of_rank in found] == [[]] * 4


def test_a_bit_that_is_flipped_on_the_way_is_named(found: Found) -> None:
    for rank, of_rank in enumerate(found):
        told, *_ = of_rank["a bit is flipped"]
        assert "model.embed_tokens.weight[" in told
        assert f"is not what rank {rank} loaded into model.embed_tokens.weight (row 0, column 0)" in told
