"""Where a model's weights are read from: a Hugging Face directory, a Megatron directory, or a run's checkpoint."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import yaml

from megatron_rl.errors import UserError
from megatron_rl.manifest import NAME, first_fault
from megatron_rl.resharding.hf_files import HfReader
from megatron_rl.resharding.hf_writer import DTYPES
from megatron_rl.resharding.megatron_files import MegatronReader, open_weights
from megatron_rl.resharding.names import hf_shapes
from megatron_rl.resharding.torch_dist import is_torch_dist
from megatron_rl.training.hf_config import ModelSpec, read_model_spec

Kind = Literal["Hugging Face", "Megatron", "run"]


@dataclass(frozen=True)
class Source:
    """A model on disk."""

    directory: Path
    kind: Kind
    beside: Path
    """Where config.json, the tokenizer and the like are."""

    spec: ModelSpec

    def open(self) -> HfReader | MegatronReader:
        """Its weights. Raises UserError if one is missing, damaged or of another shape."""
        return open_weights(self.directory, self.spec.shape)

    @property
    def names(self) -> list[str]:
        """HF names of its tensors, in forward order."""
        return list(hf_shapes(self.spec.shape))


def find_source(directory: Path) -> Source:
    """What is in a directory.

    Raises:
        UserError: nothing that is known, or a damaged run checkpoint.
    """
    if not directory.is_dir():
        raise UserError(f"{directory}: is not a directory")
    if not is_torch_dist(directory):
        if (directory / "metadata.json").exists():
            raise UserError(f"{directory / '.metadata'} is missing, which says where Megatron's tensors are")
        return Source(directory, "Hugging Face", directory, read_model_spec(directory))
    if not (directory / NAME).exists():
        return Source(directory, "Megatron", directory, read_model_spec(directory))
    try:
        fault = first_fault(directory)
    except OSError as error:
        raise UserError(f"{error.filename}: {error.strerror}") from None
    if fault:
        raise UserError(f"{directory} is damaged: {fault}")
    beside = _model_of_run(directory)
    return Source(directory, "run", beside, read_model_spec(beside))


def _model_of_run(checkpoint: Path) -> Path:
    """The base model of the run that wrote a checkpoint, as its config.yaml says."""
    for recipe in (checkpoint / "config.yaml", checkpoint.absolute().parent.parent / "config.yaml"):
        with suppress(OSError, yaml.YAMLError, LookupError, TypeError):
            return Path(yaml.safe_load(recipe.read_text())["model"]["path"])
    raise UserError(
        f"{checkpoint}: which model it is of stands in the config.yaml of its run, which is not there; copy it beside "
        "the checkpoint's files"
    )


def dtype_of(source: Source, reader: HfReader | MegatronReader, wanted: torch.dtype | None) -> torch.dtype:
    """The dtype to write: the weights' own, unless another is asked for.

    Raises:
        UserError: they have several, or one that isn't supported.
    """
    found: dict[torch.dtype, str] = {}
    for name in source.names:
        dtype = reader.dtype(name)
        if dtype not in DTYPES:
            raise UserError(f"{source.directory}: tensor {name} is {dtype}; {_list(DTYPES)} can be converted")
        found.setdefault(dtype, name)
    if wanted is not None:
        return wanted
    if len(found) > 1:
        (first, one), (second, other) = list(found.items())[:2]
        raise UserError(f"{source.directory}: tensor {one} is {first} and {other} is {second}; choose one with --dtype")
    return next(iter(found))


def refuse_unknown(source: Source, reader: HfReader | MegatronReader) -> None:
    """Refuse tensors that would be lost. Raises UserError naming the first."""
    left = [name for name in reader.unknown if not _is_copy(source, reader, name)]
    if left:
        raise UserError(
            f"{source.directory}: tensor {left[0]} is none of a model of this config.json ({len(left)} in all)"
        )


def _is_copy(source: Source, reader: HfReader | MegatronReader, name: str) -> bool:
    """Whether it is the output projection of a tied model, written though it is the embedding."""
    if name != "lm_head.weight" or not source.spec.shape.tied:
        return False
    rows = (slice(None),)
    return torch.equal(reader.read(name, rows), reader.read("model.embed_tokens.weight", rows))


def _list(dtypes: object) -> str:
    return ", ".join(str(one).removeprefix("torch.") for one in dtypes)  # type: ignore[attr-defined]


def read_step(directory: Path) -> dict[str, object]:
    """What a run noted beside a checkpoint of its own."""
    found: dict[str, object] = json.loads((directory / "run_state.json").read_text())
    return found
