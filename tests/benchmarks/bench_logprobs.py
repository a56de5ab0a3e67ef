"""Peak memory and time of log-probs in chunks against the unchunked way: `python -m tests.benchmarks.bench_logprobs`.

fp32, forward and backward to hidden states and weight, on CPUs (Linux). Each row runs in processes of its own, one per
TP rank, which share the machine's cores. Chunks cost one projection in four more and save passes over fresh memory, so
a small hidden size shows the passes, and a large one the projections (at most 4/3).

- `plain`: PyTorch's autograd through the logits' `log_softmax`, entropies from the same, without gradient. With TP 2
  the other rank's columns are one column more, which holds their sum.
- `Megatron`: its `vocab_parallel_cross_entropy`, which works in place and gives no entropies.

Memory, of the rank that takes most: beyond the inputs, and beyond inputs and the two gradients. Backward's peak counts
less the gradients, forward's in full; for `plain` that is a little too low.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from megatron_rl.training import cpu
from megatron_rl.training.logprobs import projected_logprobs

Way = Callable[[Tensor, Tensor, Tensor, dist.ProcessGroup], Tensor]


def main() -> None:
    """Print one Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--vocabulary", type=int, default=152064)
    parser.add_argument("--hidden", type=int, default=256, help="of Qwen2.5-32B's 5,120, what fits")
    parser.add_argument("--tp", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--ways", nargs="+", default=["plain", "Megatron", "256", "512", "1024"], help="or chunk sizes")
    sizes = parser.parse_args()
    print(f"{sizes.tokens:,} tokens, {sizes.vocabulary:,} entries, hidden {sizes.hidden}, {os.cpu_count()} cores\n")
    print("| way | TP | s | s of CPU | peak GB | with gradients | time / plain | peak / plain | gradients differ |")
    print("|---|---|---|---|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as directory:
        for tp in sizes.tp:
            plain: dict[str, float] = {}
            for way in sizes.ways:
                mp.spawn(measure, args=(tp, way, sizes, Path(directory)), nprocs=tp)
                ranks = [torch.load(Path(directory) / f"figures_{rank}.pt") for rank in range(tp)]
                figures = {name: max(rank[name] for rank in ranks) for name in ranks[0]}
                plain = plain or figures
                print(row(way if way in WAYS else f"chunks of {way}", tp, figures, plain), flush=True)


def row(way: str, tp: int, figures: dict[str, float], plain: dict[str, float]) -> str:
    """A line of the table."""
    time_ratio, peak_ratio = (figures[name] / plain[name] for name in ("cpu_seconds", "peak"))
    return (
        f"| {way} | {tp} | {figures['seconds']:.1f} | {figures['cpu_seconds']:.1f} | {figures['peak'] / 1e9:.2f} "
        f"| {figures['with_gradients'] / 1e9:.2f} | {time_ratio:.2f} | {peak_ratio:.3f} | {figures['apart']:.1e} |"
    )


def measure(rank: int, tp: int, way: str, sizes: argparse.Namespace, directory: Path) -> None:
    """In one process of `tp`: save seconds, bytes and how far the gradients are from the first way's."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // tp))
    group = join(rank, tp, directory)
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(sizes.tokens, sizes.hidden, generator=draw).requires_grad_()
    labels = torch.randint(sizes.vocabulary, (sizes.tokens,), generator=draw)
    probe = torch.randn(sizes.tokens, generator=draw)
    columns = sizes.vocabulary // tp
    draw.manual_seed(1 + rank)
    weight = torch.randn(columns, sizes.hidden, generator=draw)
    weight.mul_(3 * sizes.hidden**-0.5).requires_grad_()  # logits deviate by 3

    run = WAYS.get(way) or chunks_of(int(way), sizes.vocabulary)
    run(hidden[:8], weight[:64], labels[:8] % 64, group).sum().backward()  # what the first call alone costs
    hidden.grad = weight.grad = None
    before = held("VmRSS")
    dist.barrier()

    reset_peak()
    clock, cpu_clock = time.perf_counter(), time.process_time()
    objective = (run(hidden, weight, labels, group) * probe).sum()
    forward = held("VmHWM") - before
    reset_peak()
    objective.backward()
    seconds, cpu_seconds = time.perf_counter() - clock, time.process_time() - cpu_clock
    backward = held("VmHWM") - before

    assert hidden.grad is not None
    assert weight.grad is not None
    figures: dict[str, Any] = {
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "peak": max(forward, backward - hidden.nbytes - weight.nbytes),
        "with_gradients": max(forward, backward),
    }
    dist.all_reduce(hidden.grad)
    reference = directory / f"gradients_{tp}_{rank}.pt"
    if not reference.exists():
        torch.save((hidden.grad, weight.grad), reference)
    pairs = zip((hidden.grad, weight.grad), torch.load(reference), strict=True)
    figures["apart"] = max(((one - other).abs().max() / other.abs().max()).item() for one, other in pairs)
    torch.save(figures, directory / f"figures_{rank}.pt")
    dist.destroy_process_group()


def join(rank: int, tp: int, directory: Path) -> dist.ProcessGroup:
    """The tensor-parallel group, Megatron's too."""
    cpu.install()
    from megatron.core import parallel_state

    meeting = directory / "meeting"
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=tp)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp)
    group: dist.ProcessGroup = parallel_state.get_tensor_model_parallel_group()
    return group


