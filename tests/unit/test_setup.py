"""Layouts that don't divide the model or the world, learning rates, and the state a run goes on from."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_rl.errors import UserError
from megatron_rl.training.optimizer import learning_rate, set_rates
from megatron_rl.training.options import TrainerConfig
from megatron_rl.training.run_state import RunState, latest_checkpoint, read_run_state, unchangeable
from megatron_rl.training.setup import check_layout
from tests.tiny import SHAPE, run_config


def layout_refusal(tp: int, pp: int, world: int, **rollout: int) -> str:
    config = run_config(trainer={"tensor_parallel_size": tp, "pipeline_parallel_size": pp}, rollout=rollout)
    with pytest.raises(UserError) as caught:
        check_layout(config, SHAPE, world)
    return str(caught.value)


@pytest.mark.parametrize(
    ("tp", "pp", "world", "named"),
    [
        (3, 1, 3, ["trainer.tensor_parallel_size", "num_attention_heads (10)"]),
        (5, 1, 5, ["trainer.tensor_parallel_size", "num_key_value_heads (2)"]),
        (1, 2, 2, ["trainer.pipeline_parallel_size", "num_hidden_layers (3)"]),
        (2, 3, 8, ["TP 2 × PP 3", "processes (8)"]),
        (2, 1, 1, ["TP 2 × PP 1", "processes (1)"]),
    ],
)
def test_a_layout_that_does_not_divide_is_refused_with_its_numbers(
    tp: int, pp: int, world: int, named: list[str]
) -> None:
    message = layout_refusal(tp, pp, world)
    assert all(part in message for part in named), message


@pytest.mark.parametrize(("tp", "pp", "world"), [(1, 1, 1), (2, 1, 2), (1, 3, 3), (2, 3, 6), (2, 3, 12), (1, 1, 7)])
def test_a_layout_that_divides_is_taken(tp: int, pp: int, world: int) -> None:
    check_layout(run_config(trainer={"tensor_parallel_size": tp, "pipeline_parallel_size": pp}), SHAPE, world)


def test_context_parallelism_takes_its_part_of_the_world() -> None:
    config = run_config(
        trainer={"context_parallel_size": 4}, rollout={"prompts_per_step": 1, "responses_per_prompt": 3}
    )
    with pytest.raises(UserError, match=r"TP 1 × PP 1 × CP 4 does not divide the number of processes \(6\).* of 4 "):
        check_layout(config, SHAPE, 6)
    check_layout(config, SHAPE, 12)  # three data-parallel ranks, not twelve, want a response each
    with pytest.raises(UserError, match=r"4 ranks \(DP\)"):
        check_layout(config, SHAPE, 16)


def test_more_ranks_than_responses_are_refused() -> None:
    message = layout_refusal(1, 1, 7, prompts_per_step=2, responses_per_prompt=3)
    assert "rollout.prompts_per_step" in message
    assert "7 ranks" in message
    check_layout(run_config(rollout={"prompts_per_step": 2, "responses_per_prompt": 3}), SHAPE, 6)


@pytest.mark.parametrize(
    ("warmup", "rates"), [(0, [1, 1, 1, 1, 1, 1]), (1, [1, 1, 1, 1, 1, 1]), (4, [0.25, 0.5, 0.75, 1, 1, 1])]
)
def test_the_warm_up_counts_optimizer_steps_and_then_the_rate_is_constant(warmup: int, rates: list[float]) -> None:
    trainer = TrainerConfig(lr=8e-6, lr_warmup_steps=warmup)
    assert [learning_rate(trainer, done) / 8e-6 for done in range(6)] == pytest.approx(rates)


@pytest.mark.parametrize(
    ("updates", "rates"),
    [(1, [0.5, 1, 1, 1, 1, 1]), (2, [0.25, 0.5, 0.75, 1, 1, 1]), (16, [n / 32 for n in range(1, 7)])],
)
def test_a_warm_up_in_rollout_steps_is_that_many_times_their_optimizer_steps(updates: int, rates: list[float]) -> None:
    trainer = TrainerConfig(lr=8e-6, lr_warmup_rollout_steps=2)
    found = [learning_rate(trainer, done, updates_per_rollout=updates) / 8e-6 for done in range(6)]
    assert found == pytest.approx(rates)


def test_a_warm_up_in_optimizer_steps_does_not_depend_on_the_steps_of_a_rollout() -> None:
    trainer = TrainerConfig(lr=8e-6, lr_warmup_steps=4)
    assert learning_rate(trainer, 1, updates_per_rollout=16) == pytest.approx(4e-6)


def test_what_megatron_exempts_from_weight_decay_does_not_decay() -> None:
    groups = [{"lr": 9.0, "weight_decay": 9.0, "wd_mult": wd_mult} for wd_mult in (1.0, 0.0, 0.5)]
    set_rates(SimpleNamespace(param_groups=groups), lr=0.25, weight_decay=0.5)
    assert [(group["lr"], group["weight_decay"]) for group in groups] == [(0.25, 0.5), (0.25, 0.0), (0.25, 0.25)]


FIXED = unchangeable(run_config(), SHAPE, "f" * 64)
STATE = RunState(step=4, updates=8, collector={"position": 130}, fixed=FIXED)


def checkpoint(directory: Path, text: str | None = None) -> Path:
    directory.mkdir(parents=True)
    (directory / "run_state.json").write_text(json.dumps(vars(STATE)) if text is None else text)
    return directory


def test_a_run_goes_on_from_its_state(tmp_path: Path) -> None:
    assert read_run_state(checkpoint(tmp_path / "step_000004"), FIXED) == STATE


@pytest.mark.parametrize(
    ("now", "message"),
    [
        (
            unchangeable(run_config(), SHAPE, "g" * 64),
            r"^data\.train: .*step_000004 was made with data of SHA-256 ffff",
        ),
        (unchangeable(run_config(seed=1), SHAPE, "f" * 64), r"^seed: .* was made with 0 \(now 1\); set it back"),
        (unchangeable(run_config(), replace(SHAPE, hidden=8), "f" * 64), r"^model\.path: .* hidden 40 \(now 8\);"),
        (
            unchangeable(run_config(trainer={"dtype": "float32"}), SHAPE, "f" * 64),
            r"^trainer\.dtype: .* bfloat16 \(now float32\)",
        ),
    ],
)
def test_what_may_not_change_is_refused_by_name(now: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        read_run_state(checkpoint(tmp_path / "step_000004"), now)


@pytest.mark.parametrize("text", ["", "{", "{}", "[]", '{"step": 1}', '{"other": 1}', "3"])
def test_a_state_that_cannot_be_read_is_refused_by_name(text: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"run_state\.json: "):
        read_run_state(checkpoint(tmp_path / "step_000004", text), FIXED)


def test_the_newest_complete_checkpoint_is_found(tmp_path: Path) -> None:
    config = run_config().model_copy(update={"run_dir": tmp_path})
    assert latest_checkpoint(config) is None
    for name in ("step_000009", "step_000010", "partial_step_000011"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    newest = latest_checkpoint(config)
    assert newest is not None
    assert newest.name == "step_000010"
