"""The nouns that travel: prompts, responses, groups, and the batch that is trained on.

Graders' processes import this file, and a node has dozens of them: torch is for the type checker only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch import Tensor

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A prompt, rendered and tokenised once; its ids are all that engines and trainer ever see of it."""

    index: int
    """Its line in the file, counted from 1."""

    text: str
    """As rendered."""

    ids: tuple[int, ...]
    """Token ids."""

    answer: str
    """What a right response says; its meaning is the grader's."""

    metadata: Mapping[str, Any] = field(default_factory=dict)
    """All other keys of the row."""


@dataclass(frozen=True, kw_only=True)
class Response:
    """What an engine made of a prompt. Ids are kept as sampled; nothing is decoded and encoded again for training."""

    ids: tuple[int, ...]
    """Sampled token ids, with the end-of-sequence token where one was sampled."""

    logprobs: tuple[float, ...]
    """Log-probability of each of them when it was sampled."""

    finish_reason: FinishReason
    """`stop` (an end-of-sequence token was sampled), `length` (cut off at the budget), `abort`."""

    weight_versions: tuple[int, ...]
    """Of each token: optimizer steps behind the weights it was sampled with."""


@dataclass(frozen=True, kw_only=True)
class Graded:
    """A response with its grade: what every rank knows of it, and on its home its tokens and its text."""

    length: int
    """In tokens."""

    finish_reason: FinishReason
    score: float
    """How right, from 0 to 1, unshaped; NaN: ungraded."""

    home: int = 0
    """The rank that has its tokens: the one that leads the engine."""

    response: Response | None = None
    """Its tokens; None on other ranks."""

    text: str = ""
    """Decoded, without special tokens: for graders and people. Empty on other ranks."""

    details: Mapping[str, Any] = field(default_factory=dict)
    """What else its grader said of it, JSON-able. Empty on other ranks."""

    @staticmethod
    def of(
        response: Response, *, score: float, text: str = "", home: int = 0, details: Mapping[str, Any] | None = None
    ) -> Graded:
        """A response as it is known on its home."""
        return Graded(
            length=len(response.ids),
            finish_reason=response.finish_reason,
            score=score,
            home=home,
            response=response,
            text=text,
            details=details or {},
        )


@dataclass(frozen=True, kw_only=True)
class Group:
    """All responses to one prompt of one step."""

    prompt: Prompt
    responses: tuple[Graded, ...]

    @property
    def accuracy(self) -> float:
        """Mean score of the graded responses, NaN where none is graded."""
        scores = self.graded_scores
        return sum(scores) / len(scores) if scores else float("nan")

    @property
    def graded_scores(self) -> list[float]:
        """Scores without the ungraded."""
        return [g.score for g in self.responses if g.score == g.score]


@dataclass(frozen=True, kw_only=True)
class TrainedResponse:
    """One response as the trainer sees it."""

    prompt_ids: tuple[int, ...]
    length: int
    """Of the response, in tokens."""

    home: int
    """The rank that has its tokens."""

    response: Response | None
    """Its tokens; None on other ranks."""

    advantage: float
    weight: float
    """Weight of each of its tokens in the objective; 0: not trained on."""

    group: int
    """Which group of the batch it belongs to."""

    number: int
    """Its place among all responses of the batch."""


@dataclass(frozen=True, kw_only=True)
class TrainBatch:
    """What one rollout step trains on: `updates[k]` holds the sequences of its k-th optimizer step."""

    updates: tuple[tuple[TrainedResponse, ...], ...]
    metrics: Mapping[str, tuple[float, float]]
    """(sum, weight) pairs about the groups, before training."""


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """One forward pass: responses behind their prompts, after one another, in one row. Position t predicts token t + 1.

    Tensors are `[1, tokens]`, of the tokens that this context-parallel rank holds.
    """

    tokens: Tensor
    """int64."""

    labels: Tensor
    """int64: the next token."""

    positions: Tensor
    """int64: within its response and prompt, from 0."""

    mask: Tensor
    """bool: the label is a response token with a weight."""

    weights: Tensor
    """float32: w_t of the objective, 0 outside the mask."""

    advantages: Tensor
    """float32."""

    rollout_logprobs: Tensor
    """float32, 0 outside responses."""

    response_ids: Tensor
    """int64: which response of the micro-batch, from 0; −1 outside the mask."""

    group_ids: Tensor
    """int64: which group of the batch; −1 outside the mask."""

    responses: int
    """How many there are."""

    numbers: tuple[int, ...]
    """`TrainedResponse.number` of each."""

    lengths: tuple[int, ...]
    """Tokens of each with its prompt and padding, on all context-parallel ranks together."""

    starts: Tensor
    """int32 `[responses + 1]`: where each begins, and the end (cu_seqlens)."""
