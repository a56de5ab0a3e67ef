"""Recipes to a validated `Config`: YAML files, an explicit `defaults:` line, a preset, dotted overrides."""

import difflib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast, get_args

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ValidationError

from megatron_rl.config import Config
from megatron_rl.errors import UserError
from megatron_rl.presets import PRESETS


def load_config(recipe: Path, overrides: Sequence[str] = ()) -> Config:
    """The validated configuration of a run.

    Later ones win: the preset that `algorithm.preset` names, the file behind `defaults:`, the recipe, the overrides.

    Args:
        recipe: a YAML file.
        overrides: `key.sub=value`, the value in YAML.

    Raises:
        UserError: unreadable file, unknown key (with the nearest known one), wrong value.
    """
    user = cast(DictConfig, OmegaConf.merge(_read(recipe, ()), _parse_overrides(overrides)))
    try:
        values = OmegaConf.to_container(OmegaConf.merge(_preset(user), user), resolve=True)
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


def describe_options() -> str:
    """Every option with its type, default and text, as Markdown: docs/config.md."""
    lines = ["# Options", "", "Made from the texts in megatron_rl/config.py by `megatron-rl docs`.", ""]
    for path, section in _sections(Config, ""):
        lines += [f"## {path or 'top level'}", "", (section.__doc__ or "").strip(), ""]
        lines += ["| key | type | default | |", "|---|---|---|---|"]
        for key, option in section.model_fields.items():
            if _section_of(option.annotation) and option.default is not None:
                continue
            default = "required" if option.is_required() else _yaml_value(option.get_default(call_default_factory=True))
            kind = _type_name(option.annotation)
            text = " ".join((option.description or "").split())
            lines.append(f"| `{path}{'.' if path else ''}{key}` | {kind} | {default} | {text} |".replace("||", "| |"))
        lines.append("")
    return "\n".join(lines)


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
    return cast(DictConfig, OmegaConf.merge(_read(recipe.parent / base, (*seen, recipe.resolve())), values))


def _preset(user: DictConfig) -> DictConfig:
    algorithm = user.get("algorithm")
    chosen = algorithm if isinstance(algorithm, DictConfig) else OmegaConf.create()
    preset = OmegaConf.create(PRESETS.get(str(chosen.get("preset", "dapo")), {}))
    if preset and chosen.get("loss", preset.algorithm.loss) != preset.algorithm.loss:
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
    known = dict(_sections(Config, ""))

    def walk(node: dict[str, Any], path: str) -> None:
        section = known[path]
        for key, value in node.items():
            full = f"{path}.{key}" if path else str(key)
            if key not in section.model_fields:
                everything = [f"{p}.{k}" if p else k for p, s in known.items() for k in s.model_fields]
                here = [name for name in everything if name.rpartition(".")[0] == path]
                near = difflib.get_close_matches(full, here, n=1) or difflib.get_close_matches(
                    full, everything, n=1, cutoff=0.5
                )
                hint = f"; did you mean {near[0]}?" if near else "; see docs/config.md"
                raise UserError(f"{recipe}: unknown option {full}{hint}")
            if full in known and isinstance(value, dict):
                walk(value, full)

    walk(values, "")


def _sections(section: type[BaseModel], path: str) -> Iterator[tuple[str, type[BaseModel]]]:
    yield path, section
    for key, option in section.model_fields.items():
        inner = _section_of(option.annotation)
        if inner is not None:
            yield from _sections(inner, f"{path}.{key}" if path else key)


def _section_of(annotation: Any) -> type[BaseModel] | None:
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None


def _type_name(annotation: Any) -> str:
    if isinstance(annotation, type) and not get_args(annotation):
        return annotation.__name__
    text = str(annotation)
    for noise in ("typing.", "pathlib.", "Annotated[", "NoneType"):
        text = text.replace(noise, {"NoneType": "None"}.get(noise, ""))
    text = text.split(", FieldInfo")[0] if "FieldInfo" in text else text
    return text.replace("Literal", "one of ").replace("|", "or")


def _yaml_value(value: Any) -> str:
    if isinstance(value, BaseModel | Path):
        return str(value)
    return "`" + yaml.safe_dump(value, default_flow_style=True).replace("\n...\n", "").strip() + "`"


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
    return f"{where}: {message}, got {fault['input']!r}{rest}"


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
