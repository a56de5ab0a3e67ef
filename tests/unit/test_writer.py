"""The files of a run directory: rows, samples, and what becomes of them when a run goes on."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]

from megatron_rl.config import Config
from megatron_rl.telemetry.writer import RunWriter, read_metrics
from tests.cases.responses import tokens_of
from tests.tiny import graded_group, run_config


def config_of(directory: Path, **telemetry: Any) -> Config:
    return run_config(telemetry={"tensorboard": False, **telemetry}).model_copy(update={"run_dir": directory})


def written(directory: Path, steps: range, *, after: int = 0, note: float = 0.0) -> None:
    """A run that starts (after step `after`) and writes rows and samples of `steps`."""
    writer = RunWriter(config_of(directory), after)
    for step in steps:
        writer.log(step, {"step_squared": float(step * step), "note": note})
        writer.samples(step, [graded_group(step, [1, 0], [2, 3])])
    writer.close()


def steps_of(directory: Path) -> list[int]:
    return [row["step"] for row in read_metrics(directory / "metrics.jsonl")]


def sample_files(directory: Path) -> list[str]:
    return sorted(file.name for file in (directory / "samples").iterdir())


def test_rows_are_written_at_once_and_in_order(tmp_path: Path) -> None:
    writer = RunWriter(config_of(tmp_path), 0)
    writer.log(0, {"eval/accuracy": 0.25})
    writer.log(1, {"a": 1.5, "b": math.nan, "c": math.inf})
    assert [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [
        {"step": 0, "eval/accuracy": 0.25},
        {"step": 1, "a": 1.5, "b": None, "c": None},
    ]
    writer.close()


def test_going_on_drops_later_rows_and_samples(tmp_path: Path) -> None:
    written(tmp_path, range(6))
    written(tmp_path, range(4, 6), after=3, note=7.0)
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [(row["step"], row["note"]) for row in rows] == [(0, 0), (1, 0), (2, 0), (3, 0), (4, 7), (5, 7)]
    assert sample_files(tmp_path) == [f"step_{step:06d}.jsonl" for step in range(6)]


def test_going_on_drops_them_before_anything_new_is_written(tmp_path: Path) -> None:
    written(tmp_path, range(6))
    RunWriter(config_of(tmp_path), 3).close()
    assert steps_of(tmp_path) == [0, 1, 2, 3]
    assert sample_files(tmp_path) == [f"step_{step:06d}.jsonl" for step in range(4)]


def test_starting_again_from_nothing_drops_everything(tmp_path: Path) -> None:
    written(tmp_path, range(3))
    RunWriter(config_of(tmp_path), 0).close()
    assert steps_of(tmp_path) == []
    assert sample_files(tmp_path) == []


def test_several_rows_of_one_step_are_kept(tmp_path: Path) -> None:
    writer = RunWriter(config_of(tmp_path), 0)
    writer.log(3, {"loss": 1.0})
    writer.log(3, {"eval/accuracy": 0.5})
    writer.close()
    RunWriter(config_of(tmp_path), 3).close()
    assert steps_of(tmp_path) == [3, 3]


@pytest.mark.parametrize("cut", [1, 5, 20])
def test_a_last_line_that_was_cut_off_is_left_out(cut: int, tmp_path: Path) -> None:
    written(tmp_path, range(4))
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text()[:-cut])
    assert steps_of(tmp_path) == ([0, 1, 2, 3] if cut == 1 else [0, 1, 2])
    written(tmp_path, range(3, 5), after=2)
    assert steps_of(tmp_path) == [0, 1, 2, 3, 4]


def test_there_are_no_rows_where_there_is_no_file(tmp_path: Path) -> None:
    assert read_metrics(tmp_path / "metrics.jsonl") == []


def test_samples_hold_what_one_wants_to_read_and_what_can_be_checked(tmp_path: Path) -> None:
    writer = RunWriter(config_of(tmp_path), 0)
    writer.samples(7, [graded_group(2, [1, math.nan], [2, 3], truncated=(1,))])
    rows = [json.loads(line) for line in (tmp_path / "samples" / "step_000007.jsonl").read_text().splitlines()]
    assert rows == [
        {
            "prompt_index": 2, "sample": 0, "prompt": "prompt 2", "response": "text 0", "answer": "2", "score": 1,
            "finish_reason": "stop", "tokens": 2, "weight_versions": [3], "ids": [200, 201], "logprobs": [-0.5, -0.625],
        },
        {
            "prompt_index": 2, "sample": 1, "prompt": "prompt 2", "response": "text 1", "answer": "2", "score": None,
            "finish_reason": "length", "tokens": 3, "weight_versions": [3], "ids": [210, 211, 212],
            "logprobs": [-0.5, -0.625, -0.75],
        },
    ]  # fmt: skip
    writer.close()


def test_each_sample_keeps_what_its_own_grader_said(tmp_path: Path) -> None:
    group = graded_group(2, [1, 0], [2, 3])
    said = replace(group.responses[1], details={"steps": 3, "why": ["sign"]})
    writer = RunWriter(config_of(tmp_path), 0)
    writer.samples(1, [replace(group, responses=(group.responses[0], said))])
    writer.close()
    number, verbose = (tmp_path / "samples" / "step_000001.jsonl").read_text().splitlines()
    assert "details" not in json.loads(number)
    assert json.loads(verbose)["details"] == {"steps": 3, "why": ["sign"]}


def test_a_sample_says_each_weight_version_once(tmp_path: Path) -> None:
    group = graded_group(2, [1], [4])
    (answer,) = group.responses
    mixed = replace(answer, response=replace(tokens_of(answer), weight_versions=(3, 3, 4, 3)))
    writer = RunWriter(config_of(tmp_path), 0)
    writer.samples(1, [replace(group, responses=(mixed,))])
    writer.close()
    (row,) = (tmp_path / "samples" / "step_000001.jsonl").read_text().splitlines()
    assert json.loads(row)["weight_versions"] == [3, 4]


@pytest.mark.parametrize(("limit", "expected"), [(0, []), (2, [0, 0, 1, 1]), (16, [0, 0, 1, 1, 2, 2])])
def test_the_first_groups_of_a_step_are_saved(limit: int, expected: list[int], tmp_path: Path) -> None:
    writer = RunWriter(config_of(tmp_path, samples_per_step=limit), 0)
    writer.samples(1, [graded_group(number, [1, 0], [2, 3]) for number in range(3)])
    writer.close()
    rows = (tmp_path / "samples" / "step_000001.jsonl").read_text().splitlines()
    assert [json.loads(row)["prompt_index"] for row in rows] == expected


def test_nothing_half_written_is_left(tmp_path: Path) -> None:
    written(tmp_path, range(3))
    assert not list(tmp_path.rglob("*.partial"))


def test_tensorboard_has_the_same_figures_and_forgets_later_steps(tmp_path: Path) -> None:
    config = config_of(tmp_path, tensorboard=True)
    for after, steps, value in ((0, range(1, 5), 1.0), (2, range(3, 5), 9.0)):
        writer = RunWriter(config, after)
        for step in steps:
            writer.log(step, {"policy/entropy": value + step})
        writer.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    found = [(event.step, event.value) for event in events.Scalars("policy/entropy")]
    assert found == [(1, 2.0), (2, 3.0), (3, 12.0), (4, 13.0)]


def test_without_tensorboard_there_are_no_events(tmp_path: Path) -> None:
    written(tmp_path, range(2))
    assert not (tmp_path / "tensorboard").exists()
