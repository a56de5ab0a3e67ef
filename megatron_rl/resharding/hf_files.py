"""Hugging Face checkpoint directories: read by slices, written in files of bounded size."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_rl.errors import UserError, first_cause
from megatron_rl.resharding.hf_writer import INDEX, SINGLE, Files, Planned
from megatron_rl.resharding.names import Shape, hf_shapes

_CARRIED = (
    "config.json generation_config.json tokenizer* vocab.* merges.txt special_tokens_map.json added_tokens.json "
    "chat_template* LICENSE* NOTICE*"
).split()


class HfReader:
    """Reads rectangles of the tensors of an HF directory; files are mapped, not loaded.

    Raises:
        UserError: a file or tensor is missing, damaged, or has another shape than the model.
    """

    def __init__(self, directory: Path, shape: Shape) -> None:
        self._stack = ExitStack()
        self._home: dict[str, safe_open] = {}
        for file, named in _files(directory).items():
            try:
                opened = self._stack.enter_context(safe_open(file, framework="pt"))
            except (OSError, SafetensorError) as error:
                raise UserError(f"{file}: {error}") from None
            found = dict.fromkeys(opened.keys(), opened)
            for name in named:
                if name not in found:
                    raise UserError(f"{directory / INDEX}: tensor {name} is said to be in {file.name}, and is not")
            self._home.update(found)
        self._sizes = hf_shapes(shape)
        for name, expected in self._sizes.items():
            if name not in self._home:
                raise UserError(f"{directory}: tensor {name} is missing")
            size = tuple(self._home[name].get_slice(name).get_shape())
            if size != expected:
                raise UserError(f"{directory}: tensor {name} has shape {size}, config.json makes it {expected}")

    def __enter__(self) -> HfReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    @property
    def unknown(self) -> list[str]:
        """Tensors that the model doesn't have."""
        return sorted(set(self._home) - set(self._sizes))

    def dtype(self, name: str) -> torch.dtype:
        """Of a tensor."""
        found: torch.dtype = self._home[name].get_slice(name)[0:0].dtype
        return found

    def read(self, name: str, index: tuple[slice, ...]) -> Tensor:
        """The rectangle `index` of a tensor."""
        return self._home[name].get_slice(name)[index]


def _files(directory: Path) -> dict[Path, list[str]]:
    """The files of a directory, and the tensors that the index says are in each."""
    index = directory / INDEX
    if not index.exists():
        single = directory / SINGLE
        if not single.exists():
            raise UserError(f"{directory}: neither {SINGLE} nor {INDEX} is there")
        return {single: []}
    found: dict[Path, list[str]] = {}
    try:
        for name, file in json.loads(index.read_text())["weight_map"].items():
            found.setdefault(directory / file, []).append(name)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{index}: not an index of safetensors files ({error!r})") from None
    return dict(sorted(found.items()))


def write_hf(
    target: Path,
    source: Path,
    tensors: Iterable[tuple[str, Tensor]],
    planned: Planned,
    *,
    max_bytes: int = 5 * 10**9,
) -> None:
    """Write an HF directory: `tensors`, and everything beside the weights from the directory `source`.

    Written under a temporary name and renamed when complete; an older `target` goes only then.

    Args:
        target: the directory to make.
        source: the directory of the base model (config.json, tokenizer, chat template, licence).
        tensors: (HF name, tensor) in any order; each is written when it comes.
        planned: shape and dtype of each, in the order of the files.
        max_bytes: size of a file.

    Raises:
        UserError: it can't be written; nothing is left of it.
    """
    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        carry(source, partial, next(iter(planned.values()))[1])
        with Files(partial, planned, max_bytes=max_bytes) as files:
            for name, tensor in tensors:
                files.fill(name, 0, tensor.detach().to("cpu"))
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise UserError(f"{target} could not be written: {first_cause(error)}") from None


def plan_of(shape: Shape, dtype: torch.dtype) -> Planned:
    """What the HF checkpoint of a model holds, all in one dtype."""
    return {name: (size, dtype) for name, size in hf_shapes(shape).items()}


def carry(source: Path, target: Path, dtype: torch.dtype) -> None:
    """Copy everything beside the weights; config.json says what dtype they have now."""
    for pattern in _CARRIED:
        for file in sorted(source.glob(pattern)):
            if file.is_file():
                shutil.copyfile(file, target / file.name)  # without its mode: it may be read-only
    config = target / "config.json"
    if config.exists():  # or a reader would round them to what they were
        before = json.loads(config.read_text())
        fields: Mapping[str, object] = {key: value for key, value in before.items() if key != "torch_dtype"}  # older
        now = {**fields, "dtype": str(dtype).removeprefix("torch.")}
        if now != before:
            config.write_text(json.dumps(now, indent=2) + "\n")
