"""What is in a checkpoint."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from checkpoints_tools.source import Source, find_source, read_step
from megatron_rl.resharding.megatron_files import MegatronReader
from megatron_rl.resharding.names import hf_shapes
from megatron_rl.resharding.torch_dist import ChunkReader


def describe(directory: Path) -> Iterator[str]:
    """Lines to be read. Raises UserError as opening it does."""
    source = find_source(directory)
    shape, files = source.spec.shape, [path for path in sorted(directory.iterdir()) if path.is_file()]
    with source.open() as reader:
        sizes = hf_shapes(shape)
        dtypes = Counter(str(reader.dtype(name)).removeprefix("torch.") for name in sizes)
        yield f"{directory}: {_KINDS[source.kind]}"
        yield (
            f"model        {shape.family}, {shape.layers} layers, hidden {shape.hidden}, {shape.heads} heads, "
            f"{shape.kv_heads} key-value heads of {shape.head_dim}, MLP {shape.intermediate}, "
            f"vocabulary {shape.vocab}, {'tied' if shape.tied else 'untied'}"
        )
        yield f"ends with    token ids {', '.join(map(str, sorted(source.spec.eos_token_ids))) or 'none'}"
        yield (
            f"weights      {sum(map(math.prod, sizes.values())):,} parameters in {len(sizes)} tensors, "
            + ", ".join(f"{count} of {dtype}" for dtype, count in dtypes.items())
        )
        yield f"on disk      {sum(path.stat().st_size for path in files):,} bytes in {len(files)} files"
        if isinstance(reader, MegatronReader):
            yield from _of_megatron(source, reader.chunks)
        if reader.unknown:
            yield f"unknown      {', '.join(reader.unknown)}"


_KINDS = {"Hugging Face": "Hugging Face directory", "Megatron": "Megatron checkpoint", "run": "checkpoint of a run"}


def _of_megatron(source: Source, chunks: ChunkReader) -> Iterator[str]:
    state = [key for key in chunks.tensors if key.startswith("optimizer.")]
    if state:
        size = sum(math.prod(chunks.tensors[key].size) * chunks.dtype(key).itemsize for key in state)
        yield f"optimizer    {len(state)} tensors, {size:,} bytes"
    count = sum(len(tensor.chunks) for tensor in chunks.tensors.values())
    yield f"cut into     {count} pieces, that any layout can read"
    if source.kind == "run":
        noted = read_step(source.directory)
        layout = noted["layout"]
        assert isinstance(layout, dict)
        yield f"step         {noted['step']} ({noted['updates']} optimizer steps), base model {source.beside}"
        yield "written by   " + ", ".join(f"{name} {size}" for name, size in layout.items())
