"""`megatron-rl plan reshard`: what moving the weights costs, before anything is started."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

from megatron_rl.config_files import load_config
from megatron_rl.errors import UserError
from megatron_rl.resharding.layout import Layout
from megatron_rl.resharding.names import Shape
from megatron_rl.resharding.options import ReshardConfig
from megatron_rl.resharding.pieces import Side
from megatron_rl.resharding.placement import Placement, aligned_step, engines_on
from megatron_rl.resharding.plan import Across, plan
from megatron_rl.resharding.report import Bandwidths, Report
from megatron_rl.training.hf_config import read_model_spec

_TRAINER = ("tp", "pp", "cp", "dp", "vpp")


@dataclass(frozen=True, kw_only=True)
class Sides:
    """A model, its trainer and its engines."""

    shape: Shape
    trainer: Mapping[str, int]
    """By the keys of `--trainer`."""

    engine: int
    """GPUs of an engine."""

    engine_side: Side = "sglang"
    """Whose parameters they have: `hf` is the embedded engine."""

    itemsize: int = 2
    """Bytes of an element."""

    reshard: ReshardConfig = field(default_factory=ReshardConfig)
    """How bytes move, where `Machines` doesn't say."""


@dataclass(frozen=True, kw_only=True)
class Machines:
    """What the sides run on, and how bytes move there; None: as the recipe has it."""

    gpus_per_node: int
    placement: str | None
    across: str | None
    bucket_mb: int | None
    bandwidths: Bandwidths


def of_options(hf_config: Path, trainer: str, engine: str) -> Sides:
    """What `--hf-config`, `--trainer tp=8,pp=4` and `--engine tp=4` say.

    Raises:
        UserError: they are written otherwise, or the model is not known.
    """
    if not hf_config.exists():
        raise UserError(f"--hf-config: there is no {hf_config}; give a config.json, or a directory with one")
    sizes = {"tp": 1} | _sizes(engine, "--engine", ("tp",))
    return Sides(
        shape=read_model_spec(hf_config).shape,
        trainer=_sizes(trainer, "--trainer", _TRAINER),
        engine=sizes["tp"],
    )


def of_recipe(path: Path, overrides: list[str], gpus: int | None) -> Sides:
    """What a recipe says.

    Args:
        path: of the recipe.
        overrides: key.sub=value.
        gpus: that it will be started on; None: one copy of the model.

    Raises:
        UserError: a bad recipe, or a number of GPUs that its layout does not divide.
    """
    config = load_config(path, overrides)
    trainer = config.trainer
    if config.rollout.placement == "separate":
        raise UserError("plan reshard: rollout.placement is separate; it plans engines on the trainer's GPUs only")
    sizes = {
        "tp": trainer.tensor_parallel_size,
        "pp": trainer.pipeline_parallel_size,
        "cp": trainer.context_parallel_size,
        "vpp": trainer.pipeline_chunks,
    }
    copy = sizes["tp"] * sizes["pp"] * sizes["cp"]
    if gpus is not None and gpus % copy:
        raise UserError(f"--gpus: {gpus} is not a multiple of the {copy} that a copy of the trainer takes")
    return Sides(
        shape=read_model_spec(config.model.path).shape,
        trainer=sizes | {"dp": (gpus or copy) // copy},
        engine=config.rollout.tensor_parallel_size,
        engine_side="sglang" if config.rollout.engine == "sglang" else "hf",
        reshard=config.reshard,
        itemsize=4 if trainer.dtype == "float32" else 2,
    )


def report(sides: Sides, machines: Machines, *, as_json: bool) -> str:
    """Plan it, and say what it costs.

    Raises:
        UserError: the sizes don't fit together, or the model.
    """
    across, placement = (
        _one_of(option, value, allowed)
        for option, value, allowed in (
            ("--across", machines.across or sides.reshard.across_nodes, get_args(Across)),
            ("--placement", machines.placement or sides.reshard.placement, get_args(Placement)),
        )
    )
    source = _trainer(sides, machines.gpus_per_node)
    step = 1
    if placement == "aligned":
        step = aligned_step(source, sides.engine, gpus_per_node=machines.gpus_per_node)
    planned = plan(
        source,
        engines_on(source, sides.engine, step=step, side=sides.engine_side),
        itemsize=sides.itemsize,
        gpus_per_node=machines.gpus_per_node,
        across="once" if across == "once" else "direct",
        bucket_bytes=(machines.bucket_mb or sides.reshard.bucket_mb) * 2**20,
    )
    layout = " × ".join(f"{key.upper()}{size}" for key, size in sides.trainer.items() if size > 1) or "TP1"
    engines, first = source.size // sides.engine, [step * place for place in range(sides.engine)]
    line = f"{layout} on {source.size} GPUs → {engines} engines of TP{sides.engine}, the first on GPUs {first}"
    found = Report(planned, machines.bandwidths)
    if as_json:
        return json.dumps({"plan": line, "placement": placement, "across": across, **found.as_json()}, indent=1)
    return f"{line}; {across} across nodes\n{found.as_text()}"


def _trainer(sides: Sides, gpus_per_node: int) -> Layout:
    tp, pp, cp, dp, vpp = (sides.trainer.get(key, 1) for key in _TRAINER)
    if vpp > 1 and pp == 1:
        raise UserError(f"plan reshard: {vpp} chunks a stage (vpp) need several stages; give pp=N")
    sides.shape.check_tensor_parallel(tp)
    sides.shape.check_tensor_parallel(sides.engine, "rollout.tensor_parallel_size")
    try:
        source = Layout(side="megatron", shape=sides.shape, tensor=tp, pipeline=pp, context=cp, data=dp, chunks=vpp)
    except ValueError as error:
        raise UserError(f"plan reshard: {error}") from None
    node = min(gpus_per_node, source.size)
    if source.size % node or node % sides.engine:
        raise UserError(
            f"plan reshard: engines of {sides.engine} GPUs don't fill {source.size} GPUs on nodes of {gpus_per_node}"
        )
    return source


def _sizes(text: str, option: str, allowed: tuple[str, ...]) -> dict[str, int]:
    found: dict[str, int] = {}
    for item in text.split(","):
        key, _, value = item.partition("=")
        if key not in allowed or key in found or not value.isdecimal() or int(value) < 1:
            raise UserError(f"{option}: {item!r} is not one of {', '.join(f'{name}=N' for name in allowed)}, each once")
        found[key] = int(value)
    return found


def _one_of(option: str, value: str, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        raise UserError(f"{option}: {value!r} is not one of {', '.join(allowed)}")
    return value
