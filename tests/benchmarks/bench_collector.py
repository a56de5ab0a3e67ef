"""The collector at production size on simulated engines: `python -m tests.benchmarks.bench_collector [--figure FILE]`.

512 groups of 16 a step on 32 engines (128 GPUs at TP 4), lengths with a median of 3,000 tokens and a tail that is cut
at 20,480, half of the groups kept. An engine decodes a token of each running response in 12 ms + 0.03 ms for each:
about what an H200 does with a 32B model; the figures are for comparing ways, not for forecasting seconds.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from megatron_rl.rollout.board import StoreBoard
from megatron_rl.rollout.collector import Collector
from megatron_rl.rollout.leader import Leader
from megatron_rl.types import Prompt
from tests.simulated import Clock, FakeEngine, SimulatedSampler, SlowGrades, lognormal
from tests.tiny import run_config

ENGINES, WANTED, GROUP, LONGEST = 32, 512, 16, 20_480
PLACES = 256
"""Responses that run on an engine at once: about what the key-value cache of four H200 holds of a 32B model. A batch
asks 512 of each."""

COMPARED, STEPS, STEADY, TRAIN_S = 8, 8, 4, 300.0
"""A quarter of the engines and of the batch is enough to compare ways. Steps of a run, and the seconds of training
between two rollouts, in which colocated engines do nothing."""

WAYS: dict[str, dict[str, Any]] = {
    "one step's prompts": {},
    "surplus serves the next": {"max_staleness": 1},
    "partial, one batch ahead": {"max_staleness": 1, "partial": True},
    "partial, two batches ahead": {"max_staleness": 2, "partial": True},
    "async, on GPUs of their own": {},
    "async and partial, two ahead": {"max_staleness": 2, "partial": True},
}


class Stream:
    """Prompts of 200 tokens."""

    position = 0

    def draw(self, count: int) -> list[tuple[int, Prompt]]:
        first, self.position = self.position, self.position + count
        return [(n, Prompt(index=n, text="", ids=(1,) * 200, answer="")) for n in range(first, self.position)]


def right(prompt: Prompt, sample: int) -> float:
    """Half of the groups are mixed."""
    return float(prompt.index % 2 and sample < 8)


def collector(options: dict[str, Any], engines: int) -> tuple[Collector, SimulatedSampler]:
    clock = Clock()
    config = run_config(
        algorithm={"dynamic_sampling": True},
        rollout={
            "prompts_per_step": WANTED * engines // ENGINES,
            "responses_per_prompt": GROUP,
            "max_response_tokens": LONGEST,
            **options,
        },
    )
    lengths = lognormal(3000, 0.9)
    fakes = [FakeEngine(clock, lengths, lambda running: 0.012 + 0.00003 * running, PLACES) for _ in range(engines)]
    sampler = SimulatedSampler(clock, fakes, [SlowGrades(clock, right, lambda prompt: 0.5) for _ in fakes])
    sampler.pause_s = 0.25
    return Collector(sampler, Stream(), config, print), sampler  # type: ignore[arg-type]


def idle(engines: Sequence[FakeEngine], begun: float, ended: float, full: int) -> float:
    """Share of an engine's places, `full` of them, that were empty in that time."""
    occupied = sum(engine.occupied(begun, ended) for engine in engines)
    return 1 - occupied / (full * len(engines) * (ended - begun))


