"""Fixtures of the unit tests."""

from pathlib import Path

import hypothesis
import pytest
import torch
from transformers import Qwen2ForCausalLM

from tests.tiny import SHAPE, TIED, write_model

hypothesis.settings.register_profile("no deadline", deadline=None)  # a busy machine is no fault of the code
hypothesis.settings.load_profile("no deadline")
torch.set_num_threads(1)  # tiny tensors: more threads only wait for one another


@pytest.fixture(scope="session")
def untied_model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Qwen2ForCausalLM]:
    """A model directory (read it only) and the model that was written to it."""
    directory = tmp_path_factory.mktemp("untied") / "model"
    return directory, write_model(directory, SHAPE, seed=1)


@pytest.fixture(scope="session")
def tied_model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Qwen2ForCausalLM]:
    """The same with the output projection tied to the embedding."""
    directory = tmp_path_factory.mktemp("tied") / "model"
    return directory, write_model(directory, TIED, seed=2)
