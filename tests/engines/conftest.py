"""Everything here is marked `sglang`: it needs the environment of `make sglang-env`, and takes minutes."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import Qwen2ForCausalLM

from megatron_rl.resharding.names import Shape
from megatron_rl.rollout.options import SglangConfig
from megatron_rl.rollout.sglang_server import SglangServer
from tests.tiny import write_model

PYTHON = Path(__file__).parents[2] / ".venv-sglang/bin/python"
SHAPE = Shape(layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16, intermediate=96, vocab=37, tied=False)
"""Two key-value heads, so that TP 2 divides them."""

CPU_ARGS = (
    "--device cpu --attention-backend torch_native --sampling-backend pytorch --disable-cuda-graph --dtype float32 "
    "--max-total-tokens 16384"
).split()
CPU_ENVIRONMENT = {"SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


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
    values = {"python": PYTHON, "extra_args": CPU_ARGS, "environment": CPU_ENVIRONMENT}
    return SglangConfig.model_validate({**values, "start_timeout_s": 400, **options})


def server_of(config: SglangConfig, model: Path, log_file: Path) -> SglangServer:
    """The server, not started."""
    return SglangServer(config, model, number=0, tensor_parallel_size=1, gpus=(), log_file=log_file)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Qwen2ForCausalLM]:
    """A model directory (read it only) and the model that was written to it."""
    directory = tmp_path_factory.mktemp("sglang") / "model"
    return directory, write_model(directory, SHAPE, seed=3, max_position_embeddings=512)


@pytest.fixture(scope="session")
def server(model: tuple[Path, Qwen2ForCausalLM], tmp_path_factory: pytest.TempPathFactory) -> Iterator:
    """The one server that most tests share."""
    running = server_of(cpu_config(), model[0], tmp_path_factory.mktemp("log") / "server.log")
    running.start()
    yield running
    running.stop()
