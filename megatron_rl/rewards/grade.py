"""What a grader said of an answer, whatever it returned."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_LONGEST = 300
"""Letters of a reason that are kept: an exception may carry a whole response."""


@dataclass(frozen=True, kw_only=True)
class Grade:
    """How right an answer is, or why that could not be told."""

    score: float
    """From 0 (wrong) to 1 (right); NaN: ungraded, which is not wrong."""

    details: Mapping[str, Any] = field(default_factory=dict)
    """What else the grader returned, as JSON has it."""

    error: str = ""
    """Why it is ungraded, in one line."""


def ungraded(reason: str, details: Mapping[str, Any] | None = None) -> Grade:
    """An answer that could not be graded."""
    return Grade(score=math.nan, details=details or {}, error=one_line(reason))


def grade_of(value: Any) -> Grade:
    """The grade behind what a grader returned: a number, or a dict with `score` and whatever else it has to say."""
    details: dict[str, Any] = {}
    if isinstance(value, Mapping):
        if "score" not in value:
            return ungraded(f"it returned {shown(value)}, a dict without 'score'")
        details = {str(key): _plain(one) for key, one in value.items() if key != "score"}
        value = value["score"]
    try:
        score = math.inf if isinstance(value, str | bytes) else float(value)
    except Exception:  # whatever it returned: its __float__ may raise anything
        score = math.inf
    if math.isnan(score):
        return ungraded("it returned NaN", details)
    if not 0 <= score <= 1:
        return ungraded(f"it returned {shown(value)}; a score is from 0 (wrong) to 1 (right)", details)
    return Grade(score=score, details=details)


def shown(value: object) -> str:
    """Its repr on one line, also where that raises (an int of 5000 digits has none)."""
    try:
        return one_line(repr(value))
    except Exception:  # a user's class, or a user's exception
        return f"<{type(value).__name__}>"


def one_line(text: str) -> str:
    """Text without line breaks, and not too long."""
    line = " ".join(text[: 2 * _LONGEST].split())
    return line if len(line) <= _LONGEST else line[: _LONGEST - 3] + "..."


def _plain(value: Any) -> Any:
    """A detail as JSON has it, or its repr: it goes to another process and into a file that all can read."""
    try:
        return json.loads(json.dumps(value, default=_leaf, allow_nan=False))
    except Exception:  # not finite, a circle, keys that are no strings, a repr that raises
        return shown(value)


def _leaf(value: Any) -> Any:
    """NumPy's and torch's numbers as numbers, anything else as text."""
    try:
        return value.item()
    except Exception:  # most have none, and that of an array raises
        return shown(value)
