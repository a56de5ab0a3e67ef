"""Graders that fail, and that say what they saw, for the recipes of these tests."""

import hashlib
import math
import os
import random
import time
from collections.abc import Sequence
from typing import Any

from megatron_rl.rewards.graders import after_marker, batch
from megatron_rl.rewards.math_answers import same_as_last_box
from megatron_rl.types import Prompt

POWER_TOWER = "\\boxed{9^{9^{9}}}"


def failing(prompt: Prompt, text: str, finished: bool) -> float:
    """As `after_marker`, but of the answers that it is asked about the 25th, 75th, ... hangs; the 7th ends its process;
    the 13th is NaN; and the 60th is taken for a power tower. They are counted by the length of the row's `counter`."""
    number = _count(prompt.metadata["counter"])
    if number % 50 == 25:
        time.sleep(1000)
    if number == 7:
        os._exit(3)
    if number == 13:
        return math.nan
    if number == 60:
        return same_as_last_box(prompt, POWER_TOWER, finished)
    return after_marker(prompt, text, finished, marker="#")


def _count(path: str) -> int:
    """Which process ever comes to it: each gets a number of its own, from 1."""
    counter = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        os.write(counter, b".")
        return os.lseek(counter, 0, os.SEEK_CUR)
    finally:
        os.close(counter)


def of_early_rows(prompt: Prompt, text: str, finished: bool) -> float:
    """A coin, for rows that are `early`; of the others only the longest answers can be judged."""
    return coin(prompt, text, finished) if prompt.metadata["early"] or len(text) > 12 else math.nan


def seen(prompt: Prompt, text: str, finished: bool) -> dict[str, Any]:
    """As `after_marker`, and what it was asked about."""
    score = after_marker(prompt, text, finished, marker="#")
    return {"score": score, "row": prompt.index, "sha256": sha256(text), "length": len(text)}


def sha256(text: str) -> str:
    """Of an answer: to know it by."""
    return hashlib.sha256(text.encode()).hexdigest()


def coin(prompt: Prompt, text: str, finished: bool) -> float:
    """A plain number, and one that differs within most groups."""
    return float(int(sha256(text), 16) % 2)


def by_row(prompt: Prompt, text: str, finished: bool) -> float:
    """All wrong for rows that are `uniform`."""
    return 0.0 if prompt.metadata["uniform"] else coin(prompt, text, finished)


def now_and_then(prompt: Prompt, text: str, finished: bool) -> float:
    """A coin that takes its time, never the same."""
    time.sleep(random.SystemRandom().random() * 0.1)
    return coin(prompt, text, finished)


@batch
def slow(prompts: Sequence[Prompt], texts: Sequence[str], finished: Sequence[bool]) -> list[float]:
    """Takes long enough for an engine to begin something else meanwhile, and less than to end it."""
    time.sleep(0.03)
    return [coin(*one) for one in zip(prompts, texts, finished, strict=True)]
