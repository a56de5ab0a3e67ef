"""The inputs that `check-loss` tries a loss on: small micro-batches, laid out as the trainer does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from megatron_rl.algorithms.losses import LossInputs
from megatron_rl.training.objective import sum_over_responses


@dataclass(frozen=True, kw_only=True)
class Example:
    """A named input: values of the trained tokens, response after response, three responses to a group."""

    name: str
    lengths: tuple[int, ...]
    columns: Mapping[str, Tensor]
    """`[trained tokens]`, by field of `LossInputs`."""

    weights: Tensor
    """1/(responses × length), `[trained tokens]`."""

    def __str__(self) -> str:
        return f'input "{self.name}"'

    def parts(self, count: int) -> list[range]:
        """Its responses dealt out to `count` micro-batches."""
        return [range(first, len(self.lengths), count) for first in range(count)]

    def at(self, token: int) -> str:
        """Where a trained token is, and what."""
        response = next(n for n, end in enumerate(accumulate(self.lengths)) if token < end)
        figures = ", ".join(f"{name} {self.columns[name][token]:.4g}" for name in COLUMNS[:2] + COLUMNS[4:5])
        return f"at token {token - sum(self.lengths[:response])} of response {response} ({figures})"

    def lay(self, chosen: Sequence[int], outside: float = 0.0) -> tuple[LossInputs, Tensor]:
        """A micro-batch of the chosen responses, as the trainer lays it out.

        Returns:
            What the loss gets, with masked tokens before, between and after responses; and `[tokens]`: which trained
            token of the example each is, -1 outside the mask.
        """
        ends = list(accumulate(self.lengths))
        rows = [(-1, -1, -1)] * 3
        for place, one in enumerate(chosen):
            rows += [(number, place, one // 3) for number in range(ends[one] - self.lengths[one], ends[one])]
            rows += [(-1, -1, -1)] * (1 + one % 3)
        numbers, ids, groups = torch.tensor(rows).T
        fields: dict[str, Any] = {
            name: torch.cat((of, of.new_tensor([outside])))[numbers] for name, of in self.columns.items()
        }
        fields["logprobs"] = fields["logprobs"].requires_grad_().clone()  # no leaf, as in the trainer
        summed = partial(sum_over_responses, ids=ids, responses=len(ends))
        return LossInputs(**fields, mask=ids >= 0, response_ids=ids, group_ids=groups, sequence_sum=summed), numbers


COLUMNS = ("logprobs", "old_logprobs", "rollout_logprobs", "reference_logprobs", "advantages", "entropies")


def _examples() -> list[Example]:
    lengths = (1, 3, 7, 9, 2, 5, 8, 4, 6)
    by_response = torch.tensor([1.5, -0.5, 0.0, 1.0, -1.0, 0.25, -2.0, 0.5, 0.0]).double()
    advantages = by_response.repeat_interleave(torch.tensor(lengths))
    noise = torch.randn(5, sum(lengths), generator=torch.Generator().manual_seed(0)).double()
    now, engine, first = -noise[0].abs() - 1.5, 0.03 * noise[2], torch.zeros(sum(lengths)).double()
    old = now + 0.3 * noise[1]
    first[[0, *accumulate(lengths[:-1])]] = 20.0  # in each response

    def example(
        name: str, logprobs: Tensor, old: Tensor, rollout: Tensor, scale: float = 1, responses: int = 9
    ) -> Example:
        values = (logprobs, old, rollout, old + 0.1 * noise[3], scale * advantages, noise[4].abs())
        tokens = sum(lengths[:responses])
        columns = {of: value[:tokens] for of, value in zip(COLUMNS, values, strict=True)}
        weights = torch.tensor([1 / (responses * length) for length in lengths[:responses] for _ in range(length)])
        return Example(name=name, lengths=lengths[:responses], columns=columns, weights=weights.double())

    low, high = torch.full_like(now, -50.0), torch.full_like(now, -1e-6)
    return [
        example("on-policy", now, now, now + engine),
        example("off-policy", now, old, old + engine),
        example("log-probs of -50", low, low, low),
        example("log-probs of -1e-6", high, high, high),
        example("log-ratio of 20", now, now - first, now - first),
        example("log-ratio of -20", now - first, now, now),
        example("engine 20 below the trainer", now, now, now - first),
        example("advantages of 1000", now, old, old + engine, scale=500),
        example("one trained token", now, old, old, responses=1),
        example("no trained token", now, old, old, responses=0),
    ]


EXAMPLES = _examples()
