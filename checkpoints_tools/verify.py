"""Whether two checkpoints hold the same model: each tensor bit by bit, then what the models say."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import torch
from torch import Tensor

from checkpoints_tools.hf_to_megatron import BLOCK_BYTES
from checkpoints_tools.progress import progress
from checkpoints_tools.source import Source, find_source
from megatron_rl.resharding.hf_files import HfReader
from megatron_rl.resharding.megatron_files import MegatronReader
from megatron_rl.resharding.names import hf_shapes

PROMPTS, TOKENS = 3, 16
SHOWN = 10
"""Differing tensors that are named."""


def differences(a: Path, b: Path) -> Iterator[str]:
    """What differs, a line each.

    Raises:
        UserError: one of them can't be read.
    """
    first, second = find_source(a), find_source(b)
    if first.spec != second.spec:
        yield f"config.json: {first.spec} in {a}, {second.spec} in {b}"
    if first.spec.shape != second.spec.shape:
        return
    sizes = hf_shapes(first.spec.shape)
    with first.open() as one, second.open() as other, progress("comparing", sum(map(_count, sizes.values()))) as done:
        for name, size in sizes.items():
            if one.dtype(name) != other.dtype(name):
                yield f"{name}: {one.dtype(name)} in {a}, {other.dtype(name)} in {b}"
            elif (differing := _differing(one, other, name, size)) > 0:
                yield f"{name}: {differing} of {_count(size)} elements differ"
            done(_count(size))


def _count(size: tuple[int, ...]) -> int:
    return torch.Size(size).numel()


def _differing(
    one: HfReader | MegatronReader, other: HfReader | MegatronReader, name: str, size: tuple[int, ...]
) -> int:
    most = max(1, BLOCK_BYTES // (_count(size[1:]) * 4))
    return sum(
        int((_bits(one.read(name, rows)) != _bits(other.read(name, rows))).sum())
        for rows in ((slice(low, low + most),) for low in range(0, size[0], most))
    )


def _bits(tensor: Tensor) -> Tensor:
    """NaN is NaN here, and 0 is not −0."""
    return tensor.contiguous().view(torch.int32 if tensor.dtype.itemsize == 4 else torch.int16)


def logits_gap(a: Path, b: Path) -> float | str:
    """The largest difference of the two models' logits on a few made-up prompts, or why that was not looked at."""
    sources = find_source(a), find_source(b)
    needed = 8 * sum(map(_count, hf_shapes(sources[0].spec.shape).values()))
    free = psutil.virtual_memory().available
    if needed > free / 2:
        return f"both models in float32 take {needed / 1e9:.0f} GB of the {free / 1e9:.0f} GB that are free"
    draw = torch.Generator().manual_seed(0)
    vocab = min(source.spec.shape.vocab for source in sources)
    prompts = torch.randint(0, vocab, (PROMPTS, TOKENS), generator=draw)
    mine, theirs = (_logits(source, prompts) for source in sources)
    return float((mine - theirs).abs().max())


@torch.no_grad()
def _logits(source: Source, prompts: Tensor) -> Tensor:
    """Of transformers' model, in float32."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(source.beside)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    parameters = dict(model.named_parameters())
    with source.open() as reader:
        for name in source.names:
            parameters[name].copy_(reader.read(name, (slice(None),)))
    found: Tensor = model(prompts).logits
    return found
