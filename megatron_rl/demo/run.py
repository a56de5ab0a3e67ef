"""The demo from nothing to a result: data, base model, training, and what changed."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from megatron_rl.demo.base_model import make_base_model
from megatron_rl.demo.task import heldout_problems, training_problems, write_jsonl
from megatron_rl.errors import UserError
from megatron_rl.local_launch import launch_local
from megatron_rl.telemetry.curves import draw_curves
from megatron_rl.telemetry.writer import read_metrics

LAYOUTS: dict[str, list[str]] = {
    "tp2": ["trainer.tensor_parallel_size=2", "trainer.pipeline_parallel_size=1"],
    "pp2": ["trainer.tensor_parallel_size=1", "trainer.pipeline_parallel_size=2"],
    "cp2": [
        "trainer.tensor_parallel_size=1",
        "trainer.pipeline_parallel_size=1",
        "trainer.context_parallel_size=2",
    ],
    "dp2": ["trainer.tensor_parallel_size=1", "trainer.pipeline_parallel_size=1"],
}
ENGINES: dict[str, list[str]] = {
    "embedded": [],
    # A cache for what is sampled at once; SGLang would take a part of all memory.
    "sglang": ["rollout.engine=sglang", "rollout.sglang.extra_args=[--max-total-tokens,'16384']"],
}
PROCESSES = 2
_PHASES = ("rollout", "train", "sync", "evaluation")
HELDOUT, TRAINING = 256, 8000
"""Problems: 256 × 16 samples measure a share to about ±0.01; 8,000 are more than a run draws."""


def run_demo(recipe: Path, directory: Path, layout: str, engine: str, seed: int, overrides: list[str]) -> int:
    """Make the base model, train it by `recipe`, and show before and after.

    Args:
        recipe: of the demo.
        directory: everything is made below it.
        layout: one of `LAYOUTS`.
        engine: one of `ENGINES`.
        seed: of the base model and of the run.
        overrides: further `key.sub=value` for the recipe.

    Returns:
        The exit code of the training; its result is shown only if that is 0.

    Raises:
        UserError: no such recipe, layout or engine.
    """
    for option, value, known in (("layout", layout, LAYOUTS), ("engine", engine, ENGINES)):
        if value not in known:
            raise UserError(f"--{option}: {value!r} is not one of {', '.join(known)}")
    if not recipe.exists():
        raise UserError(f"{recipe}: no such recipe; run the demo from the root of the repository")
    begun = time.perf_counter()
    data, base = directory / f"data_seed{seed}", directory / f"base_seed{seed}"
    data.mkdir(parents=True, exist_ok=True)
    heldout = heldout_problems(HELDOUT)
    write_jsonl(data / "heldout.jsonl", heldout)
    write_jsonl(data / "train.jsonl", training_problems(TRAINING, seed, heldout))
    try:
        make_base_model(base, seed=seed)
    except FileExistsError as error:
        raise UserError(str(error)) from None
    made = time.perf_counter()

    of_engine = "" if engine == "embedded" else f"_{engine}"
    run_dir = _unfinished(directory / f"{layout}_seed{seed}{of_engine}")
    values = {"run_dir": run_dir, "seed": seed, "model.path": base}
    values |= {"data.train": data / "train.jsonl", "data.eval": data / "heldout.jsonl"}
    settings = [f"{key}={value}" for key, value in values.items()] + LAYOUTS[layout] + ENGINES[engine] + overrides
    code = launch_local(PROCESSES, ["train", str(recipe), *settings])
    if code == 0:
        ended = time.perf_counter()
        rows = read_metrics(run_dir / "metrics.jsonl")
        draw_curves(rows, run_dir / "curves.png")
        _show(rows, run_dir, base_seconds=made - begun, train_seconds=ended - made)
    return code


def _unfinished(run_dir: Path) -> Path:
    """`run_dir`, or with a number behind it where finished runs are: those are left as they are."""
    number, candidate = 1, run_dir
    while (candidate / "hf").exists():
        number += 1
        candidate = run_dir.with_name(f"{run_dir.name}-{number}")
    return candidate


def _show(rows: list[dict[str, Any]], run_dir: Path, *, base_seconds: float, train_seconds: float) -> None:
    console = Console(highlight=False, soft_wrap=True)
    spent = {name: sum(row.get(f"seconds/{name}", 0.0) for row in rows) for name in _PHASES}
    rest = train_seconds - sum(spent.values())
    parts = "  ".join(f"{name} {seconds:.0f}s" for name, seconds in spent.items())
    console.print(f"seconds: base model {base_seconds:.0f}s  {parts}  starting, saving and the rest {rest:.0f}s")
    console.print(f"run directory: {run_dir}  (config.yaml, metrics.jsonl, samples/, checkpoints/, hf/, curves.png)")
    evaluations = [row for row in rows if "eval/accuracy" in row]
    if not evaluations:
        return  # an override took the held-out problems away
    before, after = evaluations[0], evaluations[-1]
    table = Table(title=f"{before['eval/samples']:.0f} answers to {HELDOUT} held-out problems")
    for column in ("", f"before (step {before['step']})", f"after (step {after['step']})"):
        table.add_column(column, justify="left" if not column else "right")
    for name, key, form in (
        ("accuracy", "eval/accuracy", "{:.3f}"),
        ("length of right answers, tokens", "eval/length_right", "{:.1f}"),
        ("length of wrong answers, tokens", "eval/length_wrong", "{:.1f}"),
    ):
        table.add_row(name, *(_figure(row.get(key), form) for row in (before, after)))
    console.print(table)
    console.print(f"held-out accuracy: {before['eval/accuracy']:.2f} -> {after['eval/accuracy']:.2f}")


def _figure(value: float | None, form: str) -> str:
    return "none" if value is None else form.format(value)
