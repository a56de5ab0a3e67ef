"""`megatron-rl convert ...`."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megatron_rl.errors import UserError

if TYPE_CHECKING:
    import torch

convert = typer.Typer(no_args_is_help=True, help="Convert, look into and compare checkpoints, without a GPU.")


class Dtype(StrEnum):
    """What weights may be written in."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


Source = Annotated[Path, typer.Argument(help="A directory.")]
Target = Annotated[Path, typer.Argument(help="The directory to make.")]
AsDtype = Annotated[Dtype | None, typer.Option("--dtype", help="Of the weights; by default they stay as they are.")]


@convert.command("hf-to-megatron")
def hf_to_megatron(source: Source, target: Target, dtype: AsDtype = None) -> None:
    """A Hugging Face directory to Megatron's distributed format, which any layout loads."""
    from checkpoints_tools.hf_to_megatron import hf_to_megatron as act

    act(source, target, _dtype(dtype))


@convert.command("megatron-to-hf")
def megatron_to_hf(source: Source, target: Target, dtype: AsDtype = None) -> None:
    """A Megatron directory, or a checkpoint of a run (RUN/checkpoints/step_N), to a Hugging Face directory."""
    from checkpoints_tools.megatron_to_hf import megatron_to_hf as act

    act(source, target, _dtype(dtype))


@convert.command("inspect")
def inspect(directory: Source) -> None:
    """What is in a checkpoint: format, model, sizes, layout, step."""
    from checkpoints_tools.inspect import describe

    for line in describe(directory):
        typer.echo(line)


@convert.command("verify")
def verify(a: Source, b: Source) -> None:
    """Compare two checkpoints of any format bit by bit, and what the models say; exit code 1 if they differ."""
    from checkpoints_tools.verify import PROMPTS, SHOWN, differences, logits_gap

    found = list(differences(a, b))
    for line in found[:SHOWN]:
        typer.echo(line)
    if len(found) > SHOWN:
        typer.echo(f"... and {len(found) - SHOWN} more")
    if found:
        typer.echo(f"{a} and {b} differ")
        raise typer.Exit(1)
    typer.echo(f"every tensor of {a} and {b} is the same, bit by bit")
    gap = logits_gap(a, b)
    if isinstance(gap, str):
        typer.echo(f"logits were not compared: {gap}")
    else:
        typer.echo(f"largest difference of logits on {PROMPTS} prompts: {gap:.3g}")
        raise typer.Exit(int(gap > 0))


def _dtype(named: Dtype | None) -> torch.dtype | None:
    import torch

    return None if named is None else {"float32": torch.float32, "bfloat16": torch.bfloat16}.get(named, torch.float16)


def run_alone(name: str) -> None:
    """A command as a program of its own: `python -m checkpoints_tools.hf_to_megatron SRC DST`."""
    try:
        convert([name, *sys.argv[1:]])
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
