"""Estimators of the divergence from a reference: values, gradients, and what they are on average."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megatron_rl.algorithms.kl import KlEstimator, kl_estimates
from tests.cases.step import double

HALF, QUARTER = math.log(1 / 2), math.log(1 / 4)
ESTIMATORS: list[KlEstimator] = ["k1", "k2", "k3"]


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        # π 1/2 against 1/4, then 1/4 against 1/2, then equal: d = log 2, −log 2, 0.
        ("k1", [0.6931471805599453, -0.6931471805599453, 0.0]),
        ("k2", [0.2402265069591007, 0.2402265069591007, 0.0]),
        ("k3", [0.1931471805599453, 0.3068528194400547, 0.0]),
    ],
)
def test_values_worked_out_by_hand(estimator: KlEstimator, expected: list[float]) -> None:
    found = kl_estimates(double([HALF, QUARTER, HALF]), double([QUARTER, HALF, HALF]), estimator=estimator)
    assert found.tolist() == pytest.approx(expected, abs=1e-15)


FORMULAS: dict[KlEstimator, Callable[[float], float]] = {
    "k1": lambda d: d,
    "k2": lambda d: d * d / 2,
    "k3": lambda d: math.exp(-d) - 1 + d,
}


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_gradients_are_those_of_finite_differences(estimator: KlEstimator) -> None:
    changes = [-2.0, -0.3, 0.0, 0.4, 1.7]
    reference = double([-1.0, -2.0, -0.5, -3.0, -4.0])
    logprobs = (reference + double(changes)).requires_grad_()
    kl_estimates(logprobs, reference, estimator=estimator).sum().backward()
    assert logprobs.grad is not None
    formula, step = FORMULAS[estimator], 1e-5
    slopes = [(formula(d + step) - formula(d - step)) / (2 * step) for d in changes]
    assert logprobs.grad.tolist() == pytest.approx(slopes, abs=1e-9)


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_a_policy_that_holds_a_token_likelier_than_the_reference_is_pushed_down_and_the_other_way_round(
    estimator: KlEstimator,
) -> None:
    logprobs = double([HALF, QUARTER]).requires_grad_()
    kl_estimates(logprobs, double([QUARTER, HALF]), estimator=estimator).sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad[0] > 0 > logprobs.grad[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_k3_is_not_lost_in_rounding_where_the_two_are_nearly_equal(dtype: torch.dtype) -> None:
    change = torch.tensor([1e-4, -1e-4, 1e-3], dtype=dtype)
    found = kl_estimates(change, torch.zeros_like(change), estimator="k3")
    assert found.min() >= 0
    assert found.tolist() == pytest.approx([5e-9, 5e-9, 5e-7], rel=5e-3)


# ---- expectations over a distribution of five, without sampling

LOGITS, REFERENCE = double([0.7, -0.2, 1.1, 0.0, -1.5]), double([0.1, 0.4, 0.3, -0.8, 0.2]).log_softmax(0)


def expectation(estimator: KlEstimator, logits: Tensor) -> Tensor:
    """Of an estimate over what the policy samples; the sampling itself carries no gradient, as in training."""
    logprobs = logits.log_softmax(0)
    return (logprobs.detach().exp() * kl_estimates(logprobs, REFERENCE, estimator=estimator)).sum()


def gradient_of(function: Callable[[Tensor], Tensor]) -> list[float]:
    logits = LOGITS.clone().requires_grad_()
    (found,) = torch.autograd.grad(function(logits), logits)
    return found.tolist()


def divergence(logits: Tensor) -> Tensor:
    """KL(policy ‖ reference)."""
    logprobs = logits.log_softmax(0)
    return (logprobs.exp() * (logprobs - REFERENCE)).sum()


def reverse_divergence(logits: Tensor) -> Tensor:
    """KL(reference ‖ policy)."""
    return (REFERENCE.exp() * (REFERENCE - logits.log_softmax(0))).sum()


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_k1_and_k3_are_the_divergence_on_average(estimator: KlEstimator) -> None:
    assert divergence(LOGITS) > 0.1
    assert expectation(estimator, LOGITS).item() == pytest.approx(divergence(LOGITS).item(), abs=1e-15)


def test_k2_is_not() -> None:
    assert abs(expectation("k2", LOGITS) - divergence(LOGITS)) > 0.01


def test_k1_has_no_gradient_on_average() -> None:
    assert gradient_of(lambda logits: expectation("k1", logits)) == pytest.approx([0.0] * 5, abs=1e-15)


def test_k2_has_the_gradient_of_the_divergence_on_average() -> None:
    expected = gradient_of(divergence)
    assert max(map(abs, expected)) > 0.1
    assert gradient_of(lambda logits: expectation("k2", logits)) == pytest.approx(expected, abs=1e-15)


def test_k3_has_the_gradient_of_the_divergence_the_other_way_round() -> None:
    expected = gradient_of(reverse_divergence)
    assert expected != pytest.approx(gradient_of(divergence), abs=1e-2)
    assert gradient_of(lambda logits: expectation("k3", logits)) == pytest.approx(expected, abs=1e-15)


def test_an_unknown_estimator_is_refused() -> None:
    with pytest.raises(ValueError, match="'k4': k1, k2 or k3"):
        kl_estimates(double([0.0]), double([0.0]), estimator="k4")  # type: ignore[arg-type]
