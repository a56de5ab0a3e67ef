"""`megatron-rl plan reshard`: it plans what a recipe would do, and refuses in one line what doesn't fit."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from megatron_rl.cli import app
from megatron_rl.errors import UserError
from megatron_rl.resharding.names import hf_shapes
from tests.tiny import SHAPE, hf_config


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A directory with a config.json, 37 ids, and nothing else."""
    hf_config(SHAPE).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def recipe(tmp_path: Path, model: Path) -> Path:
    """TP 2 into engines of two SGLang ranks."""
    sections: dict[str, Any] = {
        "run_dir": "run",
        "steps": 1,
        "model": {"path": str(model)},
        "data": {"train": "d"},
        "trainer": {"tensor_parallel_size": 2},
        "rollout": {"engine": "sglang", "tensor_parallel_size": 2},
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(sections))
    return path


def planned(*words: object) -> dict[str, Any]:
    """What the command prints with --json."""
    done = CliRunner().invoke(app, ["plan", "reshard", *map(str, words), "--json"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.output)
    return found


def test_a_recipe_is_planned_with_its_own_options(recipe: Path) -> None:
    own = ["reshard.placement=consecutive", "reshard.across_nodes=once", "reshard.bucket_mb=1"]
    found = planned(recipe, *own, "--gpus", 4)
    assert (found["placement"], found["across"]) == ("consecutive", "once")
    other = planned(recipe, *own, "--gpus", 4, "--placement", "aligned", "--across", "direct")
    assert (other["placement"], other["across"]) == ("aligned", "direct")
    default = planned(recipe, "--gpus", 4)
    assert (default["placement"], default["across"]) == ("aligned", "direct")


def test_embedded_engines_of_a_recipe_hold_whole_tensors_without_padding(recipe: Path) -> None:
    found = planned(recipe, "rollout.engine=embedded", "rollout.tensor_parallel_size=1")
    whole = sum(rows * columns for rows, columns in ((*size, 1)[:2] for size in hf_shapes(SHAPE).values()))
    itemsize = found["full_gather"] // whole
    assert [rank["kept"] for rank in found["ranks"]] == [whole * itemsize] * 2
    assert planned(recipe)["ranks"][0]["kept"] > whole * itemsize // 2  # SGLang's vocabulary is padded to 64 rows


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--trainer", "tp=8", "--engine", "tp=2"], r"^trainer\.tensor_parallel_size: 8 does not divide num_attention"),
        (["--trainer", "pp=2"], "2 stages don't divide 3 layers"),
        (["--trainer", "tp=2", "--engine", "tp=2", "--gpus-per-node", "1"], "don't fill 2 GPUs on nodes of 1"),
        (["--trainer", "tp=2;pp=2"], "^--trainer: 'tp=2;pp=2' is not one of tp=N, pp=N"),
        (["--trainer", "tp=1,tp=1"], "^--trainer: 'tp=1' is not one of .*, each once"),
        (["--trainer", ""], "^--trainer: '' is not one of"),
        (["--trainer", "vpp=3"], "3 chunks a stage"),
        (["--placement", "spread"], "^--placement: 'spread' is not one of consecutive, aligned"),
        (["--across", "twice"], "^--across: 'twice' is not one of direct, once"),
        (["--gpus", "8"], r"^--gpus: .*--trainer"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(model: Path, words: list[str], told: str) -> None:
    with pytest.raises(UserError, match=told) as caught:
        planned("--hf-config", model, *words)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("option", ["--trainer", "--engine"])
def test_layouts_are_the_recipes_where_there_is_one(recipe: Path, option: str) -> None:
    with pytest.raises(
        UserError, match=rf"^{option}: .*{option[2:].replace('engine', 'rollout')}\.tensor_parallel_size"
    ):
        planned(recipe, option, "tp=1")


@pytest.mark.parametrize(
    ("text", "told"), [('{"a":', "config.json: Expecting value"), ("{}", "model_type is missing"), ("[]", "not a JSON")]
)
def test_a_bad_config_is_named(tmp_path: Path, text: str, told: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match=told):
        planned("--hf-config", tmp_path / "config.json")


def test_a_split_through_key_heads_that_leaves_a_rest_is_refused(tmp_path: Path) -> None:
    shape = replace(SHAPE, heads=8, kv_heads=1)  # (8 + 2) heads of 6 rows
    hf_config(shape).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"^trainer.tensor_parallel_size: 8 does not divide the 60 rows"):
        planned("--hf-config", tmp_path, "--trainer", "tp=8")
