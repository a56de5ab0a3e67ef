"""Four Megatron ranks, TP 2 × PP 2 of two chunks each, that push their weights into four embedded engines.

torchrun --nproc-per-node 4 -m tests.distributed.pushing DIRECTORY
"""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_rl.config import Config
from megatron_rl.errors import UserError
from megatron_rl.resharding import cuts
from megatron_rl.resharding.pieces import Part, Side, parts
from megatron_rl.resharding.sides import engine_group
from megatron_rl.resharding.sync import WeightSync
from megatron_rl.rollout.engines import make_engine
from megatron_rl.training import setup
from megatron_rl.training.hf_config import read_model_spec
from megatron_rl.training.trainer import Trainer
from tests.distributed.data import MODELS, VOCABULARY, make_config

ACROSS_NODES = {"untied": "direct", "tied": "once", "qwen3": "once", "llama": "direct"}


def config_of(kind: str, directory: Path) -> Config:
    """With four ranks on one node both ways between nodes are the same."""
    trainer: dict[str, object] = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "pipeline_chunks": 2}
    reshard: dict[str, object] = {"verify": "always", "across_nodes": ACROSS_NODES[kind]}
    return make_config(directory / kind, directory / "run", trainer=trainer, reshard=reshard)


def pushed(config: Config, groups: setup.Groups) -> list[str]:
    """What is wrong after each of three updates, from NaN."""
    spec, found = read_model_spec(config.model.path), list[str]()
    group = engine_group(config, spec.shape)
    engine = make_engine(config, spec, group, eos_token_ids=frozenset({2}), vocabulary=VOCABULARY)
    engine.start()
    trainer = Trainer(config, spec, VOCABULARY)
    sync = WeightSync(config, spec.shape, VOCABULARY, groups, engine, group)
    sync.bucket_bytes = 3000
    parameters = dict(engine._running().named_parameters())  # type: ignore[attr-defined]
    for version in range(3):
        for parameter in parameters.values():
            parameter.data.fill_(torch.nan)
        if version == 0 and group.rank == 1:  # as of an engine that is lost
            lost, engine.digests = engine.digests, lambda names: []  # type: ignore[method-assign]
        sync.push(trainer.model, version)
        if version == 0 and group.rank == 1:
            engine.digests = lost  # type: ignore[method-assign]
        if sync._compared != (version > 0):
            found.append(f"{version}: compared: {sync._compared}")
        planned = {name: parameter.data.clone() for name, parameter in parameters.items()}
        golden = dict(trainer.hf_weights())
        found += [f"{version}: {name}" for name in golden if not torch.equal(planned[name], golden[name])]
        if engine.health() is not True or len(golden) != len(planned):
            found.append(f"{version}: {len(golden)} tensors, {len(planned)} parameters")
        with torch.no_grad():
            for weight in trainer.parameters():  # alike on all stages: two of them hold a tied embedding
                weight.mul_(1.25)
    return found


def swapped(side: Side, *given: Any) -> list[Part]:
    """The table, with gate and up in each other's place in Megatron's parameter."""
    found = parts(side, *given)
    return [_swap(part) if side == "megatron" and "linear_fc1" in part.name else part for part in found]


def _swap(part: Part) -> Part:
    gate, up = part.pieces
    return replace(part, pieces=(replace(gate, hf=up.hf), replace(up, hf=gate.hf)))


def main() -> None:
    """All kinds of models, and one with a wrong table."""
    directory, groups, found = Path(sys.argv[1]), None, dict[str, list[str]]()
    for name in (*MODELS, "gate and up swapped"):
        kind = name if name in MODELS else "untied"
        config = config_of(kind, directory)
        groups = groups or setup.start(config, engine_group(config, MODELS[kind][0]))
        if name != kind:
            cuts.parts = swapped  # type: ignore[assignment]
        try:
            found[name] = pushed(config, groups)
        except UserError as error:
            found[name] = [str(error)]
    torch.save(found, directory / f"pushed_{dist.get_rank()}.pt")
    setup.stop(groups)


if __name__ == "__main__":
    main()
