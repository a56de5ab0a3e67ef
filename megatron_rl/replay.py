"""A step computed again on one process, from the batch that the run kept: losses, gradients, and what is not finite."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor

from megatron_rl.config import AlgorithmConfig, Config
from megatron_rl.config_files import load_config
from megatron_rl.data.prompts import load_tokenizer, usable_ids
from megatron_rl.errors import UserError
from megatron_rl.presets import PRESETS
from megatron_rl.resharding.shards import named_shards
from megatron_rl.rollout.delivery import IDS, LOGPROBS, block
from megatron_rl.telemetry.batches import read_batch
from megatron_rl.telemetry.metrics import MeanMetrics
from megatron_rl.telemetry.writer import batch_file, batch_files
from megatron_rl.training import setup
from megatron_rl.training.batch import COMPARED, make_batch
from megatron_rl.training.checkpoint import load_checkpoint
from megatron_rl.training.hf_config import read_model_spec
from megatron_rl.training.objective import Given
from megatron_rl.training.run_state import latest_checkpoint, read_run_state, step_of
from megatron_rl.training.trainer import Share, Trainer
from megatron_rl.types import Group, TrainBatch, TrainedResponse

_ONE_PROCESS = [
    "tensor_parallel_size=1",
    "pipeline_parallel_size=1",
    "pipeline_chunks=1",
    "context_parallel_size=1",
    "sequence_parallel=false",
]
_STEPWISE = ("updates_per_rollout", "old_logprobs", "kl", "correction", "entropy_gradient")
"""Options of a run that its replay keeps when another objective is put in."""


MOST_PROBLEMS = 10
"""Responses with values that are not finite that are searched for, one forward and backward each."""


def on_one_process(run_dir: Path) -> Config:
    """The config of a run, whatever its layout was."""
    together = ["rollout.placement=colocated", "rollout.ranks=0", "rollout.async_steps=0"]
    return load_config(run_dir / "config.yaml", [*together, *(f"trainer.{option}" for option in _ONE_PROCESS)])


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """An objective on the kept batch, all its optimizer steps at the weights that the rollout step began with."""

    name: str
    loss: float
    """Sum over its optimizer steps."""

    gradient_norm: float
    """Of the sum of their gradients, before clipping."""

    cosine: float
    """Of that gradient with the run's own objective's."""

    weights: tuple[float, float]
    """Smallest and largest weight of a trained token."""

    metrics: MeanMetrics


@dataclass(frozen=True, kw_only=True)
class Replay:
    """What `replay` found."""

    weights_from: str
    objectives: tuple[Replayed, ...]
    steps: tuple[tuple[float, float], ...]
    """(loss, gradient norm) of each optimizer step of the run's own objective, as the run took them."""

    planned: int
    """How many optimizer steps there are; `steps` ends before the first that is not finite."""

    not_finite: tuple[str, ...]
    """Where values that are not finite came from, a line for each response."""


def replay(run_dir: Path, step: int, presets: Sequence[str] = COMPARED) -> Replay:
    """Compute step `step` of a run again, by its own objective and by those of `presets`.

    Weights and optimizer are those of the newest checkpoint before the step, or as the run began.

    Raises:
        UserError: no such run, the batch of the step is not kept, unknown preset.
    """
    path = batch_file(run_dir, step)
    if not path.exists():
        kept = ", ".join(str(int(file.stem.removeprefix("step_"))) for file in batch_files(run_dir)) or "none"
        raise UserError(f"{path}: the batch of step {step} is not kept (kept: {kept}); see telemetry.keep_batches")
    config = on_one_process(run_dir)
    objectives = {"this": config} | {name: with_preset(config, name) for name in presets}
    groups, kl = read_batch(path)
    spec = read_model_spec(config.model.path)
    setup.start(config)
    trainer = Trainer(config, spec, usable_ids(load_tokenizer(config.model.path), spec.shape.vocab))
    checkpoint = latest_checkpoint(config, until=step - 1)
    if checkpoint:
        load_checkpoint(checkpoint, trainer, read_run_state(checkpoint, {}))
    replayed: list[Replayed] = []
    own: Tensor | None = None
    for name, of_objective in objectives.items():
        trainer.use(of_objective)
        found, gradient = _replayed(name, trainer, make_batch(groups, of_objective, kl), own)
        own = gradient if own is None else own
        replayed.append(found)
    trainer.use(config)
    batch = make_batch(groups, config, kl)
    steps, problems = _steps(trainer, batch, groups)
    setup.stop()
    behind = step - 1 - (step_of(checkpoint) if checkpoint else 0)
    late = f", {behind} steps before this one began: what follows is not what the run computed" if behind else ""
    return Replay(
        weights_from=f"{checkpoint or config.model.path}{late}",
        objectives=tuple(replayed),
        steps=tuple(steps),
        planned=len(batch.updates),
        not_finite=tuple(problems),
    )


