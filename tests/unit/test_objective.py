"""`sum_t w_t l_t` of padded micro-batches: what reaches the loss, what is kept out, and invariance to the split."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from megatron_rl.algorithms.losses import LOSSES, LossInputs, LossOutput, ppo_clip
from megatron_rl.config import AlgorithmConfig
from megatron_rl.errors import UserError
from megatron_rl.training.batch import share_of_rank
from megatron_rl.training.objective import load_loss, objective, try_loss
from megatron_rl.types import MicroBatch, TrainedResponse


def sequences() -> list[TrainedResponse]:
    """Five responses of uneven lengths behind uneven prompts."""
    return [
        TrainedResponse(
            prompt_ids=tuple(range(prompt)),
            response_ids=tuple(range(10 * number, 10 * number + length)),
            rollout_logprobs=tuple(-0.1 * (position + number) for position in range(length)),
            advantage=advantage,
            weight=weight,
        )
        for number, (prompt, length, advantage, weight) in enumerate(
            [(1, 2, 1.5, 0.25), (3, 4, -0.5, 0.125), (2, 1, -0.5, 0.5), (4, 3, -2.0, 0.0625), (1, 6, 0.75, 0.375)]
        )
    ]


def micro_batches(of: list[TrainedResponse], size: int, multiple: int = 1) -> list[MicroBatch]:
    return list(share_of_rank(of, rank=0, ranks=1, micro_batch_size=size, multiple=multiple).micro_batches)


def logprobs_of(batch: MicroBatch) -> Tensor:
    """Made-up log-probs that depend on the label alone, so that every split of the batch has the same; a leaf."""
    values = -1.0 - (batch.labels.double() * 0.7).sin()
    return torch.where(batch.mask, values, math.nan).requires_grad_()


def total_and_gradients(of: list[TrainedResponse], size: int, multiple: int = 1) -> tuple[float, dict[int, float]]:
    """The objective over all micro-batches, and its gradient by label (labels are distinct)."""
    total, gradients = 0.0, dict[int, float]()
    for batch in micro_batches(of, size, multiple):
        logprobs = logprobs_of(batch)
        old = torch.where(batch.mask, -1.2, math.nan)
        loss, _ = objective(ppo_clip, batch, logprobs, torch.zeros_like(logprobs), old)
        loss.backward()
        assert logprobs.grad is not None
        assert logprobs.grad[~batch.mask].eq(0).all()
        total += loss.item()
        gradients |= dict(zip(batch.labels[batch.mask].tolist(), logprobs.grad[batch.mask].tolist(), strict=True))
    return total, gradients


def test_it_is_the_weighted_sum_worked_out_token_by_token() -> None:
    expected = 0.0
    for sequence in sequences():
        for label in sequence.response_ids:
            ratio = math.exp(-1.0 - math.sin(label * 0.7) + 1.2)
            clipped = min(max(ratio, 0.8), 1.2)
            expected -= sequence.weight * min(ratio * sequence.advantage, clipped * sequence.advantage)
    assert total_and_gradients(sequences(), size=5)[0] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("size", "multiple"), [(1, 1), (2, 1), (3, 4), (4, 7), (9, 2)])
def test_micro_batches_of_any_size_and_padding_give_the_same(size: int, multiple: int) -> None:
    total, gradients = total_and_gradients(sequences(), size=5)
    split_total, split_gradients = total_and_gradients(sequences()[::-1], size, multiple)
    assert split_total == pytest.approx(total, rel=1e-6)
    assert split_gradients.keys() == gradients.keys()
    assert len(gradients) == 16
    for label, gradient in gradients.items():
        assert split_gradients[label] == pytest.approx(gradient, rel=1e-6)


def test_a_loss_that_is_nan_outside_the_mask_adds_nothing() -> None:
    (batch,) = micro_batches(sequences(), 5)
    logprobs = logprobs_of(batch)

    def poisoned(inputs: LossInputs) -> LossOutput:
        return LossOutput(losses=torch.where(inputs.mask, inputs.logprobs, math.nan))

    total, _ = objective(poisoned, batch, logprobs, torch.zeros_like(logprobs), None)
    total.backward()
    assert logprobs.grad is not None
    assert torch.allclose(logprobs.grad, batch.weights.double())
    assert total.isfinite()


@pytest.mark.parametrize("outside", [math.nan, math.inf, -math.inf, 1e4])
def test_what_stands_outside_the_mask_reaches_neither_a_loss_nor_its_gradient(outside: float) -> None:
    (batch,) = micro_batches(sequences(), 5)
    assert not batch.mask.all()
    logprobs = torch.where(batch.mask, logprobs_of(batch).detach(), outside).requires_grad_()
    old = torch.where(batch.mask, -1.2, -outside)
    batch = replace(batch, rollout_logprobs=torch.where(batch.mask, batch.rollout_logprobs, outside))
    entropies = torch.where(batch.mask, 0.5, outside)

    def careless(inputs: LossInputs) -> LossOutput:
        """Masks nothing: exp of what is not finite or large gives NaN, in the gradient even where it is cut out."""
        for values in (inputs.logprobs, inputs.old_logprobs, inputs.rollout_logprobs):
            assert values[~inputs.mask].eq(0).all()
        ratio = (inputs.logprobs - inputs.old_logprobs).exp() * (inputs.logprobs - inputs.rollout_logprobs).exp()
        return LossOutput(losses=ratio * inputs.advantages)

    total, metrics = objective(careless, batch, logprobs, entropies, old)
    total.backward()
    assert total.isfinite()
    assert logprobs.grad is not None
    assert logprobs.grad[~batch.mask].eq(0).all()
    assert logprobs.grad[batch.mask].isfinite().all()
    assert logprobs.grad[batch.mask].ne(0).all()
    assert all(value.isfinite() for pair in metrics.values() for value in pair)


def test_a_batch_of_padding_alone_gives_zero_and_a_gradient_of_zero() -> None:
    (batch,) = micro_batches([], 2)
    logprobs = torch.full(batch.mask.shape, math.nan, requires_grad=True)
    total, metrics = objective(ppo_clip, batch, logprobs, torch.full_like(logprobs, math.nan), None)
    total.backward()
    assert total.item() == 0.0
    assert logprobs.grad is not None
    assert logprobs.grad.eq(0).all()
    assert {name: (s.item(), w.item()) for name, (s, w) in metrics.items() if name != "loss/objective"} == {
        "policy/entropy": (0, 0),
        "policy/logprob": (0, 0),
        "mismatch/logprob_abs": (0, 0),
        "loss/clip_fraction": (0, 0),
        "loss/ratio": (0, 0),
    }


def test_what_a_loss_sees_lies_at_the_tokens_it_belongs_to() -> None:
    (batch,) = micro_batches(sequences()[:3], 4, multiple=5)
    seen: list[LossInputs] = []

    def spy(inputs: LossInputs) -> LossOutput:
        seen.append(inputs)
        return LossOutput(losses=inputs.logprobs)

    logprobs = logprobs_of(batch)
    objective(spy, batch, logprobs, torch.zeros_like(logprobs), None)
    inputs = seen[0]
    labels = batch.labels.flatten()
    # Longest first: the second sequence is row 0, then the first and the third (a tie, in their order).
    by_label = {10 + p: (0, -0.5, -0.1 * (1 + p)) for p in range(4)}
    by_label |= {p: (1, 1.5, -0.1 * p) for p in range(2)} | {20: (2, -0.5, -0.2)}
    found = {
        int(labels[t]): (int(inputs.response_ids[t]), inputs.advantages[t].item(), inputs.rollout_logprobs[t].item())
        for t in inputs.mask.nonzero().squeeze(1).tolist()
    }
    assert found.keys() == by_label.keys()
    for label, values in by_label.items():
        assert found[label] == pytest.approx(values, abs=1e-7)
    assert inputs.response_ids[~inputs.mask].eq(-1).all()
    assert torch.equal(inputs.old_logprobs[inputs.mask], inputs.logprobs[inputs.mask].detach())
    assert not inputs.old_logprobs.requires_grad
    ones = inputs.sequence_sum(torch.where(inputs.mask, 1.0, math.nan))
    assert ones[inputs.mask].tolist() == [4.0] * 4 + [2.0] * 2 + [1.0]


def test_a_sequence_sum_carries_the_gradient_of_every_token_of_its_response() -> None:
    (batch,) = micro_batches(sequences()[:2], 2)
    logprobs = logprobs_of(batch)

    def sequence_level(inputs: LossInputs) -> LossOutput:
        return LossOutput(losses=inputs.sequence_sum(inputs.logprobs))

    total, _ = objective(sequence_level, batch, logprobs, torch.zeros_like(logprobs), None)
    total.backward()
    assert logprobs.grad is not None
    # Each of n tokens has loss S with weight w, and S holds each token once: n w for every token.
    assert logprobs.grad[0][batch.mask[0]].tolist() == [4 * 0.125] * 4
    assert logprobs.grad[1][batch.mask[1]].tolist() == [2 * 0.25] * 2


def test_metrics_are_token_sums() -> None:
    one = TrainedResponse(prompt_ids=(5, 6), response_ids=(1,), rollout_logprobs=(-0.25,), advantage=1.0, weight=0.5)
    other = replace(one, response_ids=(2, 3, 4), rollout_logprobs=(-0.5, -1.0, -2.0))
    (batch,) = micro_batches([one, other], 2)
    logprobs = torch.where(batch.mask, -1.0, math.nan).requires_grad_()
    entropies = torch.full_like(logprobs, math.nan)
    entropies[0][batch.mask[0]] = 0.0  # the longer one
    entropies[1][batch.mask[1]] = 1.0
    old = torch.where(batch.mask, -1.5, math.nan)
    total, metrics = objective(ppo_clip, batch, logprobs, entropies, old)
    found = {name: (s.item(), w.item()) for name, (s, w) in metrics.items()}
    assert found["policy/entropy"] == (1.0, 4)  # a token mean of 0.25; the mean of answers is 0.5
    assert found["policy/logprob"] == (-4.0, 4)
    # The gap between the current policy and what the engine reported: |−1 + 0.25|, |−1 + 0.5|, 0, |−1 + 2|.
    assert found["mismatch/logprob_abs"] == (pytest.approx(2.25), 4)
    assert found["loss/objective"] == (pytest.approx(total.item()), 1)
    assert not metrics["loss/objective"][0].requires_grad


def test_the_mismatch_is_measured_only_with_the_weights_that_sampled() -> None:
    (batch,) = micro_batches(sequences()[:2], 2)
    logprobs = logprobs_of(batch)
    first, later = (
        objective(ppo_clip, batch, logprobs, torch.zeros_like(logprobs), None, first=first)[1]
        for first in (True, False)
    )
    assert first.keys() - later.keys() == {"mismatch/logprob_abs"}
    assert not later.keys() - first.keys()


@pytest.mark.parametrize("name", ["policy/entropy", "loss/objective", "mismatch/logprob_abs"])
def test_a_metric_whose_name_is_taken_is_refused(name: str) -> None:
    (batch,) = micro_batches(sequences()[:2], 2)
    logprobs = logprobs_of(batch)

    def own(inputs: LossInputs) -> LossOutput:
        return LossOutput(losses=inputs.logprobs, metrics={name: (torch.ones(()), torch.ones(()))})

    with pytest.raises(UserError, match=name):
        objective(own, batch, logprobs, torch.zeros_like(logprobs), None)


def test_metrics_of_a_loss_go_with_the_others() -> None:
    (batch,) = micro_batches(sequences()[:2], 2)
    logprobs = logprobs_of(batch)

    def own(inputs: LossInputs) -> LossOutput:
        return LossOutput(losses=inputs.logprobs, metrics={"loss/mine": (torch.tensor(3.0), torch.ones(()))})

    _, metrics = objective(own, batch, logprobs, torch.zeros_like(logprobs), None)
    assert metrics["loss/mine"][0].item() == 3.0
    assert "policy/entropy" in metrics


ONE = torch.ones(())


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda inputs: LossOutput(losses=inputs.logprobs.sum()), r"its losses are \(\); one for each of \d+ tokens"),
        (lambda inputs: LossOutput(losses=inputs.logprobs[None]), r"its losses are \(1, \d+\)"),
        (lambda inputs: LossOutput(losses=cast(Any, [0.0])), "its losses are list"),
        (lambda inputs: LossOutput(losses=inputs.advantages), "carry no gradient"),
        (lambda inputs: LossOutput(losses=inputs.logprobs.detach()), "carry no gradient"),
        (lambda inputs: inputs.logprobs, "returned Tensor, not a LossOutput"),
        (lambda inputs: None, "returned NoneType, not a LossOutput"),
        (lambda inputs: LossOutput(losses=inputs.logprobs, metrics={"a": cast(Any, ONE)}), "metric 'a' is not"),
        (lambda inputs: LossOutput(losses=inputs.logprobs, metrics={"a": cast(Any, (1.0, 2.0))}), "metric 'a' is not"),
        (lambda inputs: LossOutput(losses=inputs.logprobs, metrics={"a": (ONE, inputs.mask)}), "metric 'a' is not"),
    ],
)
def test_a_loss_that_breaks_the_contract_is_refused_when_tried_and_when_used(
    wrong: Callable[[LossInputs], Any], message: str
) -> None:
    (batch,) = micro_batches(sequences()[:2], 2)
    logprobs = logprobs_of(batch)
    with pytest.raises(UserError, match=message):
        objective(wrong, batch, logprobs, torch.zeros_like(logprobs), None)
    with pytest.raises(UserError, match=message):
        try_loss(wrong, torch.device("cpu"))


def test_the_losses_of_the_registry_pass_when_tried() -> None:
    for name in LOSSES:
        try_loss(load_loss(AlgorithmConfig(loss=name)), torch.device("cpu"))


def half_of_it(inputs: LossInputs, *, factor: float = 0.5) -> LossOutput:
    """A user's loss."""
    return LossOutput(losses=factor * inputs.logprobs)


