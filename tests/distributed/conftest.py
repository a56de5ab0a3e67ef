"""Launches each layout once for all tests."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints_tools.hf_to_megatron import hf_to_megatron
from tests.distributed.data import MODELS, converted
from tests.distributed.worker import FEW_LAYOUTS, KINDS, LAYOUTS, OTHER_FAMILIES
from tests.tiny import write_model

EACH_MODEL = [(layout, kind) for kind in KINDS for layout in LAYOUTS]
EACH_MODEL += [(layout, kind) for kind in OTHER_FAMILIES for layout in FEW_LAYOUTS]
Launch = Callable[[str], list[dict[str, Any]]]


@pytest.fixture(scope="session")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Launch:
    """Launches a layout the first time it is asked for; gives what each rank saved."""
    directory = tmp_path_factory.mktemp("layouts")
    ended: dict[str, subprocess.CompletedProcess[str]] = {}
    found: dict[str, list[dict[str, Any]]] = {}
    for kind, (shape, rope) in MODELS.items():
        write_model(directory / kind, shape, 7, rms_norm_eps=1e-5, rope_parameters=rope)
        hf_to_megatron(directory / kind, converted(directory / kind))

    def launch(layout: str) -> list[dict[str, Any]]:
        if layout != "single":
            launch("single")
        if layout not in ended:
            ended[layout] = run(layout, directory)
        assert ended[layout].returncode == 0, ended[layout].stderr[-4000:]
        if layout not in found:
            files = [directory / layout / f"rank_{rank}.pt" for rank in range(LAYOUTS[layout][0])]
            found[layout] = [torch.load(file, weights_only=False) for file in files]
            for rank in found[layout]:
                rank["models"] = {kind: directory / kind for kind in MODELS}
        return found[layout]

    return launch


def run(layout: str, directory: Path) -> "subprocess.CompletedProcess[str]":
    """The worker in all processes of a layout."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(LAYOUTS[layout][0])]
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    command = [*torchrun, *meeting, "-m", "tests.distributed.worker", layout, str(directory)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=480, env=environment)
