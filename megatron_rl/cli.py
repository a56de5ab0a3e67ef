"""The command line. Commands import what they need when they run, so that help and mistakes answer at once."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core

from checkpoints_tools.command import convert
from megatron_rl.errors import UserError

BAD_INPUT, STOPPED = 2, 75
"""Exit codes: bad input; asked to stop and to be started again (EX_TEMPFAIL)."""

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__)
Recipe = Annotated[Path, typer.Argument(help="A YAML recipe, such as launch/recipes/demo_arithmetic.yaml.")]
Overrides = Annotated[list[str] | None, typer.Argument(help="key.sub=value ...", metavar="[KEY.SUB=VALUE]...")]


class _WithOptions(typer.core.TyperCommand):
    """A command whose help goes on with every option of a recipe."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the command's own help, then the options."""
        from megatron_rl.config_docs import print_options

        super().format_help(ctx, formatter)
        print_options()


@app.command(cls=_WithOptions)
def train(
    recipe: Recipe,
    overrides: Overrides = None,
    show: Annotated[bool, typer.Option("--show", help="Print the resolved configuration and stop.")] = False,
    processes: Annotated[
        int, typer.Option(min=1, help="Start this many local processes; under torchrun leave it alone.")
    ] = 1,
) -> None:
    """Train a model as the recipe says, or go on with a run that was interrupted."""
    from megatron_rl.config_files import dump_config, load_config
    from megatron_rl.presets import PRESETS

    config = load_config(recipe, overrides or [])
    if show:
        preset = config.algorithm.preset
        typer.echo(f"# {preset}: {PRESETS[preset].source}\n{dump_config(config)}", nl=False)
    elif processes > 1:
        from megatron_rl.local_launch import launch_local
        from megatron_rl.training.hf_config import read_model_spec
        from megatron_rl.training.setup import check_layout

        check_layout(config, read_model_spec(config.model.path).shape, processes)
        raise typer.Exit(launch_local(processes, ["train", str(recipe), *(overrides or [])]))
    else:
        from megatron_rl.train import train as run_training

        raise typer.Exit(0 if run_training(config) else STOPPED)


@app.command()
def demo(
    overrides: Overrides = None,
    layout: Annotated[str, typer.Option(help="Layout of the trainer on 2 processes: tp2, pp2, cp2 or dp2.")] = "tp2",
    engine: Annotated[str, typer.Option(help="What samples: embedded, or sglang (in an environment that has it).")] = (
        "embedded"
    ),
    seed: Annotated[int, typer.Option(min=0, help="Of the base model and of the run.")] = 0,
    directory: Annotated[Path, typer.Option(help="Everything is made below it.")] = Path("runs/demo"),
    recipe: Annotated[Path, typer.Option(help="The recipe.")] = Path("launch/recipes/demo_arithmetic.yaml"),
) -> None:
    """Make a tiny model, train it by reinforcement learning on this machine's CPU, and show what changed."""
    from megatron_rl.demo.run import run_demo

    raise typer.Exit(run_demo(recipe, directory, layout, engine, seed, overrides or []))


@app.command()
def docs() -> None:
    """Print every option with its type, default and meaning, as Markdown (docs/config.md)."""
    from megatron_rl.config_docs import describe_options

    typer.echo(describe_options(), nl=False)