def test_a_loss_is_loaded_by_its_place_with_its_keyword_arguments() -> None:
    (batch,) = micro_batches(sequences()[:1], 1)
    logprobs = logprobs_of(batch)
    loss = load_loss(AlgorithmConfig(loss=f"{__name__}:half_of_it", loss_kwargs={"factor": 2.0}))
    total, _ = objective(loss, batch, logprobs, torch.zeros_like(logprobs), None)
    assert total.item() == pytest.approx(2.0 * 0.25 * logprobs[batch.mask].sum().item())


def test_the_kwargs_of_the_config_reach_the_clipped_loss() -> None:
    (batch,) = micro_batches(sequences()[:1], 1)  # A = 1.5, two tokens of weight 1/4
    current, old = (
        torch.zeros(batch.mask.shape, requires_grad=True),
        torch.full(batch.mask.shape, -1.0),
    )  # a ratio of e: clipped
    loss = load_loss(AlgorithmConfig(loss="ppo_clip", loss_kwargs={"clip_low": 0.2, "clip_high": 0.28}))
    total, _ = objective(loss, batch, current, torch.zeros_like(current), old)
    assert total.item() == pytest.approx(-2 * 0.25 * 1.5 * 1.28)


@pytest.mark.parametrize("name", ["ppo_clipp", "no.such.module:loss", f"{__name__}:no_such_loss", f"{__name__}:math"])
def test_a_loss_that_is_not_there_is_refused_with_its_option(name: str) -> None:
    with pytest.raises(UserError, match=r"^algorithm\.loss: ") as caught:
        load_loss(AlgorithmConfig(loss=name))
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_keyword_that_the_loss_does_not_take_is_refused_when_it_is_loaded() -> None:
    with pytest.raises(UserError, match=r"algorithm\.loss_kwargs.*clip_hihg"):
        load_loss(AlgorithmConfig(loss="ppo_clip", loss_kwargs={"clip_hihg": 0.28}))


@pytest.mark.parametrize("value", [None, "wide", [1]])
def test_a_keyword_of_another_type_is_refused_when_it_is_loaded(value: Any) -> None:
    with pytest.raises(UserError, match=r"^algorithm\.loss_kwargs\.clip_low: .*number"):
        load_loss(AlgorithmConfig.model_construct(loss="ppo_clip", loss_kwargs={"clip_low": value}))
    load_loss(AlgorithmConfig(loss="ppo_clip", loss_kwargs={"clip_low": 1, "dual_clip": None}))
