"""Graders: from an answer to how right it is, between 0 and 1. See docs/graders.md.

A grader's process imports this file, and a node has dozens of them: nothing heavy here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar
from urllib.parse import urlsplit

from megatron_rl.errors import UserError
from megatron_rl.functions import load_function, trying
from megatron_rl.types import Prompt

if TYPE_CHECKING:
    from megatron_rl.config import RewardConfig

Grader = Callable[[Prompt, str, bool], float]
"""`grader(prompt, text, finished)`: the prompt with its `answer` and `metadata`; the response as text, without special
tokens; whether it ended by itself. Returns 0 (wrong) to 1 (right), NaN for "could not be graded"."""

Kind = Literal["one", "async", "batch"]
"""How a grader is called: with an answer; with an answer, others of the group meanwhile; with all of a group."""

Function = TypeVar("Function", bound=Callable[..., Any])


def batch(function: Function) -> Function:
    """Decorator: the grader is called with all answers of a group at once.

    As `function(prompts, texts, finished)`, three lists of one length; it returns as many scores or dicts.
    """
    function.takes_groups = True  # type: ignore[attr-defined]
    return function


def kind_of(grader: Callable[..., Any]) -> Kind:
    """How it is to be called."""
    if getattr(grader, "takes_groups", False):
        return "batch"
    called = grader if inspect.isroutine(grader) or isinstance(grader, partial) else type(grader).__call__
    return "async" if inspect.iscoroutinefunction(called) else "one"


def after_marker(prompt: Prompt, text: str, finished: bool, *, marker: str) -> float:
    """1 if the response ended, has the marker exactly once, and what follows it is the answer, spaces aside."""
    _, *rest = text.split(marker)
    return float(finished and len(rest) == 1 and rest[0].strip() == prompt.answer.strip())


def find_grader(name: str, option: str, *, marker: str, timeout_s: float) -> Callable[..., Any]:
    """The grader of this name.

    Args:
        name: `after_marker`, `math`, a URL, or `package.module:function`.
        option: that named it, for the error.
        marker: for `after_marker`.
        timeout_s: how long an answer may take.

    Raises:
        UserError: there is no such grader.
    """
    if name == "after_marker":
        return partial(after_marker, marker=marker)
    if name == "math":
        from megatron_rl.rewards.math_answers import same_as_last_box

        return same_as_last_box
    if name.startswith(("http://", "https://")):
        from megatron_rl.rewards.remote import ask

        with trying(f"{option}: {name}"):  # of a port that is no number, for one
            url = urlsplit(name)
            if not url.hostname or url.port == 0:
                raise UserError(f"{option}: {name!r} names no host")
        # It ends by itself, with the last failure, before it is ended.
        return partial(ask, url=name, timeout_s=inner_deadline(inner_deadline(timeout_s)))
    return load_function(name, option)


def check_graders(config: RewardConfig) -> dict[str, Callable[..., Any]]:
    """Every grader that the config names, by that name: what can be wrong with them is said before a run starts.

    Raises:
        UserError: there is no such grader, or its module can't be imported.
    """
    options = {"rewards.grader": config.grader}
    options |= {f"rewards.graders.{source}": name for source, name in config.graders.items()}
    return {
        name: find_grader(name, option, marker=config.marker, timeout_s=config.timeout_s)
        for option, name in options.items()
    }


def grader_name(config: RewardConfig, prompt: Prompt) -> str:
    """The name of the grader of this row."""
    source = prompt.metadata.get("data_source")
    return config.graders.get(source, config.grader) if isinstance(source, str) else config.grader


def inner_deadline(timeout_s: float) -> float:
    """A deadline inside another one: sooner by a tenth, or by a second."""
    return timeout_s - min(1.0, timeout_s / 10)
