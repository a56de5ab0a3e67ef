"""Runs of the real program on the demo's model and data."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.data.stream import PromptStream
from megatron_rl.demo.base_model import make_base_model
from megatron_rl.demo.task import heldout_problems, training_problems, write_jsonl
from megatron_rl.types import Prompt

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "launch/recipes/demo_arithmetic.yaml"


@dataclass(frozen=True)
class Job:
    """Where the demo's things are, and how to start the program on them."""

    directory: Path

    def command(self, run: str, *overrides: str, processes: int = 1) -> list[str]:
        """`megatron-rl train` on a small cut of the demo."""
        values = {
            "run_dir": self.directory / run,
            "model.path": self.directory / "base_seed0",
            "data.train": self.directory / "data_seed0/train.jsonl",
            "data.eval": "null",
            "steps": 2,
            "rollout.prompts_per_step": 8,
            "rollout.responses_per_prompt": 6,
        }
        settings = [f"{key}={value}" for key, value in values.items()]
        program = [sys.executable, "-m", "megatron_rl", "train", str(RECIPE), *settings, *overrides]
        return [*program, "--processes", str(processes)]

    def train(self, run: str, *overrides: str, processes: int = 1) -> Path:
        """Run it to the end; the run directory."""
        process = start(self.command(run, *overrides, processes=processes))
        _, error = process.communicate(timeout=240)
        assert process.returncode == 0, error[-3000:]
        return self.directory / run


def start(command: list[str]) -> "subprocess.Popen[str]":
    """Start a command in the repository, with its output piped."""
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, env={**os.environ}
    )


def write_rows(job: Job, name: str, count: int, added: Callable[[int], dict[str, Any]]) -> Path:
    """The first rows of the job's data, each with further keys by its place (from 0), as a data set of its own."""
    rows = (job.directory / "data_seed0/train.jsonl").read_text().splitlines()[:count]
    path = job.directory / f"{name}.jsonl"
    path.write_text("".join(json.dumps(json.loads(row) | added(place)) + "\n" for place, row in enumerate(rows)))
    return path


def prompt_order(rows: int, count: int) -> list[int]:
    """Places (from 0) of the first `count` prompts that a run of seed 0 draws from a data set of so many rows."""
    prompts = [Prompt(index=place, text="", ids=(1,), answer="") for place in range(rows)]
    return [prompt.index for _, prompt in PromptStream(prompts, seed=0).draw(count)]


@pytest.fixture(scope="session")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """The demo's model and data, made once."""
    directory = tmp_path_factory.mktemp("demo")
    (directory / "data_seed0").mkdir()
    heldout = heldout_problems(256)
    write_jsonl(directory / "data_seed0/heldout.jsonl", heldout)
    write_jsonl(directory / "data_seed0/train.jsonl", training_problems(2000, 0, heldout))
    make_base_model(directory / "base_seed0", seed=0)
    return Job(directory)
