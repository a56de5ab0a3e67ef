"""The architecture comes from the Hugging Face config.json: every field is used, or known not to matter, or refused."""

import json
import os
import reprlib
import sys
from collections.abc import Callable, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from megatron_rl.errors import UserError
from megatron_rl.resharding.names import FAMILIES, Family, Shape

Default = TypeVar("Default")

# Fields that say nothing about the function that the model computes.
_BOOKKEEPING = frozenset(
    "architectures model_type transformers_version torch_dtype dtype initializer_range use_cache _name_or_path "
    "bos_token_id max_window_layers output_attentions "
    "output_hidden_states return_dict chunk_size_feed_forward is_encoder_decoder id2label label2id problem_type".split()
)

_FIXED: dict[Family, dict[str, Any]] = {
    "qwen2": {"use_sliding_window": False, "use_mrope": False},
    "qwen3": {"use_sliding_window": False, "attention_bias": False},
    "llama": {"attention_bias": False, "mlp_bias": False, "pretraining_tp": 1},
}
"""Fields of each family of which one value is implemented: what transformers takes where they are missing."""

_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Fields of `rope_type: llama3` that Megatron has as constants."""


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """What is needed of a config.json to build the model."""

    shape: Shape
    norm_eps: float
    rope_theta: float
    rope_factor: float | None
    """Llama 3.1 turns its slow pairs so many times more slowly (`rope_type: llama3`); None: it does not."""

    max_positions: int | None
    """Longest sequence that the model is meant for, in tokens, if config.json says so."""

    eos_token_ids: frozenset[int]
    """Sampling one of them ends a response: those of config.json and of generation_config.json."""


def read_model_spec(path: Path) -> ModelSpec:
    """The architecture of the HF checkpoint in a directory, or of a config.json alone, whatever the file's name.

    Raises:
        UserError: no such directory or config.json, an unknown architecture, a field of a wrong type, a field with a
            meaning that is not implemented.
    """
    where, generation = (
        (path, None) if os.path.isfile(path) else (path / "config.json", path / "generation_config.json")
    )
    if generation and not os.path.isdir(path):  # unlike Path.is_dir, False for what cannot even be looked at
        raise UserError(f"model.path: {path} is not a directory")
    take = _Fields(_read_json(where), str(where))
    family = take("model_type")
    if not (isinstance(family, str) and family in FAMILIES):
        take.refuse("model_type", f"is not supported; {', '.join(FAMILIES)} are")
    theta, factor = _rope(take)
    shape = _shape(take, family)
    spec = ModelSpec(
        shape=shape,
        norm_eps=take.positive("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_factor=factor,
        max_positions=take.size("max_position_embeddings", None),
        eos_token_ids=take.token_ids("eos_token_id") | _generation_eos(generation),
    )
    for key, only in ({"hidden_act": "silu", "attention_dropout": 0.0} | _FIXED[family]).items():
        take.require(key, only)
    padding = take("pad_token_id", None)
    if padding is not None and not (type(padding) is int and -shape.vocab <= padding < shape.vocab):
        take.refuse("pad_token_id", f"is not a row of the embedding, which has {shape.vocab}")
    if "use_sliding_window" in _FIXED[family]:
        take("sliding_window", None)  # means nothing while use_sliding_window is false
    kinds = take("layer_types", None)
    if kinds is not None and not (isinstance(kinds, list) and kinds == ["full_attention"] * len(kinds)):
        take.refuse("layer_types", "is not implemented; only a list of 'full_attention' is")
    if kinds is not None and len(kinds) != shape.layers:
        take.refuse("layer_types", f"names {len(kinds)} layers, num_hidden_layers is {shape.layers}")
    take.refuse_rest(_BOOKKEEPING)
    return spec


def _shape(take: "_Fields", family: Family) -> Shape:
    heads, hidden = take.size("num_attention_heads"), take.size("hidden_size")
    shape = Shape(
        family=family,
        layers=take.size("num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=take.size("num_key_value_heads", heads),
        # Where Qwen3's is missing, transformers takes 128: nobody's is, and nothing is guessed.
        head_dim=take.size("head_dim") if family == "qwen3" else take.size("head_dim", hidden // heads),
        intermediate=take.size("intermediate_size"),
        vocab=take.size("vocab_size"),
        tied=take.flag("tie_word_embeddings", False),
    )
    if heads % shape.kv_heads:
        raise UserError(f"{take.where}: num_attention_heads {heads} is not a multiple of num_key_value_heads")
    if "head_dim" not in take.fields and hidden % heads:
        raise UserError(
            f"{take.where}: hidden_size {hidden} is not a multiple of num_attention_heads {heads}; set head_dim"
        )
    if shape.head_dim % 2:
        raise UserError(f"{take.where}: head_dim {shape.head_dim} is odd; rotary positions turn pairs")
    return shape


class _Fields:
    """Reads fields of a JSON object, each as the kind that it must be, and knows in the end which were not read.

    null is not as good as absent: transformers, which builds the sampler's model from the same file, fails on most.
    """

    def __init__(self, fields: dict[str, Any], where: str) -> None:
        self.fields, self.where, self.read = fields, where, set[str]()

    _REQUIRED: Any = object()

    def __call__(self, key: str, default: Any = _REQUIRED) -> Any:
        self.read.add(key)
        value = self.fields.get(key, default)
        if value is self._REQUIRED:
            raise UserError(f"{self.where}: {key} is missing")
        return value

    def size(self, key: str, default: Default = _REQUIRED) -> int | Default:
        return self._checked(key, default, "a positive 32-bit integer", lambda value: _is_index(value) and value > 0)

    def flag(self, key: str, default: bool) -> bool:
        return self._checked(key, default, "true or false", lambda value: isinstance(value, bool))

    def positive(self, key: str, default: float = _REQUIRED) -> float:
        return float(self._checked(key, default, "a positive number", _is_positive))

    def token_ids(self, key: str) -> frozenset[int]:
        """One id, several, or (null) none."""
        value = self(key, None)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(map(_is_index, ids)):
            self.refuse(key, "is not a token id or a list of them")
        return frozenset(ids)

    def section(self, key: str) -> "_Fields":
        """The fields of an object inside this one."""
        inner = self._checked(key, {}, "an object", lambda value: isinstance(value, dict))
        return _Fields(inner, f"{self.where}: {key}")

    def require(self, key: str, only: Any) -> None:
        if self(key, only) != only:
            self.refuse(key, f"is not implemented; only {only!r} is")

    def refuse(self, key: str, problem: str) -> NoReturn:
        raise UserError(f"{self.where}: {key} {reprlib.repr(self.fields[key])} {problem}")

    def refuse_rest(self, known: Set[str] = frozenset()) -> None:
        rest = sorted(set(self.fields) - self.read - known)
        if rest:
            raise UserError(f"{self.where}: {rest[0]!r} is not known; its effect on the model is not implemented")

    def _checked(self, key: str, default: Any, kind: str, fits: Callable[[Any], bool]) -> Any:
        value = self(key, default)
        if key in self.fields and not fits(value):
            self.refuse(key, f"is not {kind}")
        return value


def _is_index(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**31  # not isinstance: true and false are ints to Python


def _is_positive(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value <= sys.float_info.max  # NaN and infinity are not


def _rope(take: _Fields) -> tuple[float, float | None]:
    """What `ModelSpec` says of rotary positions: `rope_theta` and `rope_factor`."""
    theta = take.positive("rope_theta", 10000.0)
    if take("rope_scaling", None) is None:
        rope = take.section("rope_parameters")  # as transformers 5 writes it
    else:
        rope = take.section("rope_scaling")  # as transformers 4 wrote it; transformers 5 reads no rope_parameters then
        take.require("rope_parameters", None)
    theta = rope.positive("rope_theta", theta)
    name = "rope_type" if "rope_type" in rope.fields else "type"  # as older releases wrote it
    if (kind := rope(name, "default")) not in ("default", "llama3"):
        rope.refuse(name, "is not implemented; only 'default' and 'llama3' are")
    factor = None
    if kind == "llama3":
        factor = rope.positive("factor")
        for key, only in _LLAMA3.items():
            rope(key)  # not to be missing
            rope.require(key, only)
    rope.refuse_rest()
    return theta, factor


def _generation_eos(path: Path | None) -> frozenset[int]:
    return _Fields(_read_json(path), str(path)).token_ids("eos_token_id") if path and path.exists() else frozenset()


def _read_json(path: Path) -> dict[str, Any]:
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; model.path is a Hugging Face model directory") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: {error}") from None
    if not isinstance(fields, dict):
        raise UserError(f"{path}: not a JSON object")
    return fields
