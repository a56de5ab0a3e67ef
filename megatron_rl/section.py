"""What every section of the config is: frozen, typed, unknown keys refused; and the kinds of numbers in it."""

import re
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

Positive = Annotated[int, Field(ge=1)]
NotNegative = Annotated[int, Field(ge=0)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]
Seconds = Annotated[int, Field(ge=1, le=10**7)]


def _to_seconds(value: Any) -> Any:
    """3h50m and the like as seconds; whatever it can't read it leaves for the type to refuse."""
    if not isinstance(value, str):
        return value
    found = re.fullmatch(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s?)?", value.strip())
    if not value.strip() or found is None:
        raise ValueError("write a time as 3h50m, 45m, 90s or a number of seconds")
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


Duration = Annotated[Seconds, BeforeValidator(_to_seconds)]


class Section(BaseModel):
    """A frozen group of options; unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    answered: ClassVar[frozenset[str]] = frozenset()
    """Keys that are no options, and that the section itself drops or refuses with the reason."""


def sections(section: type[BaseModel], path: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    """The section itself and those inside it, each with its dotted path."""
    yield path, section
    for key, option in section.model_fields.items():
        inner = section_of(option.annotation)
        if inner is not None:
            yield from sections(inner, f"{path}.{key}" if path else key)


def section_of(annotation: Any) -> type[BaseModel] | None:
    """The section that a field of this type holds, if it holds one."""
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None
