"""The options as users read them: the end of `train --help`, and docs/config.md."""

from collections.abc import Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from pydantic import BaseModel
from rich.console import Console
from rich.padding import Padding

from megatron_rl.config import Config
from megatron_rl.section import section_of, sections


def describe_options() -> str:
    """Every option with its type, default and text, as Markdown: docs/config.md."""
    lines = ["# Options", "", "Made from the texts in megatron_rl/config.py by `megatron-rl docs`.", ""]
    for path, section in sections(Config):
        lines += [f"## {path or 'top level'}", "", (section.__doc__ or "").strip(), ""]
        lines += ["| key | type | default | |", "|---|---|---|---|"]
        for key, default, kind, text in _options(section):
            lines.append(f"| `{path}{'.' if path else ''}{key}` | {kind} | {default} | {text} |")
        lines.append("")
    return "\n".join(lines)


def print_options() -> None:
    """Every option with its text, on the terminal: the end of `train --help`."""
    console = Console(highlight=False)
    for path, section in sections(Config):
        console.print(f"\n{path or 'options at the top level'}: {(section.__doc__ or '').strip()}", style="bold")
        for key, default, kind, text in _options(section):
            console.print(Padding(f"{path}{'.' if path else ''}{key}  ({kind}; {default})", (0, 0, 0, 2)), markup=False)
            console.print(Padding(text, (0, 0, 0, 6)), markup=False)


def _options(section: type[BaseModel]) -> Iterator[tuple[str, str, str, str]]:
    """Key, default, type and text of each option of a section; sections in it come on their own."""
    for key, option in section.model_fields.items():
        if section_of(option.annotation) and option.default is not None:
            continue
        default = "required" if option.is_required() else _yaml_value(option.default)
        yield key, default, _type_name(option.annotation), " ".join((option.description or "").split())


def _type_name(annotation: Any) -> str:
    """A type as users write its values."""
    if get_origin(annotation) is Annotated:
        return _type_name(get_args(annotation)[0])
    if get_origin(annotation) is Literal:
        return " or ".join(f"`{choice}`" for choice in get_args(annotation))
    if get_origin(annotation) in (UnionType, Union):
        return " or ".join(_type_name(part) for part in get_args(annotation))
    if annotation is NoneType:
        return "`null`"
    if section_of(annotation):
        return "section"
    if get_origin(annotation) is dict:
        return "mapping"
    if get_origin(annotation) is tuple:
        return f"list of {_type_name(get_args(annotation)[0])}"
    return {Path: "path", str: "text", int: "integer", float: "number", bool: "true or false"}[annotation]


def _yaml_value(value: Any) -> str:
    if isinstance(value, BaseModel | Path):
        return str(value)
    value = list(value) if isinstance(value, tuple) else value
    return "`" + yaml.safe_dump(value, default_flow_style=True).replace("\n...\n", "").strip() + "`"
