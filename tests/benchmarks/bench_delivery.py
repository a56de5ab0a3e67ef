"""Seconds that one rank spends on a batch of 8,192 responses: `python -m tests.benchmarks.bench_delivery`.

A rank of 128 (16 engines of 8, DP 4) that leads an engine, on one CPU, 16 optimizer steps of 512 responses behind
prompts of 200 tokens; lengths with a median of 3,000 tokens. The wire is left out: what arrives is made up.
"""

import pickle
import random
import resource
import time
from itertools import chain

import torch

from megatron_rl.rollout.delivery import block, table
from megatron_rl.rollout.ledger import Completed
from megatron_rl.training.flops import sequence_flops
from megatron_rl.training.micro_batches import Place, pack, shares
from megatron_rl.training.setup import data_parallel_ranks
from megatron_rl.types import Graded, Response, TrainedResponse
from tests.cases.lengths import QWEN2_5_32B, response_lengths

RESPONSES, GROUP, ENGINES, SIZE, DATA_PARALLEL, UPDATES = 8192, 16, 16, 8, 4, 16
WORLD = ENGINES * SIZE
BUDGET = 20_480 + 200


def main() -> None:
    """Print a Markdown table."""
    seconds: dict[str, float] = {}
    begun = time.perf_counter()

    def lap(name: str) -> None:
        nonlocal begun
        now = time.perf_counter()
        seconds[name] = seconds.get(name, 0.0) + now - begun
        begun = now

    answers = graded()
    told = pickle.dumps([event(number, answers) for number in range(RESPONSES // GROUP)])
    mine = {number: one for number, one in enumerate(answers) if one.home == 0}
    begun = time.perf_counter()
    flat = [
        Graded(length=length, finish_reason=reason, score=score, home=one.engine * SIZE)
        for one in pickle.loads(told)
        for length, reason, score in one.answers
    ]
    lap("summaries of all responses")
    batch = [trained(mine.get(number, one), number) for number, one in enumerate(flat)]
    place = Place(rank=0, ranks=DATA_PARALLEL)
    replica = data_parallel_ranks(WORLD, tensor=8, context=1, pipeline=4)
    flops = sequence_flops(QWEN2_5_32B)
    sent = packed = 0
    for first in range(0, RESPONSES, RESPONSES // UPDATES):
        update = batch[first : first + RESPONSES // UPDATES]
        begun = time.perf_counter()
        of_ranks = shares(update, place, flops=flops, max_tokens=BUDGET)
        lap("schedule")
        trains = [list(chain.from_iterable(of_rank)) for of_rank in of_ranks]
        moves = table([one.home for one in update], [trains[rank] for rank in replica], 0)
        lap("table")
        blocks = {index: block(update[index]) for index in {i for of_rank in moves.sends for i in of_rank}}
        outgoing = torch.cat([blocks[index].flatten() for of_rank in moves.sends for index in of_rank])
        lap("tuples of its own engine to blocks, a copy for each receiver")
        sent += outgoing.nbytes
        arrived = {index: torch.ones(2, update[index].length, dtype=torch.int32) for index in trains[0]}
        begun = time.perf_counter()
        for micro in of_ranks[0]:
            packed += int(pack([update[i] for i in micro], [arrived[i] for i in micro], place).mask.sum())
        lap("packing")
    print("| part | s |\n|---|---|")
    for name, value in (*seconds.items(), ("together", sum(seconds.values()))):
        print(f"| {name} | {value:.2f} |")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    tokens = sum(one.length for one in answers)
    print(f"\n{tokens:,} tokens, {packed:,} packed, {sent / 1e6:.0f} MB sent; summaries {len(told):,} bytes")
    print(f"peak {peak:.1f} GB, made-up responses among it")


def event(number: int, answers: list[Graded]) -> Completed:
    """What all ranks are told of a group."""
    group = answers[GROUP * number : GROUP * (number + 1)]
    summaries = tuple((one.length, one.finish_reason, one.score) for one in group)
    return Completed(number=number, engine=group[0].home // SIZE, answers=summaries, kept=True)


def graded() -> list[Graded]:
    """In the order of the batch; those of engine 0 with tokens."""
    draw = random.Random(0)
    found = []
    for number, length in enumerate(response_lengths(RESPONSES, seed=0)):
        home = number // GROUP % ENGINES * SIZE
        one = Graded(length=length, finish_reason="stop", score=1.0, home=home)
        if home == 0:
            ids = tuple(draw.choices(range(150_000), k=length))
            logprobs = tuple(-draw.random() for _ in range(length))
            response = Response(ids=ids, logprobs=logprobs, finish_reason="stop", weight_versions=())
            one = Graded.of(response, score=1.0)
        found.append(one)
    return found


def trained(one: Graded, number: int) -> TrainedResponse:
    """With a weight that is not 0."""
    return TrainedResponse(
        prompt_ids=(1,) * 200,
        length=one.length,
        home=one.home,
        response=one.response,
        advantage=1.0,
        weight=1e-5,
        group=number // GROUP,
        number=number,
    )


if __name__ == "__main__":
    main()
