"""Graders in processes that are killed at a deadline and replaced. pebble runs them; this file says what is run, again
or not, and what becomes of an answer whose process is gone.
"""

from __future__ import annotations

import os
import queue
import signal
import time
from collections.abc import Hashable, Sequence
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING

from pebble import ProcessExpired, ProcessPool

from megatron_rl.rewards import worker
from megatron_rl.rewards.grade import Grade, shown, ungraded
from megatron_rl.rewards.graders import check_graders, grader_name, kind_of
from megatron_rl.rewards.processes import GraderContext
from megatron_rl.rewards.worker import Answer
from megatron_rl.types import Prompt

if TYPE_CHECKING:
    from megatron_rl.config import RewardConfig

TRIES = 3
"""How often an answer is tried whose process was ended from outside, and a pool started that does nothing but break."""

STALLED_S = 300.0
"""A pool in which nothing has ended for so long beyond a deadline is replaced. Until then processes may still be
importing a grader, from a file system that all nodes of a job are reading."""


@dataclass(eq=False)
class _Group:
    """Answers to a prompt, and the grades that are there."""

    key: Hashable
    prompt: Prompt
    answers: tuple[Answer, ...]
    grader: str
    grades: dict[int, Grade] = field(default_factory=dict)


@dataclass(eq=False)
class _Task:
    """What one process is asked at once: some answers of a group."""

    group: _Group
    places: Sequence[int]
    tries: int = 0
    future: Future[list[Grade] | str] | None = None


