"""Hidden states, an output layer and labels, and what plain autograd through all their logits says of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Case:
    """In float64; hidden states and weight collect gradients."""

    hidden: Tensor
    """`[tokens, hidden]`."""

    weight: Tensor
    """`[columns, hidden]`."""

    labels: Tensor
    """`[tokens]`."""

    probe: Tensor
    """What log-probs and entropies weigh in the objective whose gradients are compared, `[2, tokens]`."""

    vocabulary: int
    temperature: float = 0.7

    @staticmethod
    def drawn(*, tokens: int, hidden: int, columns: int, vocabulary: int) -> "Case":
        """Random, the same every time."""
        draw = torch.Generator().manual_seed(0)
        states, weight = (torch.randn(size, hidden, generator=draw).double() for size in (tokens, columns))
        labels = torch.randint(vocabulary, (tokens,), generator=draw)
        probe = torch.randn(2, tokens, generator=draw).double()
        return Case(states.requires_grad_(), weight.requires_grad_(), labels, probe, vocabulary)

    @property
    def options(self) -> dict[str, Any]:
        """Of `projected_logprobs`."""
        return {"temperature": self.temperature, "vocabulary": self.vocabulary}


def plain_scores(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs of the labels, entropies, and whether no token is likelier, `[tokens]`."""
    distribution = (case.hidden @ case.weight[: case.vocabulary].t() / case.temperature).log_softmax(-1)
    logprobs = distribution.gather(-1, case.labels.unsqueeze(-1)).squeeze(-1)
    return logprobs, -(distribution.exp() * distribution).sum(-1), logprobs == distribution.amax(-1)


def gradients(
    leaves: Sequence[Tensor], logprobs: Tensor, entropies: Tensor | None, probe: Tensor
) -> tuple[Tensor, ...]:
    """Of the probed log-probs, and of the probed entropies where they are given, by each leaf."""
    total = (probe[0] * logprobs).sum()
    if entropies is not None:
        total = total + (probe[1] * entropies).sum()
    return torch.autograd.grad(total, leaves)
