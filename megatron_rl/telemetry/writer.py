"""What a run leaves to be read: metrics.jsonl, TensorBoard events, samples. Written by rank 0 only."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils.tensorboard import SummaryWriter

from megatron_rl.config import Config
from megatron_rl.files import replace_text, sync
from megatron_rl.telemetry.batches import write_batch
from megatron_rl.types import Graded, Group, Response


class RunWriter:
    """Appends to the files of a run directory; going on from step `step` drops what was written after it."""

    def __init__(self, config: Config, step: int) -> None:
        self.config, directory = config, config.run_dir
        self.metrics_path = directory / "metrics.jsonl"
        self.samples_dir = directory / "samples"
        self.samples_dir.mkdir(parents=True, exist_ok=True)
        kept = [row for row in read_metrics(self.metrics_path) if row["step"] <= step] if step else []
        replace_text(self.metrics_path, "".join(json.dumps(row) + "\n" for row in kept))
        for file in self.samples_dir.glob("step_*.jsonl"):
            if not step or int(file.stem.removeprefix("step_")) > step:
                file.unlink()
        self._file = self.metrics_path.open("a")
        self._board = None
        self._synced = set(self.samples_dir.glob("step_*.jsonl"))
        if config.telemetry.tensorboard:
            self._board = SummaryWriter(str(directory / "tensorboard"), purge_step=step + 1)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """One line of metrics.jsonl; values that are not finite are written as null."""
        row = {"step": step, **{k: v if math.isfinite(v) else None for k, v in metrics.items()}}
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()
        if self._board:
            for name, value in metrics.items():
                self._board.add_scalar(name, value, step)
            self._board.flush()

    def samples(self, step: int, groups: Sequence[Group]) -> None:
        """The responses of a step's first groups, whole, one JSON object for each."""
        rows = [
            _sample_row(group, number, answer, answer.response)
            for group in groups[: self.config.telemetry.samples_per_step]
            for number, answer in enumerate(group.responses)
            if answer.response
        ]
        replace_text(self.samples_dir / f"step_{step:06d}.jsonl", "".join(json.dumps(row) + "\n" for row in rows))

    def batch(
        self, step: int, groups: Sequence[Group], blocks: Mapping[int, Tensor], kl: Sequence[float] | None
    ) -> None:
        """The training batch of a step; those before the newest `telemetry.keep_batches` go.

        Going on leaves those of later steps: that of a step that failed says why, until it is made again.
        """
        keep = self.config.telemetry.keep_batches
        if keep:
            write_batch(batch_file(self.config.run_dir, step), groups, blocks, kl)
            for old in batch_files(self.config.run_dir):
                if int(old.stem.removeprefix("step_")) <= step - keep:
                    old.unlink()

    def sync(self) -> None:
        """Have what was written on the disk: a checkpoint of a step must not outlive the step's row."""
        os.fsync(self._file.fileno())
        for file in self.samples_dir.glob("step_*.jsonl"):
            if file not in self._synced:
                sync(file)
                self._synced.add(file)

    def close(self) -> None:
        """Close the files."""
        self._file.close()
        if self._board:
            self._board.close()


def batch_file(run_dir: Path, step: int) -> Path:
    """Where the training batch of a step is kept."""
    return run_dir / f"batches/step_{step:06d}.safetensors"


def batch_files(run_dir: Path) -> list[Path]:
    """The training batches that are kept, oldest first."""
    found = (run_dir / "batches").glob("step_*.safetensors")
    return sorted(path for path in found if path.stem.removeprefix("step_").isdecimal())


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics.jsonl; a last line that was cut off by a crash is left out."""
    rows = []
    if path.exists():
        for line in path.read_text().splitlines():
            try:
                rows.append(json.loads(line))
            except ValueError:
                break
    return rows


def _sample_row(group: Group, number: int, answer: Graded, response: Response) -> dict[str, Any]:
    row = {
        "prompt_index": group.prompt.index,
        "sample": number,
        "prompt": group.prompt.text,
        "response": answer.text,
        "answer": group.prompt.answer,
        "score": None if math.isnan(answer.score) else answer.score,
        "finish_reason": answer.finish_reason,
        "tokens": answer.length,
        "weight_versions": sorted(set(response.weight_versions)),
        "ids": response.ids,
        "logprobs": [round(x, 6) for x in response.logprobs],
    }
    return {**row, "details": dict(answer.details)} if answer.details else row
