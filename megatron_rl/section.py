"""What every section of the config is: frozen, typed, unknown keys refused; and the kinds of numbers in it."""

from typing import Annotated, ClassVar

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(ge=1)]
NotNegative = Annotated[int, Field(ge=0)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]
Seconds = Annotated[int, Field(ge=1, le=10**7)]


class Section(BaseModel):
    """A frozen group of options; unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    answered: ClassVar[frozenset[str]] = frozenset()
    """Keys that are no options, and that the section itself drops or refuses with the reason."""
