"""Everything here is marked `sglang`: it needs the environment of `make sglang-env`, and takes minutes."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import Qwen2ForCausalLM

from megatron_rl.resharding.names import Shape
from megatron_rl.rollout.options import SglangConfig
from megatron_rl.rollout.sglang_buckets import Buckets
from megatron_rl.rollout.sglang_control import SglangControl
from megatron_rl.rollout.sglang_server import SglangServer
from tests.e2e.conftest import job
from tests.tiny import write_model

__all__ = ["job"]  # the fixture, one for all

PYTHON = Path(__file__).parents[2] / ".venv-sglang/bin/python"
SHAPE = Shape(layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16, intermediate=128, vocab=37, tied=False)
"""Two key-value heads, and twice 64 for the intermediate size, so that TP 2 divides them also on a CPU."""

POSITIONS = 8192

Model = tuple[Path, Qwen2ForCausalLM]
"""A model directory and the model that was written to it."""

ARGUMENTS = ["--max-total-tokens", "16384"]
ENVIRONMENT = {"HF_HUB_OFFLINE": "1"}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what lies in this folder, and skip it where it wasn't asked for."""
    asked = "sglang" in config.getoption("markexpr")
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.sglang)
            if not asked:
                item.add_marker(pytest.mark.skip(reason="make test-sglang runs it"))
            elif not PYTHON.exists():
                item.add_marker(pytest.mark.skip(reason=f"there is no {PYTHON}; make sglang-env makes it"))


def cpu_config(**options: object) -> SglangConfig:
    """A server on a CPU."""
    values = {"python": PYTHON, "extra_args": ARGUMENTS, "environment": ENVIRONMENT}
    return SglangConfig.model_validate({**values, "start_timeout_s": 400, **options})


def server_of(config: SglangConfig, model: Path, log_file: Path) -> SglangServer:
    """The server, not started."""
    return SglangServer(config, model, number=0, tensor_parallel_size=1, gpus=(), dtype="float32", log_file=log_file)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Qwen2ForCausalLM]:
    """A model directory (read it only) and the model that was written to it."""
    directory = tmp_path_factory.mktemp("sglang") / "model"
    return directory, write_model(directory, SHAPE, seed=3, max_position_embeddings=POSITIONS)


def push(control: SglangControl, model: Qwen2ForCausalLM, version: int, bucket_bytes: int = 40_000) -> int:
    """Bring a model's weights to a server of one rank, in several buckets; how many."""
    buckets = Buckets(torch.device("cpu"), bucket_bytes)
    control.begin_update()
    count = 0
    for held, last in buckets.fill(model.named_parameters()):
        control.update([buckets.payload(held)], load_format="flattened_bucket", version=version if last else None)
        count += 1
    control.end_update()
    return count


@pytest.fixture(scope="session")
def server(model: tuple[Path, Qwen2ForCausalLM], tmp_path_factory: pytest.TempPathFactory) -> Iterator[SglangServer]:
    """The one server that most tests share. It has made-up weights until `control` brings it the model's."""
    running = server_of(cpu_config(), model[0], tmp_path_factory.mktemp("log") / "server.log")
    running.start()
    yield running
    running.stop()


@pytest.fixture
def control(server: SglangServer, model: tuple[Path, Qwen2ForCausalLM]) -> Iterator[SglangControl]:
    """Its control plane; it has the weights of `model`, in version 3."""
    told = SglangControl(server.url, server.admin_key)
    push(told, model[1], version=3)
    yield told
    told.close()
