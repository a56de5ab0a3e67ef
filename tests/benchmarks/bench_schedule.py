"""How full and how even micro-batches come out, against two other ways: `python -m tests.benchmarks.bench_schedule`.

8,192 made-up response lengths, FLOPs of Qwen2.5-32B, on one CPU.

- `first fit`: first fit decreasing by tokens; micro-batches are sorted by FLOPs and dealt out to ranks in turn.
- `verl`: as its PPO trainer does it, with its functions: responses to ranks by Karmarkar-Karp, as many to each; then
  each rank's to micro-batches by the same, one more on every rank until none exceeds the budget. Its seconds are those
  of the slowest rank, as ranks work at the same time. Its measure of work is fixed, to that of a 7B model.
- `verl, these FLOPs`: the same with the FLOPs that the table is measured in, which verl has no option for.

Bound: the fewest micro-batches that could hold all tokens. Fill: tokens, of the room in all micro-batches. Imbalance:
by how much the rank with most FLOPs is above the mean. Lockstep: the same summed over micro-batches, which is lost
where ranks wait for one another in each of them.
"""

import argparse
import importlib
import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch

from megatron_rl.training.flops import sequence_flops
from megatron_rl.training.schedule import schedule
from tests.cases.lengths import QWEN2_5_32B, imbalance, lockstep_loss, response_lengths

RESPONSES = 8192
BUDGETS = (20_480, 40_960)
RANKS = (4, 16)
FLOPS = sequence_flops(QWEN2_5_32B)
VERL = "verl==0.9.1"

Plan = list[list[list[int]]]
"""Indices of responses, `[ranks][micro-batches][responses]`."""


def main() -> None:
    """Print one Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", nargs="+", default=["ours", "first fit", "verl"], help="or 'verl, these FLOPs'")
    asked = parser.parse_args().ways
    lengths = response_lengths(RESPONSES, seed=0)
    print("| method | budget | DP | micro-batches | bound | fill % | imbalance % | lockstep % | s |")
    print("|---|---|---|---|---|---|---|---|---|", flush=True)
    ways: dict[str, Callable[[Sequence[int], int, int], tuple[Plan, float]]] = {"ours": ours, "first fit": first_fit}
    missing = ""
    try:
        balancing = importlib.import_module("verl.utils.seqlen_balancing")
        for name, work in {"verl": balancing.calculate_workload, "verl, these FLOPs": FLOPS}.items():
            ways[name] = partial(verl, balancing, work)
    except ModuleNotFoundError as error:
        missing = f"\nverl: not installed (pip install --no-deps {VERL}; pip install ray tensordict): {error}"
    for name in (name for name in asked if name in ways):
        for budget in BUDGETS:
            for ranks in RANKS:
                print(row(name, lengths, budget, ranks, *ways[name](lengths, budget, ranks)), flush=True)
    print(missing)


def row(name: str, lengths: Sequence[int], budget: int, ranks: int, plan: Plan, seconds: float) -> str:
    """A line of the table.

    Raises:
        RuntimeError: the plan breaks a rule that all follow.
    """
    (count,) = {len(of_rank) for of_rank in plan}
    batches = list(chain.from_iterable(plan))
    if sorted(chain.from_iterable(batches)) != list(range(len(lengths))):
        raise RuntimeError(f"{name}: not every response once")
    if max(sum(lengths[index] for index in batch) for batch in batches) > budget:
        raise RuntimeError(f"{name}: a micro-batch exceeds the budget")
    work = [[sum(FLOPS(lengths[index]) for index in batch) for batch in of_rank] for of_rank in plan]
    bound = math.ceil(sum(lengths) / (budget * ranks))
    fill = sum(lengths) / (budget * ranks * count)
    shares = " | ".join(f"{100 * share:.3f}" for share in (imbalance(work), lockstep_loss(work)))
    return f"| {name} | {budget:,} | {ranks} | {count} | {bound} | {100 * fill:.1f} | {shares} | {seconds:.2f} |"


def ours(lengths: Sequence[int], budget: int, ranks: int) -> tuple[Plan, float]:
    """The plan and the seconds that it took."""
    started = time.perf_counter()
    plan = schedule(lengths, FLOPS, ranks=ranks, max_tokens=budget)
    return plan, time.perf_counter() - started


def first_fit(lengths: Sequence[int], budget: int, ranks: int) -> tuple[Plan, float]:
    """The plan and the seconds that it took."""
    started = time.perf_counter()
    batches: list[list[int]] = []
    rooms: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        which = next((which for which, room in enumerate(rooms) if room >= lengths[index]), len(rooms))
        if which == len(rooms):
            batches.append([])
            rooms.append(budget)
        batches[which].append(index)
        rooms[which] -= lengths[index]
    batches += [[] for _ in range(-len(batches) % ranks)]
    batches.sort(key=lambda batch: -sum(FLOPS(lengths[index]) for index in batch))
    return [batches[rank::ranks] for rank in range(ranks)], time.perf_counter() - started


def verl(
    balancing: Any, work_of: Callable[[Any], Any], lengths: Sequence[int], budget: int, ranks: int
) -> tuple[Plan, float]:
    """The plan and the seconds of the slowest rank, by verl's module `balancing` and a measure of work."""
    balancing.calculate_workload = work_of
    tensordict = importlib.import_module("tensordict")  # which verl needs
    started = time.perf_counter()
    work = work_of(torch.tensor(lengths)).tolist()
    shares = balancing.get_seqlen_balanced_partitions(work, k_partitions=ranks, equal_size=True)
    seconds = [time.perf_counter() - started] * ranks
    plan: Plan = [[] for _ in shares]
    most = 1
    while len({len(of_rank) for of_rank in plan} | {most}) > 1:  # what its ranks agree on by an all-reduce
        for rank, share in enumerate(shares):
            if len(plan[rank]) != most:
                starts = torch.tensor([0, *(lengths[index] for index in share)]).cumsum(0)
                ids = torch.nested.nested_tensor_from_jagged(torch.zeros(int(starts[-1]), dtype=torch.uint8), starts)
                data = tensordict.TensorDict({"input_ids": ids}, batch_size=[len(share)])
                started = time.perf_counter()
                _, found = balancing.rearrange_micro_batches(data, budget, min_num_micro_batch=most)
                seconds[rank] += time.perf_counter() - started
                plan[rank] = [[share[number] for number in batch] for batch in found]
        most = max(map(len, plan))
    return plan, max(seconds)


if __name__ == "__main__":
    main()
