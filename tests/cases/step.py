"""An optimizer step as flat tokens, the way a loss sees it: made by hand from ratios, lengths and rewards."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_rl.algorithms.advantages import group_advantages
from megatron_rl.algorithms.losses import LossInputs, LossOutput, ppo_clip
from megatron_rl.algorithms.weights import loss_weights

Responses = tuple[Sequence[Sequence[float]], Sequence[float]]
"""Of one group: the ratios of each response's tokens, and the rewards."""


def double(values: Sequence[float]) -> Tensor:
    """A float64 tensor."""
    return torch.tensor(values, dtype=torch.float64)


def loss_inputs(
    logprobs: Tensor,
    advantages: Tensor,
    *,
    response_ids: Tensor | None = None,
    mask: Tensor | None = None,
    old: Tensor | None = None,
) -> LossInputs:
    """Log-probs as a leaf that collects the gradient, to old ones of 0; one response unless `response_ids` tells."""
    leaf, zeros = logprobs.detach().clone().requires_grad_(), torch.zeros_like(logprobs)
    mask = torch.ones_like(logprobs, dtype=torch.bool) if mask is None else mask
    ids = torch.where(mask, 0 if response_ids is None else response_ids, -1)

    def sequence_sum(values: Tensor) -> Tensor:
        alike = (ids[:, None] == ids) & mask
        return (torch.where(mask, values, 0.0) * alike).sum(1) * mask

    return LossInputs(
        logprobs=leaf,
        old_logprobs=zeros if old is None else old,
        rollout_logprobs=zeros,
        advantages=advantages,
        mask=mask,
        entropies=zeros,
        response_ids=ids,
        group_ids=torch.where(mask, 0, -1),
        sequence_sum=sequence_sum,
    )


def gradient(inputs: LossInputs, total: Tensor) -> Tensor:
    """Of `total` by the log-probs."""
    total.backward()
    assert inputs.logprobs.grad is not None
    return inputs.logprobs.grad


class Step:
    """An optimizer step over whole groups: `sum_t w_t l_t` and its gradient for any part of its tokens."""

    def __init__(
        self,
        *groups: Responses,
        estimator: str = "grpo",
        mode: str = "token_mean_group",
        ddof: int = 1,
        budget: int = 10,
        untrained: Sequence[int] = (),
        loss: Callable[..., LossOutput] = ppo_clip,
        **kwargs: Any,
    ) -> None:
        ratios = [of_one for of_group, _ in groups for of_one in of_group]
        lengths = torch.tensor([len(of_one) for of_one in ratios])
        ids = torch.tensor([number for number, (_, rewards) in enumerate(groups) for _ in rewards])
        rewards = double([reward for _, of_group in groups for reward in of_group])
        trained = lengths.clone()
        trained[list(untrained)] = 0
        self.ratios = double([ratio for of_one in ratios for ratio in of_one])
        self.response = torch.arange(len(lengths)).repeat_interleave(lengths)
        advantages = group_advantages(rewards, ids, estimator=estimator, std_ddof=ddof, std_eps=0.0, lengths=lengths)
        self.advantages = advantages[self.response]
        self.weights = loss_weights(trained, ids, mode=mode, budget=budget)[self.response]
        self.loss, self.kwargs = loss, kwargs

    def losses(self, tokens: Tensor | slice = slice(None)) -> tuple[LossInputs, Tensor]:
        """Of each token, before weights."""
        inputs = loss_inputs(self.ratios[tokens].log(), self.advantages[tokens], response_ids=self.response[tokens])
        return inputs, self.loss(inputs, **self.kwargs).losses

    def loss_and_gradient(self, tokens: Tensor | slice = slice(None)) -> tuple[float, Tensor]:
        """The weighted sum over these tokens, and its gradient by their log-probs."""
        inputs, losses = self.losses(tokens)
        total = (losses * self.weights[tokens]).sum()
        return total.item(), gradient(inputs, total)