def with_preset(config: Config, name: str) -> Config:
    """The config with another objective: a preset's values instead of the run's own.

    Raises:
        UserError: unknown preset.
    """
    if name not in PRESETS:
        raise UserError(f"--preset: {name!r} is not one of {', '.join(PRESETS)}")
    values = {"preset": name, **PRESETS[name].algorithm}
    soft = values.get("soft_overlong")
    if soft and soft["buffer"] > config.rollout.max_response_tokens:
        values["soft_overlong"] = config.algorithm.soft_overlong  # the preset's is for its own budget
    kept = {option: getattr(config.algorithm, option) for option in _STEPWISE}
    algorithm = AlgorithmConfig.model_validate({**values, **kept})
    rewards = config.rewards.model_copy(update={"wrong": 0.0, **PRESETS[name].rewards})
    return config.model_copy(update={"algorithm": algorithm, "rewards": rewards})


def _replayed(name: str, trainer: Trainer, batch: TrainBatch, own: Tensor | None) -> tuple[Replayed, Tensor]:
    """An objective's figures, and its gradient, `[parameters]`; `own`: that of the run itself, None: this is it."""
    loss, metrics, total = 0.0, MeanMetrics(batch.metrics), torch.zeros(())
    shares = [trainer.share(update) for update in batch.updates]
    for share, given in zip(shares, trainer.given(shares), strict=True):
        of_update = trainer.gradients(share, given)
        loss += of_update.pairs["loss/objective"][0]
        metrics.merge(of_update)
        total = total + torch.cat([parameter.main_grad.flatten().cpu() for parameter in trainer.parameters()])
    norm = float(total.double().norm())
    same = total if own is None else own
    weights = [one.weight for update in batch.updates for one in update if one.weight] or [0.0]
    found = Replayed(
        name=name,
        loss=loss,
        gradient_norm=norm,
        cosine=float(total.double() @ same.double()) / (norm * float(same.double().norm()) or 1.0),
        weights=(min(weights), max(weights)),
        metrics=metrics,
    )
    return found, total


def _steps(trainer: Trainer, batch: TrainBatch, groups: Sequence[Group]) -> tuple[list[tuple[float, float]], list[str]]:
    """The optimizer steps as the run took them, up to the first that is not finite; and what was not, by response."""
    problems = [f"{where}: {problem}" for one, where in _named(batch, groups) if (problem := _problem_of_batch(one))]
    steps = []
    shares = [trainer.share(update) for update in batch.updates]
    for number, (share, given) in enumerate(zip(shares, trainer.given(shares), strict=True)):
        loss = trainer.gradients(share, given, first=number == 0).pairs["loss/objective"][0]
        if not math.isfinite(loss) or _spoilt_parameter(trainer):
            known = _by_response(share, given)
            members = {one.number for one in batch.updates[number]}
            for one, where in _named(batch, groups):
                if one.number in members and len(problems) < MOST_PROBLEMS:
                    problem = _problem_of_trainer(trainer, one, known[one.number], first=number == 0)
                    problems += [f"optimizer step {number + 1}, {where}: {problem}"] if problem else []
            break
        steps.append((loss, trainer.step().pairs["train/grad_norm"][0]))
    return steps, problems[:MOST_PROBLEMS]


