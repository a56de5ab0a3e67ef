"""Recipes to a validated `Config`: YAML files, an explicit `defaults:` line, a preset, dotted overrides."""

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

from megatron_rl.config import Config
from megatron_rl.errors import UserError
from megatron_rl.presets import PRESETS
from megatron_rl.section import sections


def load_config(recipe: Path, overrides: Sequence[str] = ()) -> Config:
    """The validated configuration of a run.

    Later ones win: the preset that `algorithm.preset` names, the file behind `defaults:`, the recipe, the overrides.

    Args:
        recipe: a YAML file.
        overrides: `key.sub=value`, the value in YAML.

    Raises:
        UserError: unreadable file, unknown key (with the nearest known one), wrong value.
    """
    user = _merge(_read(recipe, ()), _parse_overrides(overrides), recipe)
    try:
        values = OmegaConf.to_container(_merge(_preset(user), user, recipe), resolve=True)
    except OmegaConfBaseException as error:
        raise UserError(f"{recipe}: {_one_line(error)}") from None
    values = cast(dict[str, Any], values)
    _refuse_unknown_keys(values, recipe)
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        raise UserError(f"{recipe}: {_first_fault(error)}") from None


def dump_config(config: Config) -> str:
    """The resolved configuration as YAML; `load_config` reads it back to the same."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=120)


def _read(recipe: Path, seen: tuple[Path, ...]) -> DictConfig:
    if recipe.resolve() in seen:
        raise UserError(f"{recipe}: its `defaults:` line leads back to itself")
    try:
        values = OmegaConf.load(recipe)
    except FileNotFoundError:
        raise UserError(f"{recipe}: no such recipe") from None
    except (OSError, yaml.YAMLError, UnicodeDecodeError, OmegaConfBaseException) as error:
        raise UserError(f"{recipe}: {_one_line(error)}") from None
    if not isinstance(values, DictConfig):
        raise UserError(f"{recipe}: a recipe is a mapping of options")
    base = values.pop("defaults", None)
    if base is None:
        return values
    if not isinstance(base, str):
        raise UserError(f"{recipe}: defaults: one path of another recipe, relative to this file")
    return _merge(_read(recipe.parent / base, (*seen, recipe.resolve())), values, recipe)


def _merge(below: DictConfig, above: DictConfig, recipe: Path) -> DictConfig:
    for key in above:
        if key in below and isinstance(below[key], DictConfig) and isinstance(above[key], ListConfig):
            raise UserError(f"{recipe}: {key!s}: a section of options, not a list")
    try:
        return cast(DictConfig, OmegaConf.merge(below, above))
    except (OmegaConfBaseException, TypeError) as error:
        raise UserError(f"{recipe}: {_one_line(error)}") from None


def _preset(user: DictConfig) -> DictConfig:
    algorithm = user.get("algorithm")
    chosen = algorithm if isinstance(algorithm, DictConfig) else OmegaConf.create()
    named = PRESETS.get(str(chosen.get("preset", "dapo")))
    preset = OmegaConf.create({"algorithm": named.algorithm, "rewards": named.rewards} if named else {})
    if named and chosen.get("loss", preset.algorithm.loss) != preset.algorithm.loss:
        del preset.algorithm.loss_kwargs  # they belong to the preset's own loss
    return preset


def _parse_overrides(overrides: Sequence[str]) -> DictConfig:
    for text in overrides:
        if "=" not in text or text.startswith("="):
            raise UserError(f"override {text!r}: write key.sub=value")
    try:
        return OmegaConf.from_dotlist(list(overrides))
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise UserError(f"overrides {' '.join(overrides)!r}: {_one_line(error)}") from None


def _refuse_unknown_keys(values: dict[str, Any], recipe: Path) -> None:
    known = dict(sections(Config))

    def walk(node: dict[str, Any], path: str) -> None:
        section = known[path]
        for key, value in node.items():
            full = f"{path}.{key}" if path else str(key)
            if key not in section.model_fields and key not in getattr(section, "answered", ()):
                everything = [f"{p}.{k}" if p else k for p, s in known.items() for k in s.model_fields]
                raise UserError(f"{recipe}: unknown option {full}{_nearest(full, everything)}")
            if full in known and isinstance(value, dict):
                walk(value, full)

    walk(values, "")


def _nearest(unknown: str, options: list[str]) -> str:
    """The option that was probably meant: that name in another section, or a like one, here before elsewhere."""
    section, _, key = unknown.rpartition(".")
    names = {option: option.rpartition(".")[2] for option in options}
    here = [option for option in options if option.rpartition(".")[0] == section]
    close = [o for o in here if names[o] in difflib.get_close_matches(key, [names[h] for h in here], n=1)]
    same = [option for option in options if names[option] == key]
    anywhere = difflib.get_close_matches(unknown, options, n=1, cutoff=0.6)
    near = (close or same or anywhere)[:1]
    return f"; did you mean {near[0]}?" if near else "; see docs/config.md"


def _first_fault(error: ValidationError) -> str:
    fault = error.errors()[0]
    where = ".".join(str(part) for part in fault["loc"])
    message = fault["msg"].removeprefix("Value error, ")
    more = error.error_count() - 1
    rest = f" (and {more} more)" if more else ""
    if not where:
        return f"{message}{rest}"
    if fault["type"] == "missing":
        return f"{where} is required; set it in the recipe or as {where}=...{rest}"
    whole_section = fault["type"] == "value_error" and isinstance(fault["input"], dict)  # its own message says what
    got = "" if whole_section else f", got {fault['input']!r}"
    return f"{where}: {message}{got}{rest}"


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