class GraderPool:
    """Grades groups of answers in other processes: `submit` them, and `poll` for what is done.

    Every answer gets a grade. One whose grader hangs, crashes, raises or returns no score is ungraded, with the reason,
    and costs no other its grade. For one thread, which must live as long as the pool: the processes end with it.
    """

    def __init__(self, config: RewardConfig) -> None:
        """Describe the pool.

        Raises:
            UserError: there is no such grader.
        """
        self.config = config
        self._kinds = {name: kind_of(grader) for name, grader in check_graders(config).items()}
        self._pool: ProcessPool | None = None
        self._groups: dict[Hashable, _Group] = {}
        self._running: dict[_Task, None] = {}
        self._ended: queue.SimpleQueue[tuple[_Task, Future[list[Grade] | str]]] = queue.SimpleQueue()
        self._ready: list[_Group] = []
        self._breaks, self._moved = 0, time.monotonic()

    def __enter__(self) -> GraderPool:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(self) -> None:
        """Start the processes, which load their graders meanwhile."""
        if self._pool is None:
            config = self.config
            self._pool = ProcessPool(
                max_workers=config.workers,
                initializer=worker.begin,
                initargs=(os.getpid(), tuple(self._kinds), config.marker, config.timeout_s),
                context=GraderContext(),
            )
            _ = self._pool.active  # asking starts it
            self._moved = time.monotonic()

    def close(self) -> None:
        """End the processes, whatever they do. Groups that are not done are forgotten."""
        self._groups.clear()
        self._running.clear()
        self._ready.clear()
        self._stop()

    def submit(self, key: Hashable, prompt: Prompt, answers: Sequence[Answer]) -> None:
        """Have answers to a prompt graded.

        Args:
            key: names the group in `poll`.
            prompt: with its answer and metadata.
            answers: each response as text, and whether it ended by itself.

        Raises:
            ValueError: a group of this key is not done yet.
        """
        if key in self._groups:
            raise ValueError(f"group {key!r} is being graded already")
        self.start()
        if not self._running:
            self._moved = time.monotonic()  # nobody polls while the trainer trains
        group = _Group(key, prompt, tuple(answers), grader_name(self.config, prompt))
        self._groups[key] = group
        places = range(len(group.answers))
        if not places:
            self._ready.append(group)
        elif self._kinds[group.grader] == "one":
            for place in places:
                self._run(_Task(group, (place,)))
        else:
            self._run(_Task(group, places))

    def poll(self) -> list[tuple[Hashable, list[Grade]]]:
        """Groups whose answers are all graded, each with its grades in the order of its answers. Never waits."""
        with suppress(queue.Empty):
            while True:
                self._take(*self._ended.get_nowait())
        self._mend()
        ready, self._ready = self._ready, []
        for group in ready:
            del self._groups[group.key]
        return [(group.key, [group.grades[place] for place in range(len(group.answers))]) for group in ready]

    def forget(self) -> None:
        """Grade nothing more of what was submitted. What a process is at is left to its end, or to its deadline."""
        for task in self._running:
            if task.future is not None and not task.future.running():
                task.future.cancel()
        self._groups.clear()
        self._running.clear()
        self._ready.clear()

    def wait(self, timeout_s: float) -> None:
        """Sleep until some answer is graded, or so long. Then `poll`."""
        if not self._ready:
            with suppress(queue.Empty):
                self._take(*self._ended.get(timeout=timeout_s))

    def _run(self, task: _Task) -> None:
        self._running[task] = None
        if not self._running_well():
            task.future = None  # `_mend` sees to it
            return
        assert self._pool is not None
        answers = [task.group.answers[place] for place in task.places]
        try:
            future = self._pool.schedule(
                worker.grade, args=(task.group.grader, task.group.prompt, answers), timeout=self.config.timeout_s
            )
        except RuntimeError:  # it broke since; `_mend` sees to it
            task.future = None
            return
        task.future = future
        future.add_done_callback(lambda done: self._ended.put((task, done)))

    def _take(self, task: _Task, future: Future[list[Grade] | str]) -> None:
        """What has become of a task, as one of pebble's threads left it."""
        if task not in self._running or task.future is not future:  # of a pool that was given up
            return
        error = future.exception()
        if isinstance(error, BrokenProcessPool):
            return  # `_mend` sees to it
        del self._running[task]
        self._breaks, self._moved = 0, time.monotonic()
        if error is None:
            said = future.result()
        elif isinstance(error, TimeoutError):
            said = f"took longer than {self.config.timeout_s} s and was killed"
        elif isinstance(error, ProcessExpired):
            if abs(error.exitcode) == signal.SIGTERM and task.tries + 1 < TRIES:  # pebble's handler makes it positive
                task.tries += 1
                self._run(task)
                return
            said = _end_of(error.exitcode)
        else:
            said = shown(error)
        self._grade(task, said)

    def _grade(self, task: _Task, said: list[Grade] | str) -> None:
        group = task.group
        if isinstance(said, str) and len(task.places) > 1:  # one by one only the guilty one is ungraded
            for place in task.places:
                self._run(_Task(group, (place,)))
            return
        grades = [ungraded(said)] * len(task.places) if isinstance(said, str) else said
        group.grades.update(zip(task.places, grades, strict=True))
        if len(group.grades) == len(group.answers):
            self._ready.append(group)

    def _running_well(self) -> bool:
        """Whether the pool takes tasks; it breaks when a process ends that nothing was asked of."""
        return self._pool is not None and self._pool.active

    def _mend(self) -> None:
        """Replace a pool that broke, or in which nothing moves any more, and have its tasks done by the new one."""
        stalled = time.monotonic() - self._moved > self.config.timeout_s + STALLED_S
        if not self._running or (self._running_well() and not stalled):
            return
        self._stop()
        self._breaks += 1
        tasks, self._running = list(self._running), {}
        if self._breaks > TRIES:
            self._breaks = 0
            for task in tasks:
                for place in task.places:
                    self._grade(_Task(task.group, (place,)), "its processes end or hang before they grade anything")
        self.start()
        for task in tasks if self._breaks else ():
            self._run(task)

    def _stop(self) -> None:
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.stop()
            pool.join()


def _end_of(exitcode: int) -> str:
    """How a process ended."""
    if exitcode < 0:
        known = {one.value: one.name for one in signal.Signals}  # real-time signals have no names
        return f"its process was ended by {known.get(-exitcode, f'signal {-exitcode}')}"
    return f"its process ended with exit code {exitcode}"
