"""Everything here is marked `gpu`, and skipped with its reason where there is none."""

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_rl.config import Config
from megatron_rl.resharding.names import FAMILIES, Family, Shape
from megatron_rl.training import cpu, setup
from megatron_rl.training.hf_config import read_model_spec
from megatron_rl.training.trainer import Trainer
from tests.tiny import run_config, write_model

SHAPE = Shape(
    layers=4, hidden=256, heads=8, kv_heads=2, head_dim=32, intermediate=384, vocab=1003, tied=False
)  # sizes that Transformer Engine's kernels take
Make = Callable[..., Trainer]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what lies in this folder."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.gpu)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip without a GPU, and without what a test says that it needs."""
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA GPU")
    for mark in item.iter_markers("needs"):
        if importlib.util.find_spec(mark.args[0]) is None:
            pytest.skip(f"{mark.args[0]} is not installed")


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[Family, Path]:
    directories = {family: tmp_path_factory.mktemp(family) for family in FAMILIES}
    for family, directory in directories.items():
        write_model(directory, replace(SHAPE, family=family), seed=5, max_position_embeddings=4096)
    return directories


@pytest.fixture(scope="session")
def model(models: dict[Family, Path]) -> Path:
    return models["qwen2"]


@pytest.fixture(scope="session")
def joined(model: Path) -> Iterator[None]:
    """A world of one."""
    setup.start(config_of(model))
    yield
    setup.stop()


@pytest.fixture
def make(models: dict[Family, Path], joined: None) -> Make:
    """Makes a trainer; options of `trainer`."""

    def trainer(family: Family = "qwen2", **options: Any) -> Trainer:
        config = config_of(models[family], **options)
        return Trainer(config, read_model_spec(config.model.path), SHAPE.vocab - 3)

    return trainer


def config_of(model: Path, **options: Any) -> Config:
    """A config with these options of the trainer."""
    trainer = {"dtype": "bfloat16", "micro_batch_size": 16, "max_tokens_per_micro_batch": 1024, "lr": 1e-3, **options}
    return run_config(model={"path": model}, trainer=trainer)


def device_bytes() -> int:
    """Bytes of the device that this process's allocator has asked the driver for, and needs."""
    torch.cuda.synchronize(cpu.device())
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()