def compare_ways(figure: Path | None) -> None:
    """Seconds of a step and empty places, by way."""
    print("| way | a step, s | of it rollout, s | places empty in rollout | in the whole step | tokens thrown away |")
    print("|---|---:|---:|---:|---:|---:|")
    curves = {}
    for name, options in WAYS.items():
        ahead = name.startswith("async")
        one, sampler = collector(options, COMPARED)
        clock, full = sampler.clock, PLACES
        rollout_s = empty = trained = sampled = trained_until = 0.0
        for step in range(1, STEPS + 1):
            for engine in sampler.engines:
                engine.version = step
            begun = clock.now
            rollout = one.collect(step)
            assert rollout is not None
            if step == STEADY:
                first = begun
            if step >= STEADY:
                rollout_s += clock.now - begun
                empty += idle(sampler.engines, begun, clock.now, full) * (clock.now - begun)
                values = rollout.metrics.values()
                trained += values["rollout/tokens"]
                sampled += values["work/tokens"]
            # Ahead of the trainer, the next step is sampled while this one is trained on.
            clock.now = max(clock.now, trained_until) if ahead else clock.now + TRAIN_S
            trained_until = clock.now + TRAIN_S
        steps, all_s = STEPS - STEADY + 1, clock.now - first
        print(
            f"| {name} | {all_s / steps:.0f} | {rollout_s / steps:.0f} | {empty / rollout_s:.0%} | "
            f"{idle(sampler.engines, first, clock.now, full):.0%} | {max(0.0, 1 - trained / sampled):.0%} |"
        )
        curves[name] = [engine.history for engine in sampler.engines]
    if figure:
        draw(curves, figure)


def draw(curves: dict[str, list[list[tuple[float, int]]]], path: Path) -> None:
    """How many responses run, over the first steps."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    _, axes = pyplot.subplots(len(curves), 1, figsize=(9, 9), sharex=True, sharey=True, layout="constrained")
    last = 4000
    times = np.arange(0, last, 5)
    for axis, (name, histories) in zip(axes, curves.items(), strict=True):
        running = np.zeros(len(times))
        for history in histories:
            at = np.array([when for when, _ in history])
            count = np.array([running_then for _, running_then in history])
            place = np.searchsorted(at, times, side="right") - 1
            running += np.where(place >= 0, count[np.maximum(place, 0)], 0)
        axis.fill_between(times, running / 1000, step="post")
        axis.set_title(name, loc="left", fontsize=9)
    axes[-1].set_xlabel("seconds (gaps: training)")
    axes[1].set_ylabel("thousand responses that run")
    pyplot.savefig(path, dpi=110)


def controller(store: dist.Store) -> None:
    """Seconds that a leader and its collector spend on a step, engines apart, with the events on a real store."""
    one, sampler = collector({}, ENGINES)
    spent, boards = [0.0] * ENGINES, 0
    original, engine_s = Leader.step, [0.0]

    def timed(self: Leader, *arguments: Any) -> bool:
        before, begun = engine_s[0], time.perf_counter()
        moved = original(self, *arguments)
        spent[self.number] += time.perf_counter() - begun - (engine_s[0] - before)
        return moved

    for name in ("submit", "poll", "abort"):
        of_class = getattr(FakeEngine, name)

        def apart(self: FakeEngine, *arguments: Any, of_class: Any = of_class) -> Any:
            begun = time.perf_counter()
            try:
                return of_class(self, *arguments)
            finally:
                engine_s[0] += time.perf_counter() - begun

        setattr(FakeEngine, name, apart)
    Leader.step = timed  # type: ignore[method-assign, assignment]
    sampler.make_board = lambda events: StoreBoard(store, f"bench/{boards}")
    try:
        rollout = one.collect(1)
    finally:
        Leader.step = original  # type: ignore[method-assign]
    assert rollout is not None
    seconds, groups = sampler.clock.now, sum(len(e.asked) for e in sampler.engines)
    print(f"\n{groups} groups on {ENGINES} engines, {seconds:.0f} simulated seconds of sampling.")
    print(f"A leader: {sum(spent) / ENGINES:.2f} s on average, {max(spent):.2f} s at most: {max(spent) / seconds:.2%}")


def main() -> None:
    """Print tables; draw the figure."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--figure", type=Path)
    arguments = parser.parse_args()
    controller(dist.TCPStore("127.0.0.1", 0, is_master=True))
    compare_ways(arguments.figure)


if __name__ == "__main__":
    main()
