"""The architecture comes from the Hugging Face config.json: every field is used, or known not to matter, or refused."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rl.errors import UserError
from megatron_rl.resharding.names import Shape

# Fields that say nothing about the function that the model computes.
_BOOKKEEPING = frozenset(
    "architectures model_type transformers_version torch_dtype dtype initializer_range use_cache _name_or_path "
    "bos_token_id eos_token_id pad_token_id max_window_layers output_attentions "
    "output_hidden_states return_dict chunk_size_feed_forward is_encoder_decoder id2label label2id problem_type".split()
)


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """What is needed of a config.json to build the model."""

    shape: Shape
    norm_eps: float
    rope_theta: float
    max_positions: int | None
    """Longest sequence that the model is meant for, in tokens, if config.json says so."""

    eos_token_ids: frozenset[int]
    """Sampling one of them ends a response: those of config.json and of generation_config.json."""


def read_model_spec(directory: Path) -> ModelSpec:
    """The architecture of the HF checkpoint in `directory`.

    Raises:
        UserError: no such directory or config.json, an unknown architecture, a field with a meaning that is not
            implemented.
    """
    if not directory.is_dir():
        raise UserError(f"model.path: {directory} is not a directory")
    fields = _read_json(directory / "config.json")
    where = directory / "config.json"
    take = _Fields(fields, where)
    if take("model_type") != "qwen2":
        raise UserError(f"{where}: model_type {fields.get('model_type')!r} is not supported; qwen2 (Qwen2, Qwen2.5) is")
    heads, hidden = take("num_attention_heads"), take("hidden_size")
    shape = Shape(
        layers=take("num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=take("num_key_value_heads", heads),
        head_dim=take("head_dim", hidden // heads),
        intermediate=take("intermediate_size"),
        vocab=take("vocab_size"),
        tied=take("tie_word_embeddings", False),
    )
    if shape.heads % shape.kv_heads:
        raise UserError(f"{where}: num_attention_heads {heads} is not a multiple of num_key_value_heads")
    spec = ModelSpec(
        shape=shape,
        norm_eps=take("rms_norm_eps", 1e-6),
        rope_theta=_rope_theta(take, where),
        max_positions=take("max_position_embeddings", None),
        eos_token_ids=_eos_token_ids(fields, directory),
    )
    take.require("hidden_act", "silu")
    take.require("attention_dropout", 0.0)
    take.require("use_sliding_window", False)
    take.require("use_mrope", False)
    take("sliding_window", None)  # means nothing while use_sliding_window is false
    if set(take("layer_types", None) or ()) - {"full_attention"}:
        raise UserError(f"{where}: layer_types: only full_attention is implemented")
    take.refuse_rest()
    return spec


class _Fields:
    """Reads fields of a config.json and knows in the end which were not read."""

    def __init__(self, fields: dict[str, Any], where: Path) -> None:
        self.fields, self.where, self.read = fields, where, set(_BOOKKEEPING)

    _REQUIRED = object()

    def __call__(self, key: str, default: Any = _REQUIRED) -> Any:
        self.read.add(key)
        value = self.fields.get(key, default)
        if value is self._REQUIRED:
            raise UserError(f"{self.where}: {key} is missing")
        return default if value is None and default is not self._REQUIRED else value

    def require(self, key: str, only: Any) -> None:
        if self(key, only) != only:
            raise UserError(f"{self.where}: {key} {self.fields[key]!r} is not implemented; only {only!r} is")

    def refuse_rest(self) -> None:
        rest = sorted(set(self.fields) - self.read)
        if rest:
            raise UserError(f"{self.where}: {rest[0]} is not known; its effect on the model is not implemented")


def _rope_theta(take: _Fields, where: Path) -> float:
    take.require("rope_scaling", None)
    rope = dict(take("rope_parameters", None) or {})  # as transformers 5 writes it
    kind = rope.pop("rope_type", "default")
    theta = rope.pop("rope_theta", None)
    if kind != "default" or rope:
        raise UserError(f"{where}: rope_parameters: only rope_type 'default' with rope_theta is implemented")
    older = take("rope_theta", None)  # as transformers 4 writes it
    return float(theta if theta is not None else older if older is not None else 10000.0)


def _eos_token_ids(config: dict[str, Any], directory: Path) -> frozenset[int]:
    ids: set[int] = set()
    generation = directory / "generation_config.json"
    for source in (config, _read_json(generation) if generation.exists() else {}):
        eos = source.get("eos_token_id")
        ids.update(eos if isinstance(eos, list) else [] if eos is None else [eos])
    return frozenset(ids)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        fields = json.loads(path.read_text())
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; model.path is a Hugging Face model directory") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: {error}") from None
    if not isinstance(fields, dict):
        raise UserError(f"{path}: not a JSON object")
    return fields
