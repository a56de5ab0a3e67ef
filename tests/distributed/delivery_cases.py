"""Tokens that are spread over the ranks, against all of them on every rank: what is packed, written and moved."""

from dataclasses import fields, replace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu

from megatron_rl.rollout.delivery import ALL, at_home, block, bring_groups, deliver
from megatron_rl.training.batch import make_batch, untrained
from megatron_rl.training.micro_batches import pack
from megatron_rl.training.setup import data_parallel_ranks
from megatron_rl.training.trainer import Share, Trainer
from megatron_rl.types import Group, MicroBatch, TrainedResponse
from tests.distributed.data import make_groups


def compare(trainer: Trainer) -> dict[str, Any]:
    """On this rank: numbers that should be 0, pairs that should be equal."""
    rank, world = dist.get_rank(), dist.get_world_size()
    whole = [settled(group, number % world) for number, group in enumerate(make_groups())]
    here = [seen_from(group, rank) for group in whole]
    pairs = list(zip(make_batch(whole, trainer.config).updates, make_batch(here, trainer.config).updates, strict=True))
    pairs.append((tuple(untrained(whole)), tuple(untrained(here))))
    found: dict[str, Any] = {"differing": 0, "numbers": [], "bytes": []}
    for full, known in pairs:
        with patch.object(dist, "all_to_all_single", wraps=dist.all_to_all_single) as moved:
            share = trainer.share(known)
        expected = packed(trainer, full)
        found["differing"] += len(share) != len(expected)
        found["differing"] += sum(not alike(a, b) for a, b in zip(share, expected, strict=True))
        found["numbers"].append([number for micro in share for number in micro.numbers])
        lengths = {one.number: one.length for one in full}
        arrived = moved.call_args.args[0].nbytes
        found["bytes"].append((arrived, 8 * sum(lengths[number] for number in found["numbers"][-1])))
    layout = trainer.config.trainer
    replicas = data_parallel_ranks(
        world,
        tensor=layout.tensor_parallel_size,
        context=layout.context_parallel_size,
        pipeline=layout.pipeline_parallel_size,
    )
    found["data_parallel_rank"] = (replicas[rank], mpu.get_data_parallel_rank())
    answers = [one for group in here for one in group.responses]
    blocks = deliver(answers, [range(len(answers)), *[range(0)] * (world - 1)], rows=ALL)
    expected_blocks = at_home([one for group in whole for one in group.responses], rows=ALL) if rank == 0 else {}
    found["differing"] += blocks.keys() != expected_blocks.keys()
    found["differing"] += sum(not torch.equal(blocks[number], expected_blocks[number]) for number in expected_blocks)
    found["differing"] += bring_groups(here[:3], to=0) != (whole if rank == 0 else here)[:3]
    return found


def settled(group: Group, home: int) -> Group:
    """With all tokens and another home."""
    return replace(group, responses=tuple(replace(one, home=home, text="said") for one in group.responses))


def seen_from(group: Group, rank: int) -> Group:
    """What a rank knows of it."""
    known = (one if one.home == rank else replace(one, response=None, text="") for one in group.responses)
    return Group(prompt=group.prompt, responses=tuple(known))


def packed(trainer: Trainer, update: tuple[TrainedResponse, ...]) -> Share:
    """This rank's micro-batches, from tokens that are all here."""
    place = trainer.place
    of_rank = trainer.sharing.scheduled(update)[place.rank]
    return tuple(pack([update[i] for i in batch], [block(update[i]) for i in batch], place) for batch in of_rank)


def alike(a: MicroBatch, b: MicroBatch) -> bool:
    """Bit by bit."""
    values = [(getattr(a, field.name), getattr(b, field.name)) for field in fields(a)]
    return all(torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y for x, y in values)
