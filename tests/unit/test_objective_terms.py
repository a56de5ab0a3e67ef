"""The terms around a loss: divergence from a reference policy, correction, entropy bonus."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.algorithms.losses import reinforce
from megatron_rl.types import MicroBatch, TrainedResponse
from tests.cases.group import group_of_one
from tests.cases.logits import logprobs_of_logits
from tests.cases.micro import micro_batches, objective, sequences
from tests.cases.responses import tokens_of


def current_of(label: int) -> float:
    return -1.0 - math.sin(label * 0.7)


def reference_of(label: int) -> float:
    return -1.3 - math.cos(label * 0.9)


def sampled_of(label: int) -> float:
    engine = -0.1 * (label % 10 + label // 10)
    return engine + 0.3 * math.sin(label * 1.7)


def by_label(batch: MicroBatch, function: Callable[[int], float]) -> Tensor:
    """`[batch, seq]`, float64, NaN outside the mask."""
    values = torch.tensor([[function(label) for label in row] for row in batch.labels.tolist()], dtype=torch.float64)
    return torch.where(batch.mask, values, math.nan)


def tokens() -> list[tuple[TrainedResponse, int, float]]:
    """(response, label, the engine's log-prob) of every trained token."""
    return [
        (one, label, logprob)
        for one in sequences()
        for label, logprob in zip(tokens_of(one).ids, tokens_of(one).logprobs, strict=True)
    ]


def evaluate(size: int = 5, entropy: float = 0.0, **algorithm: Any) -> tuple[float, dict[int, float], dict[str, float]]:
    """The objective of REINFORCE over all micro-batches, its gradient by label, and its metrics as means."""
    total, gradients, sums = 0.0, dict[int, float](), dict[str, tuple[float, float]]()
    for batch in micro_batches(sequences(), size):
        logprobs = by_label(batch, current_of).requires_grad_()
        loss, metrics = objective(
            reinforce,
            batch,
            logprobs,
            entropies=by_label(batch, lambda label: entropy),
            sampled=by_label(batch, sampled_of),
            reference=by_label(batch, reference_of),
            **algorithm,
        )
        loss.backward()
        assert logprobs.grad is not None
        total += loss.item()
        gradients |= dict(zip(batch.labels[batch.mask].tolist(), logprobs.grad[batch.mask].tolist(), strict=True))
        for name, (part, weight) in metrics.items():
            old = sums.get(name, (0.0, 0.0))
            sums[name] = (old[0] + part.item(), old[1] + weight.item())
    return total, gradients, {name: part / weight for name, (part, weight) in sums.items()}


KL: dict[str, Callable[[float], float]] = {
    "k1": lambda d: d,
    "k2": lambda d: d**2 / 2,
    "k3": lambda d: math.exp(-d) - 1 + d,
}


@pytest.mark.parametrize("estimator", KL)
@pytest.mark.parametrize("size", [1, 5])
def test_the_divergence_is_added_to_the_loss_with_its_coefficient_and_its_gradient(estimator: str, size: int) -> None:
    kl, coef, step = KL[estimator], 0.3, 1e-5

    def term(one: TrainedResponse, label: int, logprob: float) -> float:
        return one.weight * (-one.advantage * logprob + coef * kl(logprob - reference_of(label)))

    total, gradients, metrics = evaluate(size, kl={"coef": coef, "estimator": estimator})
    assert total == pytest.approx(sum(term(one, label, current_of(label)) for one, label, _ in tokens()), abs=1e-12)
    for one, label, _ in tokens():
        sides = [term(one, label, current_of(label) + nudge) for nudge in (step, -step)]
        assert gradients[label] == pytest.approx((sides[0] - sides[1]) / (2 * step), abs=1e-9)
    mean = sum(kl(current_of(label) - reference_of(label)) for _, label, _ in tokens()) / len(tokens())
    assert metrics["policy/kl"] == pytest.approx(mean, abs=1e-12)


def test_a_divergence_that_is_taken_from_the_reward_is_not_in_the_loss() -> None:
    plain, gradients, _ = evaluate()
    assert evaluate(kl={"coef": 0.3, "place": "reward"})[:2] == (plain, gradients)


@pytest.mark.parametrize(
    ("level", "mode", "weight"),
    [
        ("token", "truncate", lambda own, together: min(own, 1.2)),
        ("token", "mask", lambda own, together: own if 0.8 <= own <= 1.2 else 0.0),
        ("sequence", "truncate", lambda own, together: min(together, 1.2)),
        ("sequence", "mask", lambda own, together: together if 0.8 <= together <= 1.2 else 0.0),
    ],
)
def test_a_correction_multiplies_the_policy_loss_and_neither_the_divergence_nor_the_entropy(
    level: str, mode: str, weight: Callable[[float, float], float]
) -> None:
    expected, slopes, weights = 0.0, {}, []
    for one, label, engine in tokens():
        together = sum(map(sampled_of, tokens_of(one).ids)) - sum(tokens_of(one).logprobs)
        correction = weight(math.exp(sampled_of(label) - engine), math.exp(together))
        divergence = current_of(label) - reference_of(label)
        expected += one.weight * (-correction * one.advantage * current_of(label) + 0.3 * divergence - 0.2 * 0.75)
        slopes[label] = one.weight * (-correction * one.advantage + 0.3)
        weights.append(correction)
    total, gradients, metrics = evaluate(
        entropy=0.75,
        entropy_coef=0.2,
        kl={"coef": 0.3, "estimator": "k1"},
        correction={"level": level, "mode": mode, "cap": 1.2, "floor": 0.8 if mode == "mask" else 0.0},
    )
    assert total == pytest.approx(expected, abs=1e-6)  # the engine's log-probs are float32
    assert gradients == pytest.approx(slopes, abs=1e-6)
    assert metrics["mismatch/correction"] == pytest.approx(sum(weights) / len(weights), abs=1e-6)
    assert len(set(weights)) > 2


def test_an_entropy_bonus_is_taken_from_each_tokens_loss() -> None:
    plain, gradients, _ = evaluate(entropy=0.75)
    total, with_bonus, metrics = evaluate(entropy=0.75, entropy_coef=0.2)
    assert total == pytest.approx(plain - 0.2 * 0.75 * sum(one.weight for one, _, _ in tokens()), abs=1e-12)
    assert with_bonus == gradients  # through the entropies only, and those are constants here
    assert metrics["policy/entropy"] == pytest.approx(0.75)


# ---- gradients by logits


@pytest.fixture(scope="module")
def group() -> Iterator[dist.ProcessGroup]:
    with group_of_one() as one:
        yield one


VOCABULARY, PADDED, TEMPERATURE = 60, 64, 0.7


@pytest.mark.parametrize("entropy_gradient", [True, False])
def test_the_gradient_of_an_entropy_bonus_is_that_of_a_plain_softmax(
    entropy_gradient: bool, group: dist.ProcessGroup
) -> None:
    (batch,) = micro_batches(sequences(), 5)
    generator = torch.Generator().manual_seed(0)
    logits = (2 * torch.randn(*batch.labels.shape, PADDED, generator=generator)).requires_grad_()
    logprobs, entropies, _ = logprobs_of_logits(
        logits,
        batch.labels,
        temperature=TEMPERATURE,
        vocabulary=VOCABULARY,
        group=group,
        entropy_gradient=entropy_gradient,
    )
    assert entropies.requires_grad is entropy_gradient
    total, _ = objective(reinforce, batch, logprobs, entropies=entropies, entropy_coef=0.5)
    total.backward()

    plain = logits.detach().double().requires_grad_()
    distribution = (plain[..., :VOCABULARY] / TEMPERATURE).log_softmax(-1)
    entropy = -(distribution.exp() * distribution).sum(-1)
    taken = distribution.gather(-1, batch.labels.unsqueeze(-1)).squeeze(-1)
    bonus = 0.5 * (entropy if entropy_gradient else entropy.detach())
    expected = (batch.weights * torch.where(batch.mask, -batch.advantages * taken - bonus, 0.0)).sum()
    expected.backward()
    assert total.item() == pytest.approx(expected.item(), rel=1e-5)
    assert logits.grad is not None
    assert plain.grad is not None
    assert torch.allclose(logits.grad.double(), plain.grad, rtol=1e-4, atol=1e-7)
    assert logits.grad[..., VOCABULARY:].eq(0).all()
    assert entropies.tolist() == [pytest.approx(row, abs=1e-5) for row in entropy.tolist()]
