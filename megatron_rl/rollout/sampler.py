"""Graded groups for a list of prompts, sampled by all engines together.

Every rank gets the same groups, as summaries: lengths, finish reasons, scores. Tokens and texts stay with the rank that
leads their engine and parsed them.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from megatron_rl.rewards.graders import Grader
from megatron_rl.rollout.engine import Answer, Request, Sampling, response_seed
from megatron_rl.rollout.waiting import EngineWait
from megatron_rl.types import FinishReason, Graded, Group, Prompt, Response

log = logging.getLogger(__name__)
TRAINING_STREAM, EVALUATION_STREAM = 0, 1
"""First number of a draw's place: training and evaluation never share seeds."""

Summary = tuple[int, FinishReason, float]
"""Length, finish reason and score of a response."""


@dataclass(frozen=True, kw_only=True)
class Draw:
    """A prompt to be sampled, and its place in the run, which seeds its responses."""

    place: tuple[int, ...]
    prompt: Prompt


class Answers(Protocol):
    """Where responses come from: an engine, checked (see `Parity`)."""

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[Answer]:
        """All responses to `requests`, as they complete."""


class GroupSampler:
    """Divides prompts over the engines, grades what they answer, and tells every rank of the groups in their order."""

    def __init__(
        self, engine: Answers, wait: EngineWait, grader: Grader, tokenizer: PreTrainedTokenizerBase, seed: int
    ) -> None:
        self.engine, self.wait, self.grader, self.tokenizer, self.seed = engine, wait, grader, tokenizer, seed
        self._failures_said: set[type[BaseException]] = set()

    def sample(self, draws: Sequence[Draw], *, responses: int, max_tokens: int, sampling: Sampling) -> list[Group]:
        """One group for each draw, in the order of `draws`. A collective over all ranks.

        Args:
            draws: the same on every rank; of E engines each takes every E-th.
            responses: size of a group.
            max_tokens: longest response.
            sampling: how tokens are drawn.

        Raises:
            UserError: the leader of an engine has hung.
        """
        group = self.wait.group
        mine: list[Group] = []
        with self.wait.until_all_are_done():
            if group.leads:
                mine = self._groups(draws[group.number :: group.engines], responses, max_tokens, sampling)
        told: list[list[list[Summary]]] = [[] for _ in range(group.world)]
        dist.all_gather_object(told, [[_summary(one) for one in of_draw.responses] for of_draw in mine])
        groups = []
        for number, draw in enumerate(draws):
            engine, place = number % group.engines, number // group.engines
            if group.leads and engine == group.number:
                groups.append(mine[place])
            else:
                home = group.leader_of(engine)
                known = tuple(_known(one, home) for one in told[home][place])
                groups.append(Group(prompt=draw.prompt, responses=known))
        return groups

    def _groups(self, draws: Sequence[Draw], responses: int, max_tokens: int, sampling: Sampling) -> list[Group]:
        requests = [
            Request(
                prompt_ids=draw.prompt.ids,
                seeds=tuple(response_seed(self.seed, *draw.place, sample) for sample in range(responses)),
                max_tokens=max_tokens,
            )
            for draw in draws
        ]
        answers: list[list[Graded | None]] = [[None] * responses for _ in draws]
        for number, sample, response in self.engine.generate(requests, sampling):
            answers[number][sample] = self._grade(draws[number].prompt, response)
        groups = []
        for draw, of_draw in zip(draws, answers, strict=True):
            given = tuple(answer for answer in of_draw if answer is not None)
            if len(given) < responses:
                raise RuntimeError(
                    f"the engine returned {len(given)} of {responses} responses to prompt {draw.prompt.index}"
                )
            groups.append(Group(prompt=draw.prompt, responses=given))
        return groups

    def _grade(self, prompt: Prompt, response: Response) -> Graded:
        text = self.tokenizer.decode(response.ids, skip_special_tokens=True)
        try:
            score = float(self.grader(prompt, text, response.finish_reason == "stop"))
            if score < 0 or score > 1:
                raise ValueError(f"it returned {score}; a score is from 0 (wrong) to 1 (right)")
        except (Exception, SystemExit) as error:  # a user's function; it fails on an answer, and does not end the run
            score = math.nan
            if type(error) not in self._failures_said:  # each kind once: it may fail on every answer of the run
                self._failures_said.add(type(error))
                log.warning(
                    "the grader failed on the prompt of row %d: %r; such answers are ungraded", prompt.index, error
                )
        return Graded.of(response, text=text, score=score, home=self.wait.group.rank)


def _summary(one: Graded) -> Summary:
    return one.length, one.finish_reason, one.score


def _known(summary: Summary, home: int) -> Graded:
    length, finish_reason, score = summary
    return Graded(length=length, finish_reason=finish_reason, score=score, home=home)
