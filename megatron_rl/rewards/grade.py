"""What a grader says of an answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Grade:
    """The grade of an answer."""

    score: float
    """How right, from 0 to 1; NaN: ungraded."""

    details: Mapping[str, Any] = field(default_factory=dict)
    """Whatever else the grader says."""

    error: str = ""
    """Why it is ungraded, on one line."""
