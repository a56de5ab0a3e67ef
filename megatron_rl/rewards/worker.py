"""What a grader's process runs. It keeps its graders, and one event loop for the async ones.

Nothing is raised here: an exception of a user's may not survive the way to another process, so its text goes instead.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_rl.errors import UserError
from megatron_rl.rewards.grade import Grade, grade_of, shown, ungraded
from megatron_rl.rewards.graders import find_grader, inner_deadline, kind_of
from megatron_rl.rewards.processes import settle_in
from megatron_rl.types import Prompt

Answer = tuple[str, bool]
"""A response as text, and whether it ended by itself."""


@dataclass(frozen=True)
class _Process:
    """What this process is for, once it has begun."""

    graders: dict[str, Callable[..., Any] | str]
    """By name; a text is why it could not be loaded."""

    timeout_s: float
    loop: asyncio.Runner


_this: _Process | None = None


def begin(parent: int, names: Sequence[str], marker: str, timeout_s: float) -> None:
    """Load the graders, before any answer's time runs."""
    global _this
    settle_in(parent)
    graders: dict[str, Callable[..., Any] | str] = {}
    for name in names:
        try:
            graders[name] = find_grader(name, "rewards", marker=marker, timeout_s=timeout_s)
        except BaseException as error:  # a user's module may do anything as it is imported
            graders[name] = f"its process could not load it: {error if isinstance(error, UserError) else shown(error)}"
    _this = _Process(graders, timeout_s, asyncio.Runner())


def grade(name: str, prompt: Prompt, answers: Sequence[Answer]) -> list[Grade] | str:
    """Grades of answers to a prompt; or why there are none, where it is not known which answer is to blame."""
    assert _this is not None
    grader = _this.graders[name]
    if isinstance(grader, str):
        return [ungraded(grader) for _ in answers]
    try:
        kind = kind_of(grader)
        if kind == "async":
            return _this.loop.run(_together(grader, prompt, answers, _this.timeout_s))
        if kind == "batch":
            return _at_once(grader, prompt, answers)
        return [grade_of(grader(prompt, text, finished)) for text, finished in answers]
    except BaseException as error:  # a user's function: SystemExit too fails on an answer, and ends nothing
        return shown(error)


def _at_once(grader: Callable[..., Any], prompt: Prompt, answers: Sequence[Answer]) -> list[Grade]:
    values = list(grader([prompt] * len(answers), [text for text, _ in answers], [ended for _, ended in answers]))
    if len(values) != len(answers):
        raise ValueError(f"it returned {len(values)} scores for {len(answers)} answers")
    return [grade_of(value) for value in values]


async def _together(
    grader: Callable[..., Any], prompt: Prompt, answers: Sequence[Answer], timeout_s: float
) -> list[Grade]:
    return await asyncio.gather(*(_awaited(grader, prompt, *answer, timeout_s) for answer in answers))


async def _awaited(grader: Callable[..., Any], prompt: Prompt, text: str, finished: bool, timeout_s: float) -> Grade:
    """One of several: it gets its own deadline, inside that of the process, so that it costs only itself."""
    limit = asyncio.timeout(inner_deadline(timeout_s))
    try:
        async with limit:
            return grade_of(await grader(prompt, text, finished))
    except BaseException as error:  # as in `grade`
        return ungraded(f"took longer than {timeout_s:g} s" if limit.expired() else shown(error))
