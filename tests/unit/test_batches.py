"""The batch of a step, written and read: the same, to the last digit."""

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_rl.errors import UserError
from megatron_rl.rollout.delivery import ALL, at_home
from megatron_rl.telemetry.batches import read_batch, write_batch
from megatron_rl.types import Graded, Group, Prompt, Response


def group(index: int, lengths: list[int], scores: list[float]) -> Group:
    """Log-probs that float32 holds exactly, as an engine's are; versions that change within a response."""
    answers = tuple(
        Graded.of(
            Response(
                ids=tuple(range(7 * index, 7 * index + length)),
                logprobs=tuple(float(torch.tensor(-0.1 * (position + 1))) for position in range(length)),
                finish_reason="length" if length > 4 else "stop",
                weight_versions=tuple(position // 2 for position in range(length)),
            ),
            score=score,
        )
        for length, score in zip(lengths, scores, strict=True)
    )
    return Group(prompt=Prompt(index=index, text="", ids=tuple(range(index + 1)), answer=""), responses=answers)


def blocks(groups: list[Group]) -> dict[int, torch.Tensor]:
    """The tokens of all their responses."""
    return at_home([one for of_one in groups for one in of_one.responses], rows=ALL)


GROUPS = [group(3, [2, 5], [1.0, 1 / 3]), group(0, [1, 6, 4], [0.0, 1.0, 0.25])]


@pytest.mark.parametrize("kl", [None, [0.5, -0.1, 2.0, 1 / 3, 0.0]])
def test_a_batch_comes_back_as_it_was(kl: list[float] | None, tmp_path: Path) -> None:
    path = tmp_path / "batches/step_000001.safetensors"
    write_batch(path, GROUPS, blocks(GROUPS), kl)
    assert read_batch(path) == (GROUPS, kl)
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    assert path.stat().st_mode & 0o044


def test_an_ungraded_answer_stays_ungraded(tmp_path: Path) -> None:
    groups = [group(1, [2, 3], [math.nan, 1.0])]
    write_batch(tmp_path / "b", groups, blocks(groups), None)
    ((back,), _) = read_batch(tmp_path / "b")
    assert back.graded_scores == [1.0]
    assert math.isnan(back.responses[0].score)


def test_a_file_that_is_no_batch_is_named(tmp_path: Path) -> None:
    path = tmp_path / "b.safetensors"
    with pytest.raises(UserError, match=str(path)):
        read_batch(path)
    path.write_bytes(b"no batch")
    with pytest.raises(UserError, match=str(path)):
        read_batch(path)


@pytest.mark.parametrize("column", ["lengths", "finish", "group_sizes", "prompt_lengths"])
def test_a_damaged_column_is_one_line(column: str, tmp_path: Path) -> None:
    path = tmp_path / "b.safetensors"
    write_batch(path, GROUPS, blocks(GROUPS), None)
    columns = load_file(path)
    columns[column] = columns[column] + 9
    save_file(columns, path)
    with pytest.raises(UserError, match=str(path)):
        read_batch(path)
