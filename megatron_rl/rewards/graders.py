"""Graders: from an answer to how right it is, between 0 and 1."""

from collections.abc import Callable
from functools import partial
from typing import cast

from megatron_rl.config import RewardConfig
from megatron_rl.functions import load_function
from megatron_rl.types import Prompt

Grader = Callable[[Prompt, str, bool], float]
"""`grader(prompt, text, finished)`: the prompt with its `answer` and `metadata`; the response as text, without special
tokens; whether it ended by itself. Returns 0 (wrong) to 1 (right), NaN for "could not be graded"."""


def after_marker(prompt: Prompt, text: str, finished: bool, *, marker: str) -> float:
    """1 if the response ended, has the marker exactly once, and what follows it is the answer, spaces aside."""
    _, *rest = text.split(marker)
    return float(finished and len(rest) == 1 and rest[0].strip() == prompt.answer.strip())


def load_grader(config: RewardConfig) -> Grader:
    """The grader that the config names.

    Raises:
        UserError: there is no such function.
    """
    if config.grader == "after_marker":
        return partial(after_marker, marker=config.marker)
    return cast(Grader, load_function(config.grader, "rewards.grader"))