def held(name: str) -> int:
    """Bytes of this process: `VmRSS` now, `VmHWM` at the most since `reset_peak`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def reset_peak() -> None:
    """`VmHWM` begins anew: 5 means that, see proc_pid_clear_refs(5)."""
    Path("/proc/self/clear_refs").write_text("5")


def plain(hidden: Tensor, weight: Tensor, labels: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Unchunked: autograd through all logits."""
    logits = hidden @ weight.t()
    if group.size() > 1:
        logits = torch.cat((logits, others_columns(logits.detach(), group)), -1)
    distribution = logits.log_softmax(-1)
    del logits
    with torch.no_grad():
        entropies = -(distribution[:, : len(weight)].exp() * distribution[:, : len(weight)]).sum(-1)
        dist.all_reduce(entropies, group=group)
    columns = labels - group.rank() * len(weight)
    mine = (columns >= 0) & (columns < len(weight))
    # Another rank's label has the logarithm of the sum, up to a constant, for lack of its own: the gradient needs no
    # more. It is the last column less that column's logit, which is a constant.
    columns = torch.where(mine, columns, distribution.shape[-1] - 1)
    return distribution.gather(-1, columns.unsqueeze(-1)).squeeze(-1)


def others_columns(logits: Tensor, group: dist.ProcessGroup) -> Tensor:
    """One logit that stands for all columns of the other ranks, `[tokens, 1]`."""
    mine = logits.logsumexp(-1)
    every = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(every, mine, group=group)
    others = [each for rank, each in enumerate(every) if rank != group.rank()]
    return torch.stack(others).logsumexp(0).unsqueeze(-1)


def megatron(hidden: Tensor, weight: Tensor, labels: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Unchunked: Megatron's cross-entropy."""
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    logprobs: Tensor = -vocab_parallel_cross_entropy((hidden @ weight.t()).unsqueeze(1), labels.unsqueeze(1))
    return logprobs.squeeze(1)


def chunks_of(chunk: int, vocabulary: int) -> Way:
    """Ours."""

    def run(hidden: Tensor, weight: Tensor, labels: Tensor, group: dist.ProcessGroup) -> Tensor:
        options: dict[str, Any] = {"chunk": chunk, "temperature": 1.0, "vocabulary": vocabulary, "group": group}
        return projected_logprobs(hidden, weight, labels, **options)[0]

    return run


WAYS: dict[str, Way] = {"plain": plain, "Megatron": megatron}

if __name__ == "__main__":
    main()