def _named(batch: TrainBatch, groups: Sequence[Group]) -> Iterator[tuple[TrainedResponse, str]]:
    """The trained responses, each with its name for people."""
    places = [(group.prompt.index, sample) for group in groups for sample in range(len(group.responses))]
    for one in (one for update in batch.updates for one in update if one.weight):
        prompt, sample = places[one.number]
        yield one, f"prompt {prompt}, sample {sample}"


def _by_response(share: Share, given: Sequence[Given]) -> dict[int, Given]:
    """What was computed before an optimizer step, response by response; on one process nothing is padded."""
    found = {}
    for micro, of_micro in zip(share, given or [Given()] * len(share), strict=True):
        for number, (first, last) in zip(micro.numbers, pairwise(micro.starts.tolist()), strict=True):
            parts = ((name, getattr(of_micro, name)) for name in ("sampled", "reference"))
            found[number] = Given(**{name: None if part is None else part[:, first:last] for name, part in parts})
    return found


def _problem_of_batch(one: TrainedResponse) -> str | None:
    tokens = block(one)
    reported = tokens[LOGPROBS].view(torch.float32)
    if not reported.isfinite().all():
        position = int((~reported.isfinite()).nonzero()[0])
        return f"the engine's log-prob of token {position} (id {tokens[IDS, position]}) is {reported[position]}"
    if not math.isfinite(one.advantage * one.weight):
        return f"its advantage is {one.advantage}, its weight {one.weight}"
    return None


def _problem_of_trainer(trainer: Trainer, one: TrainedResponse, given: Given, *, first: bool) -> str | None:
    """The first value that is not finite, in the order of computation."""
    share = trainer.share([one])
    (logprobs,), (micro,) = trainer.logprobs(share), share
    bad = micro.mask & ~logprobs.isfinite()
    if bad.any():
        return f"the trainer's log-prob of a token (id {int(micro.labels[bad][0])}) is {float(logprobs[bad][0])}"
    loss = trainer.gradients(share, [given], first=first).pairs["loss/objective"][0]
    if not math.isfinite(loss):
        return f"its loss is {loss}"
    parameter = _spoilt_parameter(trainer)
    return f"its gradient is not finite, first in {parameter}" if parameter else None


def _spoilt_parameter(trainer: Trainer) -> str | None:
    """The first parameter whose gradient is not finite."""
    for shard in named_shards(trainer.model, trainer.spec.shape):
        parameter: Any = shard.parameter
        if not parameter.main_grad.isfinite().all():
            return shard.entry.megatron.format(layer=shard.layer)
    return None


def print_replay(found: Replay) -> None:
    """Print what was found."""
    console = Console(highlight=False, soft_wrap=True)
    table = Table(title=escape(f"weights: {found.weights_from}"))
    for column in ("objective", "loss", "gradient norm", "cosine to this", "token weights"):
        table.add_column(column, justify="left" if column == "objective" else "right")
    for one in found.objectives:
        low, high = one.weights
        figures = (f"{one.loss:.6g}", f"{one.gradient_norm:.6g}", f"{one.cosine:.6f}", f"{low:.3g} to {high:.3g}")
        table.add_row(one.name, *figures)
    shares = Table(title="share of sum |w A|")
    names = [name.split("/")[1] for name in found.objectives[0].metrics.pairs if name.startswith("share_this/")]
    shares.add_column("")
    for one in found.objectives:
        shares.add_column(one.name, justify="right")
    for name in names:
        values = (one.metrics.values().get(f"share_this/{name}", float("nan")) for one in found.objectives)
        shares.add_row(name, *(f"{value:.3f}" for value in values))
    console.print(table, shares)
    for number, (loss, norm) in enumerate(found.steps, 1):
        console.print(f"optimizer step {number}: loss {loss:.6g}, gradient norm {norm:.6g}")
    for line in found.not_finite:
        console.print(f"not finite: {line}", markup=False)
    if len(found.steps) < found.planned:
        console.print(f"optimizer step {len(found.steps) + 1} is not finite; the rest was not computed")
    elif not found.not_finite:
        console.print("all values are finite")
