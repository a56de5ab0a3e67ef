"""The objective on one process, in float64, by somebody who knows neither Megatron nor this package's algorithms.

Responses one by one through transformers, advantages and weights as the papers write them, plain autograd.
"""

import copy
import math
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from megatron_rl.types import Graded, Group
from tests.cases.responses import tokens_of

Gradients = dict[str, Tensor]


class Plain:
    """A model as transformers has it."""

    def __init__(self, model: Path, *, vocabulary: int, temperature: float) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
        self.vocabulary, self.temperature = vocabulary, temperature

    def distributions(self, prompt: tuple[int, ...], response: tuple[int, ...]) -> Tensor:
        """Log-probs of all ids at the tokens of a response, `[tokens, ids]`, with gradient."""
        logits = self.model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1, : self.vocabulary]
        return (logits / self.temperature).log_softmax(-1)

    def logprobs(self, prompt: tuple[int, ...], response: tuple[int, ...]) -> Tensor:
        """Of the tokens of a response, `[tokens]`, with gradient."""
        return self.distributions(prompt, response).gather(-1, torch.tensor(response)[:, None])[:, 0]

    def entropies(self, prompt: tuple[int, ...], response: tuple[int, ...]) -> Tensor:
        """At the tokens of a response, in nats, `[tokens]`, with gradient."""
        logprobs = self.distributions(prompt, response)
        return -(logprobs.exp() * logprobs).sum(-1)

    def scaled(self, factor: float) -> "Plain":
        """The model with every weight multiplied: another policy."""
        other = copy.deepcopy(self)
        with torch.no_grad():
            for parameter in other.model.parameters():
                parameter.mul_(factor)
        return other

    def gradients(self, loss: Tensor) -> Gradients:
        """Of a loss, by HF name."""
        self.model.zero_grad()
        loss.backward()
        return {name: parameter.grad.clone() for name, parameter in self.model.named_parameters()}


def objective(
    plain: Plain,
    groups: list[Group],
    normalisation: str,
    *,
    budget: int,
    ratios: dict[int, float],
    clip: float = 0.2,
    of_response: bool = False,
) -> Tensor:
    """GRPO's advantages under a normalisation, clipped at 1 ± `clip`; truncated and ungraded responses are left out.

    `ratios`: by token id, of the current to the old policy; 1 where none is given. `of_response`: every token has the
    geometric mean of its response's ratios (GSPO, eq. 5) instead of its own.
    """

    def is_trained(answer: Graded) -> bool:
        return not math.isnan(answer.score) and answer.finish_reason == "stop"

    trained = [[answer for answer in group.responses if is_trained(answer)] for group in groups]
    lengths = [[answer.length for answer in of_group] for of_group in trained]
    count, tokens = sum(map(len, lengths)), sum(map(sum, lengths))
    weight: dict[str, Callable[[int, int], float]] = {
        "sequence_mean": lambda group, length: 1 / (count * length),
        "token_mean_group": lambda group, length: 1 / (sum(map(bool, lengths)) * sum(lengths[group])),
        "token_mean_batch": lambda group, length: 1 / tokens,
        "constant": lambda group, length: 1 / (count * budget),
    }
    total = torch.zeros((), dtype=torch.float64)
    for number, (group, of_group) in enumerate(zip(groups, trained, strict=True)):
        scores = [answer.score for answer in group.responses if not math.isnan(answer.score)]
        if max(scores) == min(scores):
            continue
        mean, deviation = statistics.mean(scores), statistics.stdev(scores)
        for answer in of_group:
            advantage = (answer.score - mean) / (deviation + 1e-6)
            logprobs = plain.logprobs(group.prompt.ids, tokens_of(answer).ids)
            values = [ratios.get(token, 1.0) for token in tokens_of(answer).ids]
            change = logprobs - logprobs.detach() + torch.tensor(values, dtype=torch.float64).log()
            ratio = (change.mean().expand_as(change) if of_response else change).exp()
            gain = torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage)
            total = total - weight[normalisation](number, answer.length) * gain.sum()
    return total


def with_kl_and_entropy(plain: Plain, reference: Plain, groups: list[Group], *, kl: float, entropy: float) -> Tensor:
    """Token means of groups, on policy: −A, with k2 to the reference policy and less the entropy, at every token."""
    total = torch.zeros((), dtype=torch.float64)
    for group in groups:
        scores = [answer.score for answer in group.responses]
        mean, deviation = statistics.mean(scores), statistics.stdev(scores)
        tokens = sum(answer.length for answer in group.responses)
        for answer in group.responses:
            prompt, response = group.prompt.ids, tokens_of(answer).ids
            logprobs = plain.logprobs(prompt, response)
            gain = (logprobs - logprobs.detach()).exp() * (answer.score - mean) / (deviation + 1e-6)
            apart = (logprobs - reference.logprobs(prompt, response).detach()).square() / 2
            losses = -gain + kl * apart - entropy * plain.entropies(prompt, response)
            total = total + losses.sum() / (len(groups) * tokens)
    return total


def kl_of_responses(reference: Plain, groups: list[Group]) -> list[float]:
    """k3 of the engine's log-probs to the reference policy, summed over each response."""
    found = []
    for group in groups:
        for answer in group.responses:
            expected = reference.logprobs(group.prompt.ids, tokens_of(answer).ids).detach()
            apart = torch.tensor(tokens_of(answer).logprobs, dtype=torch.float64) - expected
            found.append(float(((-apart).exp() - 1 + apart).sum()))
    return found