@app.command("check-loss")
def check_loss(
    loss: Annotated[str, typer.Argument(help="my_project.losses:my_loss, or ppo_clip, gspo, cispo, reinforce.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(help="Its loss_kwargs, in YAML.", metavar="[KEY=VALUE]...")
    ] = None,
) -> None:
    """Try the contract of a loss on small inputs, in seconds and without a model; exit code 1 if it is broken."""
    from megatron_rl.check_loss import CHECKS, load_checked
    from megatron_rl.check_loss import check_loss as find

    findings = find(load_checked(loss, arguments or []))
    for finding in findings:
        typer.echo(str(finding))
    failed, left = sum(finding.verdict == "FAIL" for finding in findings), len(CHECKS) - len(findings)
    typer.echo(f"{failed} of {len(findings)} checks failed" + (f"; {left} more wait for that one" if left else ""))
    raise typer.Exit(1 if failed else 0)


app.add_typer(convert, name="convert")
plans = typer.Typer(no_args_is_help=True, help="Say what a run will take, before anything is started.")
app.add_typer(plans, name="plan")


@plans.command("reshard")
def plan_reshard(
    recipe: Annotated[Path | None, typer.Argument(help="A YAML recipe; or else --hf-config and the layouts.")] = None,
    overrides: Overrides = None,
    gpus: Annotated[int | None, typer.Option(min=1, help="That the recipe will be started on.")] = None,
    hf_config: Annotated[Path | None, typer.Option(help="A model's config.json.")] = None,
    trainer: Annotated[
        str | None, typer.Option(help="Its layout: tp=8,pp=4,dp=4, and cp=N, vpp=N (chunks a stage); tp=1.")
    ] = None,
    engine: Annotated[str | None, typer.Option(help="An engine's: tp=4; tp=1.")] = None,
    gpus_per_node: Annotated[int, typer.Option(min=1, help="GPUs of a node.")] = 8,
    placement: Annotated[
        str | None,
        typer.Option(
            help="In place of reshard.placement: consecutive, or aligned, every n-th GPU, where the most is local."
        ),
    ] = None,
    across: Annotated[
        str | None,
        typer.Option(
            help="In place of reshard.across_nodes: direct to each GPU, or once to each node and forwarded inside it."
        ),
    ] = None,
    bucket_mb: Annotated[int | None, typer.Option(min=1, help="In place of reshard.bucket_mb.")] = None,
    within_gb_s: Annotated[float, typer.Option(min=0.001, help="GB/s of a GPU inside its node.")] = 400,
    across_gb_s: Annotated[float, typer.Option(min=0.001, help="GB/s of a GPU to other nodes.")] = 50,
    as_json: Annotated[bool, typer.Option("--json", help="In bytes, with every GPU's.")] = False,
) -> None:
    """How many bytes each GPU keeps, has, and receives when weights go from the trainer to its engines."""
    from megatron_rl.resharding.command import Machines, of_options, of_recipe, report
    from megatron_rl.resharding.report import Bandwidths

    if recipe and not hf_config:
        for option, given in (("trainer", trainer), ("engine", engine)):
            if given is not None:
                section = "rollout" if option == "engine" else option
                raise UserError(f"--{option}: the recipe has it; give {section}.tensor_parallel_size=N instead")
        sides = of_recipe(recipe, overrides or [], gpus)
    elif hf_config and not recipe:
        if gpus is not None:
            raise UserError("--gpus: goes with a recipe; how many there are follows from --trainer")
        sides = of_options(hf_config, "tp=1" if trainer is None else trainer, "tp=1" if engine is None else engine)
    else:
        raise UserError("plan reshard: give a recipe, or --hf-config with --trainer and --engine")
    machines = Machines(
        gpus_per_node=gpus_per_node,
        placement=placement,
        across=across,
        bucket_mb=bucket_mb,
        bandwidths=Bandwidths(within=within_gb_s * 1e9, across=across_gb_s * 1e9),
    )
    typer.echo(report(sides, machines, as_json=as_json))


@app.command()
def replay(
    run: Annotated[Path, typer.Argument(help="A run directory.")],
    step: Annotated[int, typer.Option(min=1, help="A step whose batch is kept (telemetry.keep_batches).")],
    preset: Annotated[list[str] | None, typer.Option(help="Compare with these objectives; again for several.")] = None,
) -> None:
    """Compute a step of a run again, on one process: losses, weights, how objectives differ, what is not finite."""
    from megatron_rl.replay import COMPARED, print_replay
    from megatron_rl.replay import replay as run_replay

    print_replay(run_replay(run, step, preset or COMPARED))


def main() -> None:
    """Entry point: a mistake of the user is one line and exit code 2."""
    sys.path.insert(0, os.getcwd())  # functions that a recipe names may lie beside it
    _quiet_libraries()
    try:
        app()
    except UserError as error:
        if _first_to_say(str(error)):
            print(f"error: {error}", file=sys.stderr)
        sys.exit(BAD_INPUT)


def _first_to_say(mistake: str) -> bool:
    """Whether no other rank has said it: a mistake is often that of all ranks, but may be that of one."""
    if "torch.distributed" in sys.modules:
        import torch.distributed as dist

        if dist.is_initialized():
            try:
                return dist.distributed_c10d._get_default_store().add(f"said: {mistake}", 1) == 1
            except RuntimeError:  # rank 0, which holds the store, has ended
                return True
    return os.environ.get("LOCAL_RANK", "0") == "0"  # before the start: once a node, whose disk may be at fault


def _quiet_libraries() -> None:
    """Keep what libraries say about themselves out of what a run says: that Megatron found no Apex, deprecations."""
    warnings.filterwarnings("ignore", module=r"megatron\..*")
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed\..*")
    logging.getLogger("megatron").setLevel(logging.ERROR)


if __name__ == "__main__":
    main()
