"""Conversion at full size against `cp` of the same bytes: time, and peak anonymous memory.

python -m tests.benchmarks.bench_convert DIRECTORY     (46 GB there; removed afterwards)
"""

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch
from transformers import AutoConfig

from megatron_rl.resharding.hf_files import plan_of
from megatron_rl.resharding.hf_writer import Files
from megatron_rl.resharding.names import Shape
from tests.tiny import hf_config

QWEN_7B = Shape(
    layers=28, hidden=3584, heads=28, kv_heads=4, head_dim=128, intermediate=18944, vocab=152064, tied=False
)
QWEN_32B = Shape(
    layers=64, hidden=5120, heads=40, kv_heads=8, head_dim=128, intermediate=27648, vocab=152064, tied=False
)
MODELS = {"7B": QWEN_7B, "4 layers of 32B": replace(QWEN_32B, layers=4)}
ROUNDS = 2


def make(directory: Path, shape: Shape) -> None:
    """A checkpoint of these shapes; what is in it does not matter, but no block of it is like another."""
    directory.mkdir()
    config: AutoConfig = hf_config(shape, max_position_embeddings=32768)
    config.dtype = torch.bfloat16
    config.save_pretrained(directory)
    noise = torch.randint(-(2**31), 2**31 - 1, (1 << 24,), dtype=torch.int32)
    planned = plan_of(shape, torch.bfloat16)
    with Files(directory, planned) as files:
        for name, (size, dtype) in planned.items():
            left = torch.Size(size).numel() * dtype.itemsize
            at = 0
            while left:
                block = noise.view(torch.uint8)[: min(left, noise.nbytes)]
                files.fill(name, at, block)
                at, left = at + len(block), left - len(block)
            noise[:1000] += 1


def timed(command: list[str]) -> tuple[float, float]:
    """Seconds of a command, and the most GB of anonymous memory it had."""
    os.sync()
    begun = time.monotonic()
    process = subprocess.Popen(command)
    peak = 0
    while process.poll() is None:
        peak = max(peak, anonymous(process.pid))
        time.sleep(0.05)
    seconds = time.monotonic() - begun
    assert process.returncode == 0, command
    return seconds, peak * 1024 / 1e9


def anonymous(pid: int) -> int:
    """kB of a process."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in text.splitlines() if line.startswith("RssAnon")), 0)


def rounds(directory: Path, shape: Shape) -> Iterator[tuple[str, float, float, float]]:
    """Each way and round: seconds of cp, of the conversion, and its memory."""
    hf, megatron, out = directory / "hf", directory / "megatron", directory / "out"
    make(hf, shape)
    python = [sys.executable, "-m"]
    subprocess.run([*python, "checkpoints_tools.hf_to_megatron", str(hf), str(megatron)], check=True)
    for way, source in (("hf_to_megatron", hf), ("megatron_to_hf", megatron)):
        for _ in range(ROUNDS):
            copied, _ = timed(["cp", "-r", str(source), str(out)])
            shutil.rmtree(out)
            seconds, memory = timed([*python, f"checkpoints_tools.{way}", str(source), str(out)])
            shutil.rmtree(out)
            print(f"{way}: cp {copied:.1f} s, conversion {seconds:.1f} s, {memory:.2f} GB", file=sys.stderr, flush=True)
            yield way, copied, seconds, memory


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parent = parser.parse_args().directory / "bench_convert"
    print("| model | way | cp, s (each round) | conversion, s | ratio of medians, of minima | peak anonymous GB |")
    print("|---|---|---|---|---|---|")
    for name, shape in MODELS.items():
        parent.mkdir(parents=True)
        try:
            found = list(rounds(parent, shape))
        finally:
            shutil.rmtree(parent)
        for way in dict.fromkeys(way for way, *_ in found):
            copied, took, memory = zip(*(rest for one, *rest in found if one == way), strict=True)
            ratio = f"{median(took) / median(copied):.2f}, {min(took) / min(copied):.2f}"
            times = (", ".join(f"{one:.1f}" for one in each) for each in (copied, took))
            print(f"| {name} | {way} | {' | '.join(times)} | {ratio} | {max(memory):.2f} |", flush=True)


if __name__ == "__main__":
    main()
