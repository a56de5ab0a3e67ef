"""`sum_t w_t l_t` of packed micro-batches: what reaches the loss, what is kept out, and invariance to the split."""

import math
from dataclasses import replace

import pytest
import torch

from megatron_rl.algorithms.losses import LossInputs, LossOutput, Metrics, ppo_clip
from megatron_rl.types import TrainedResponse
from tests.cases.micro import logprobs_of, micro_batches, objective, sequences
from tests.cases.responses import tokens_of, trained_response


def total_and_gradients(of: list[TrainedResponse], size: int, multiple: int = 1) -> tuple[float, dict[int, float]]:
    """The objective over all micro-batches, and its gradient by label (labels are distinct)."""
    total, gradients = 0.0, dict[int, float]()
    for batch in micro_batches(of, size, multiple):
        logprobs = logprobs_of(batch)
        old = torch.where(batch.mask, -1.2, math.nan)
        loss, _ = objective(ppo_clip, batch, logprobs, sampled=old)
        loss.backward()
        assert logprobs.grad is not None
        assert logprobs.grad[~batch.mask].eq(0).all()
        total += loss.item()
        gradients |= dict(zip(batch.labels[batch.mask].tolist(), logprobs.grad[batch.mask].tolist(), strict=True))
    return total, gradients


def test_it_is_the_weighted_sum_worked_out_token_by_token() -> None:
    expected = 0.0
    for sequence in sequences():
        for label in tokens_of(sequence).ids:
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

    total, _ = objective(poisoned, batch, logprobs)
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

    total, metrics = objective(careless, batch, logprobs, entropies=entropies, sampled=old)
    total.backward()
    assert total.isfinite()
    assert logprobs.grad is not None
    assert logprobs.grad[~batch.mask].eq(0).all()
    assert logprobs.grad[batch.mask].isfinite().all()
    assert logprobs.grad[batch.mask].ne(0).all()
    assert all(value.isfinite() for pair in metrics.values() for value in pair)


MISMATCH = ("logprob_abs", "kl", "ratio", "ratio_square", "above_cap", "sequence_above_cap")


def test_a_batch_of_padding_alone_gives_zero_and_a_gradient_of_zero() -> None:
    (batch,) = micro_batches([], 2)
    logprobs = torch.full(batch.mask.shape, math.nan, requires_grad=True)
    total, metrics = objective(ppo_clip, batch, logprobs, entropies=torch.full_like(logprobs, math.nan))
    total.backward()
    assert total.item() == 0.0
    assert logprobs.grad is not None
    assert logprobs.grad.eq(0).all()
    assert {name: (s.item(), w.item()) for name, (s, w) in metrics.items() if name != "loss/objective"} == {
        "policy/entropy": (0, 0),
        "policy/logprob": (0, 0),
        **{f"mismatch/{name}": (0, 0) for name in MISMATCH},
        "loss/clip_fraction": (0, 0),
        "loss/ratio": (0, 0),
    }


