"""A step computed again on one process, from the batch that the run kept: losses, gradients, and what is not finite."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

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
from megatron_rl.telemetry.batches import read_batch
from megatron_rl.telemetry.metrics import MeanMetrics
from megatron_rl.telemetry.writer import batch_file, batch_files
from megatron_rl.training import setup
from megatron_rl.training.batch import COMPARED, make_batch
from megatron_rl.training.checkpoint import latest_checkpoint, load_weights, step_of
from megatron_rl.training.hf_config import read_model_spec
from megatron_rl.training.trainer import Trainer
from megatron_rl.types import Group, TrainBatch, TrainedResponse

_ONE_PROCESS = [
    "tensor_parallel_size=1",
    "pipeline_parallel_size=1",
    "context_parallel_size=1",
    "sequence_parallel=false",
]
_STEPWISE = ("updates_per_rollout", "old_logprobs", "kl", "correction", "entropy_gradient")
"""Options of a run that its replay keeps when another objective is put in."""


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """An objective on the kept batch, at the weights that its step began with."""

    name: str
    losses: tuple[float, ...]
    """Of each optimizer step."""

    gradient: Tensor
    """Of all optimizer steps together, `[parameters]`, before clipping."""

    weights: tuple[float, float]
    """Smallest and largest weight of a trained token."""

    metrics: MeanMetrics


@dataclass(frozen=True, kw_only=True)
class Replay:
    """What `replay` found."""

    weights_from: str
    objectives: tuple[Replayed, ...]
    not_finite: tuple[str, ...]
    """Where values that are not finite came from, a line for each response."""


def replay(run_dir: Path, step: int, presets: Sequence[str] = COMPARED) -> Replay:
    """Compute step `step` of a run again, by its own objective and by those of `presets`.

    The weights are those of the newest checkpoint before the step, or the model that the run began with.

    Raises:
        UserError: no such run, the batch of the step is not kept, unknown preset.
    """
    path = batch_file(run_dir, step)
    if not path.exists():
        kept = ", ".join(str(int(file.stem.removeprefix("step_"))) for file in batch_files(run_dir)) or "none"
        raise UserError(f"{path}: the batch of step {step} is not kept (kept: {kept}); see telemetry.keep_batches")
    config = load_config(run_dir / "config.yaml", [f"trainer.{option}" for option in _ONE_PROCESS])
    objectives = {"this": config} | {name: with_preset(config, name) for name in presets}
    groups, kl = read_batch(path)
    spec = read_model_spec(config.model.path)
    setup.start(config)
    trainer = Trainer(config, spec, usable_ids(load_tokenizer(config.model.path), spec.shape.vocab))
    checkpoint = latest_checkpoint(config, until=step - 1)
    if checkpoint:
        load_weights(checkpoint, trainer)
    replayed = []
    for name, of_objective in objectives.items():
        trainer.use(of_objective)
        replayed.append(_replayed(name, trainer, make_batch(groups, of_objective, kl)))
    trainer.use(config)
    spoilt = not bool(replayed[0].gradient.isfinite().all())
    found = _not_finite(trainer, make_batch(groups, config, kl), groups, compute=spoilt)
    setup.stop()
    behind = step - 1 - (step_of(checkpoint) if checkpoint else 0)
    late = f", {behind} steps before it began: log-probs differ" if behind else ""
    return Replay(
        weights_from=f"{checkpoint or config.model.path}{late}", objectives=tuple(replayed), not_finite=tuple(found)
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


def _replayed(name: str, trainer: Trainer, batch: TrainBatch) -> Replayed:
    losses, metrics, total = [], MeanMetrics(batch.metrics), torch.zeros((), dtype=torch.float64)
    shares = [trainer.share(update) for update in batch.updates]
    for share, given in zip(shares, trainer.given(shares), strict=True):
        of_update = trainer.gradients(share, given)
        losses.append(of_update.pairs["loss/objective"][0])
        metrics.merge(of_update)
        total = total + _gradient(trainer)
    weights = [one.weight for update in batch.updates for one in update if one.weight] or [0.0]
    return Replayed(
        name=name,
        losses=tuple(losses),
        gradient=total,
        weights=(min(weights), max(weights)),
        metrics=metrics,
    )


def _gradient(trainer: Trainer) -> Tensor:
    """The whole gradient, `[parameters]`, float64."""
    return torch.cat([parameter.main_grad.flatten() for parameter in trainer.model.parameters()]).double().cpu()


def _not_finite(trainer: Trainer, batch: TrainBatch, groups: Sequence[Group], *, compute: bool) -> list[str]:
    """For each trained response with a value that is not finite: the first such value, in the order of computation.

    `compute`: look into what the trainer makes of it too, one response after another.
    """
    found = []
    places = [(group, sample) for group in groups for sample in range(len(group.responses))]
    for update in batch.updates:
        for one in update:
            if not one.weight:
                continue
            group, sample = places[one.number]
            problem = _problem_of_batch(one) or (_problem_of_trainer(trainer, one) if compute else None)
            if problem:
                found.append(f"prompt {group.prompt.index}, sample {sample}: {problem}")
    return found


def _problem_of_batch(one: TrainedResponse) -> str | None:
    reported = torch.tensor(one.rollout_logprobs)
    if not reported.isfinite().all():
        position = int((~reported.isfinite()).nonzero()[0])
        return f"the engine's log-prob of token {position} (id {one.response_ids[position]}) is {reported[position]}"
    if not torch.tensor([one.advantage, one.weight]).isfinite().all():
        return f"its advantage is {one.advantage}, its weight {one.weight}"
    return None


def _problem_of_trainer(trainer: Trainer, one: TrainedResponse) -> str | None:
    share = trainer.share([one])
    (logprobs,), (micro,) = trainer.logprobs(share), share
    bad = micro.mask & ~logprobs.isfinite()
    if bad.any():
        label = int(micro.labels[bad][0])
        return f"the trainer's log-prob of a token (id {label}) is {float(logprobs[bad][0])}"
    loss = trainer.gradients(share).pairs["loss/objective"][0]
    if not torch.tensor(loss).isfinite():
        return f"its loss is {loss}"
    for name, parameter in trainer.model.named_parameters():
        if not parameter.main_grad.isfinite().all():
            return f"its gradient is not finite, first in {name}"
    return None


def print_replay(found: Replay) -> None:
    """Print what was found."""
    console = Console(highlight=False, soft_wrap=True)
    table = Table(title=escape(f"weights: {found.weights_from}"))
    for column in ("objective", "loss", "gradient norm", "cosine to this", "token weights"):
        table.add_column(column, justify="left" if column == "objective" else "right")
    this = found.objectives[0].gradient
    for one in found.objectives:
        losses = ", ".join(f"{loss:.6g}" for loss in one.losses[:4]) + (", ..." if len(one.losses) > 4 else "")
        cosine = float(one.gradient @ this / (one.gradient.norm() * this.norm()))
        low, high = one.weights
        table.add_row(
            one.name, losses, f"{float(one.gradient.norm()):.6g}", f"{cosine:.6f}", f"{low:.3g} to {high:.3g}"
        )
    shares = Table(title="share of sum |w A|")
    names = [name.split("/")[1] for name in found.objectives[0].metrics.pairs if name.startswith("share_this/")]
    shares.add_column("")
    for one in found.objectives:
        shares.add_column(one.name, justify="right")
    for name in names:
        values = (one.metrics.values().get(f"share_this/{name}", float("nan")) for one in found.objectives)
        shares.add_row(name, *(f"{value:.3f}" for value in values))
    console.print(table, shares)
    for line in found.not_finite:
        console.print(f"not finite: {line}", markup=False)
    if not found.not_finite:
        console.print("all values are finite")
