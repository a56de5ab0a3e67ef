"""Hugging Face checkpoint directories: read by slices, written in files of bounded size."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from megatron_rl.errors import UserError
from megatron_rl.files import share
from megatron_rl.resharding.names import Shape, hf_shapes

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
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
        for file in _files(directory):
            try:
                opened = self._stack.enter_context(safe_open(file, framework="pt"))
            except (OSError, SafetensorError) as error:
                raise UserError(f"{file}: {error}") from None
            self._home.update(dict.fromkeys(opened.keys(), opened))
        for name, expected in hf_shapes(shape).items():
            if name not in self._home:
                raise UserError(f"{directory}: tensor {name} is missing")
            found = tuple(self._home[name].get_slice(name).get_shape())
            if found != expected:
                raise UserError(f"{directory}: tensor {name} has shape {found}, config.json makes it {expected}")

    def __enter__(self) -> HfReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def read(self, name: str, index: tuple[slice, ...]) -> Tensor:
        """The rectangle `index` of a tensor."""
        return self._home[name].get_slice(name)[index]


def _files(directory: Path) -> list[Path]:
    index = directory / _INDEX
    if not index.exists():
        single = directory / _SINGLE
        if not single.exists():
            raise UserError(f"{directory}: neither {_SINGLE} nor {_INDEX} is there")
        return [single]
    try:
        return sorted({directory / name for name in json.loads(index.read_text())["weight_map"].values()})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{index}: not an index of safetensors files ({error!r})") from None


def write_hf(target: Path, source: Path, tensors: Iterable[tuple[str, Tensor]], *, max_bytes: int = 5 * 10**9) -> None:
    """Write an HF directory: `tensors`, and everything beside the weights from the directory `source`.

    Written under a temporary name and renamed when complete; an older `target` goes only then.

    Args:
        target: the directory to make.
        source: the directory of the base model (config.json, tokenizer, chat template, licence).
        tensors: (HF name, tensor) in any order; held in memory up to `max_bytes`.
        max_bytes: size of a file.
    """
    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for pattern in _CARRIED:
        for file in source.glob(pattern):
            shutil.copy2(file, partial / file.name)
    files, total, dtype = _write_weights(partial, tensors, max_bytes)
    _set_dtype(partial / "config.json", dtype)
    if len(files) == 1:
        (partial / files[0][0]).rename(partial / _SINGLE)
    else:
        weight_map = {}
        for number, (name, names) in enumerate(files, 1):
            final = f"model-{number:05d}-of-{len(files):05d}.safetensors"
            (partial / name).rename(partial / final)
            weight_map.update(dict.fromkeys(names, final))
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (partial / _INDEX).write_text(json.dumps(index, indent=2))
    shutil.rmtree(target, ignore_errors=True)
    partial.rename(target)


def _set_dtype(config: Path, dtype: torch.dtype) -> None:
    """Let config.json say what the weights are, or a reader would round them to what they were."""
    if config.exists():
        fields = json.loads(config.read_text())
        fields.pop("torch_dtype", None)  # the older name
        fields["dtype"] = str(dtype).removeprefix("torch.")
        config.write_text(json.dumps(fields, indent=2) + "\n")


def _write_weights(
    directory: Path, tensors: Iterable[tuple[str, Tensor]], max_bytes: int
) -> tuple[list[tuple[str, list[str]]], int, torch.dtype]:
    files: list[tuple[str, list[str]]] = []
    held: dict[str, Tensor] = {}
    total = 0

    def flush() -> None:
        name = f"part-{len(files)}.safetensors"
        save_file(held, directory / name, metadata={"format": "pt"})
        share(directory / name)
        files.append((name, list(held)))
        held.clear()

    for name, tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if held and sum(t.numel() * t.element_size() for t in held.values()) + size > max_bytes:
            flush()
        held[name] = tensor.detach().to("cpu", copy=True).contiguous()
        total += size
    dtype = next(iter(held.values())).dtype
    flush()
    return files, total, dtype
