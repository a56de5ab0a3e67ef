"""Graders for the pool's tests. They run in processes of their own, and do there what no grader should."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from megatron_rl.rewards.graders import batch
from megatron_rl.types import Prompt


def misbehave(prompt: Prompt, text: str, finished: bool) -> Any:
    """Right if the text is the answer, unless the text asks for something else."""
    if text == "hang":
        return 9 ** (9**9)  # in C, where Python handles no signal
    if text == "sleep":
        time.sleep(3600)
    if text == "crash":
        os._exit(7)
    if text == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    if text == "real-time signal":
        os.kill(os.getpid(), signal.SIGRTMIN + 5)
    if text == "nan":
        return float("nan")
    if text == "three":
        return 3
    if text == "raise":
        raise ValueError("no such\nanswer")
    if text == "leave":
        sys.exit(4)
    if text == "odd":
        raise OddError("a", "b")
    if text == "dict":
        return {"score": 0.5, "steps": (1, 2), "who": {"a": float("inf")}, "kind": OddError}
    if text == "nothing":
        return None
    if text == "word":
        return "0.5"
    if text == "huge":
        return 10**5000
    if text == "long":
        raise ValueError("x" * 10**6)
    if text == "unspeakable":
        raise UnspeakableError
    if text == "unscored":
        return {"steps": 3}
    if text == "modules":
        return {"score": 1, "modules": sorted(sys.modules), "main": hasattr(sys.modules["__main__"], "__file__")}
    if text == "pid":
        return {"score": 1, "pid": os.getpid()}
    return text == prompt.answer


class OddError(Exception):
    """It can be pickled, and not unpickled."""

    def __init__(self, one: str, other: str) -> None:
        super().__init__(one)


class UnspeakableError(Exception):
    """Has no repr."""

    def __repr__(self) -> str:
        raise RuntimeError


def slowly(prompt: Prompt, text: str, finished: bool) -> dict[str, Any]:
    """Takes a moment, in which something may happen to the process."""
    time.sleep(0.2)
    return {"score": text == prompt.answer, "pid": os.getpid()}


def ended_from_outside(prompt: Prompt, text: str, finished: bool) -> float:
    """Ends by SIGTERM, as often as the text's first number says; the count is kept in the file of its second word."""
    times, _, file = text.partition(" ")
    before = len(Path(file).read_bytes()) if Path(file).exists() else 0
    if before < int(times):
        Path(file).write_bytes(b"x" * (before + 1))
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)
    return 1.0


def with_a_child(prompt: Prompt, text: str, finished: bool) -> float:
    """Waits for a program that never ends; its process id goes to the file that the text names."""
    program = subprocess.Popen(["sleep", "3600"])
    Path(text).write_text(str(program.pid))
    return float(program.wait())


@batch
def in_a_batch(prompts: list[Prompt], texts: list[str], finished: list[bool]) -> list[Any]:
    """All of a group at once."""
    if "short" in texts:
        return [1.0]
    scores = [misbehave(*one) for one in zip(prompts, texts, finished, strict=True)]
    return [{"score": score, "together": len(texts)} if score in (0, 1) else score for score in scores]


async def awaited(prompt: Prompt, text: str, finished: bool) -> Any:
    """All of a group at the same time."""
    if text == "await forever":
        await asyncio.sleep(3600)
    await asyncio.sleep(0.3)
    return misbehave(prompt, text, finished)