def test_a_loss_sees_groups_entropies_and_the_reference_at_their_tokens() -> None:
    (batch,) = micro_batches(sequences()[:4], 4, multiple=5)
    logprobs, seen = logprobs_of(batch), list[LossInputs]()

    def spy(inputs: LossInputs) -> LossOutput:
        seen.append(inputs)
        return LossOutput(losses=inputs.logprobs)

    entropies = torch.where(batch.mask, batch.labels / 64.0, math.nan).requires_grad_()
    reference = torch.where(batch.mask, -batch.labels / 32.0, math.nan)
    objective(spy, batch, logprobs, entropies=entropies, reference=reference, kl={"coef": 0.5})
    objective(spy, batch, logprobs, entropies=entropies)
    with_reference, without = seen
    mask, labels = batch.mask.flatten(), batch.labels.flatten()
    # Labels are ten times the response's number and up; groups hold two responses.
    assert with_reference.group_ids.tolist() == torch.where(mask, labels // 20, -1).tolist()
    assert with_reference.entropies.tolist() == torch.where(mask, labels / 64.0, 0.0).tolist()
    assert with_reference.entropies.requires_grad
    assert with_reference.reference_logprobs is not None
    assert with_reference.reference_logprobs.tolist() == torch.where(mask, -labels / 32.0, 0.0).tolist()
    assert without.reference_logprobs is None


def test_what_a_loss_sees_lies_at_the_tokens_it_belongs_to() -> None:
    (batch,) = micro_batches(sequences()[:3], 4, multiple=5)
    seen: list[LossInputs] = []

    def spy(inputs: LossInputs) -> LossOutput:
        seen.append(inputs)
        return LossOutput(losses=inputs.logprobs)

    logprobs = logprobs_of(batch)
    objective(spy, batch, logprobs)
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

    total, _ = objective(sequence_level, batch, logprobs)
    total.backward()
    assert logprobs.grad is not None
    # Each of n tokens has loss S with weight w, and S holds each token once: n w for every token.
    assert logprobs.grad[batch.mask].tolist() == [4 * 0.125] * 4 + [2 * 0.25] * 2


def test_metrics_are_token_sums() -> None:
    one, other = (
        trained_response(
            prompt_ids=(5, 6), response_ids=ids, rollout_logprobs=engine, advantage=1.0, weight=0.5, group=0, number=0
        )
        for ids, engine in (((1,), (-0.25,)), ((2, 3, 4), (-0.5, -1.0, -2.0)))
    )
    (batch,) = micro_batches([one, other], 2)
    logprobs = torch.where(batch.mask, -1.0, math.nan).requires_grad_()
    entropies = torch.full_like(logprobs, math.nan)
    entropies[batch.response_ids == 0] = 0.0  # the longer one
    entropies[batch.response_ids == 1] = 1.0
    old = torch.where(batch.mask, -1.5, math.nan)
    total, metrics = objective(ppo_clip, batch, logprobs, entropies=entropies, sampled=old)
    found = {name: (s.item(), w.item()) for name, (s, w) in metrics.items()}
    assert found["policy/entropy"] == (1.0, 4)  # a token mean of 0.25; the mean of answers is 0.5
    assert found["policy/logprob"] == (-4.0, 4)
    # Between the trainer's log-probs with the weights that sampled, −1.5, and what the engine reported.
    assert found["mismatch/logprob_abs"] == (pytest.approx(1.25 + 1.0 + 0.5 + 0.5), 4)
    assert found["loss/objective"] == (pytest.approx(total.item()), 1)
    assert not metrics["loss/objective"][0].requires_grad


def mismatches(metrics: Metrics) -> dict[str, tuple[float, float]]:
    return {
        name.removeprefix("mismatch/"): (total.item(), weight.item())
        for name, (total, weight) in metrics.items()
        if name.startswith("mismatch/")
    }


def test_in_the_first_update_the_mismatch_is_that_of_the_current_policy() -> None:
    (batch,) = micro_batches(sequences()[:2], 2)
    logprobs = logprobs_of(batch)
    found = mismatches(objective(ppo_clip, batch, logprobs)[1])
    gaps = (logprobs.detach() - batch.rollout_logprobs)[batch.mask].tolist()
    assert set(found) == set(MISMATCH)
    assert found["logprob_abs"] == (pytest.approx(sum(map(abs, gaps))), 6)
    assert found["ratio"] == (pytest.approx(sum(map(math.exp, gaps))), 6)


def test_in_later_updates_it_is_that_of_the_weights_that_sampled() -> None:
    (batch,) = micro_batches(sequences()[:2], 2)
    logprobs, sampled = logprobs_of(batch), torch.where(batch.mask, batch.rollout_logprobs + 0.25, math.nan)
    found = mismatches(objective(ppo_clip, batch, logprobs, sampled=sampled, first=False)[1])
    assert found == {
        "logprob_abs": (pytest.approx(6 / 4), 6),
        "kl": (pytest.approx(6 * (math.exp(0.25) - 1.25)), 6),
        "ratio": (pytest.approx(6 * math.exp(0.25)), 6),
        "ratio_square": (pytest.approx(6 * math.exp(0.5)), 6),
        "above_cap": (0, 6),
        "sequence_above_cap": (4, 6),  # four tokens of e^¼: above 2; two: not
    }


def test_the_shares_above_the_cap_are_of_the_corrections_cap() -> None:
    (batch,) = micro_batches(sequences()[:2], 2)
    logprobs, sampled = logprobs_of(batch), torch.where(batch.mask, batch.rollout_logprobs + 0.25, math.nan)
    caps = {"token": 1.2, "sequence": 1.6}  # e^¼ is 1.28 and e^½ 1.65
    for cap, tokens in ((caps["token"], 6), (caps["sequence"], 0)):
        correction = {"level": "token", "cap": cap}
        found = mismatches(objective(ppo_clip, batch, logprobs, sampled=sampled, correction=correction)[1])
        assert (found["above_cap"], found["sequence_above_cap"]) == ((tokens, 6), (6, 6))


def test_with_the_engines_logprobs_as_old_ones_it_is_measured_where_it_is_known() -> None:
    (batch,) = micro_batches(sequences()[:2], 2)
    logprobs, seen = logprobs_of(batch), list[LossInputs]()

    def spy(inputs: LossInputs) -> LossOutput:
        seen.append(inputs)
        return LossOutput(losses=inputs.logprobs)

    first, later = (objective(spy, batch, logprobs, first=one, old_logprobs="rollout")[1] for one in (True, False))
    assert set(mismatches(first)) == set(MISMATCH)
    assert mismatches(later) == {}  # the weights are other ones, and nobody computed those that sampled
    for inputs in seen:
        assert torch.equal(inputs.old_logprobs, inputs.rollout_logprobs)


def test_old_logprobs_of_a_later_update_must_be_given() -> None:
    (batch,) = micro_batches(sequences()[:2], 2)
    with pytest.raises(RuntimeError, match="old log-probs of a later optimizer step"):
        objective(ppo_clip, batch, logprobs_of(batch), first=False)
