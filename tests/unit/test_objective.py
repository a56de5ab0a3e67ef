"""`sum_t w_t l_t` of padded micro-batches and the terms around it: what reaches the loss, what is kept out, and
invariance to the split."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.algorithms.losses import LOSSES, LossInputs, LossOutput, Metrics, ppo_clip, reinforce
from megatron_rl.config import AlgorithmConfig
from megatron_rl.errors import UserError
from megatron_rl.training.logprobs import projected_logprobs, token_logprobs
from megatron_rl.training.micro_batches import Place, share_of_rank
from megatron_rl.training.objective import Given, Objective, load_loss
from megatron_rl.types import MicroBatch, TrainedResponse
from tests.cases.group import group_of_one


def sequences() -> list[TrainedResponse]:
    """Five responses of uneven lengths behind uneven prompts."""
    return [
        TrainedResponse(
            prompt_ids=tuple(range(prompt)),
            response_ids=tuple(range(10 * number, 10 * number + length)),
            rollout_logprobs=tuple(-0.1 * (position + number) for position in range(length)),
            advantage=advantage,
            weight=weight,
            group=number // 2,
            number=number,
        )
        for number, (prompt, length, advantage, weight) in enumerate(
            [(1, 2, 1.5, 0.25), (3, 4, -0.5, 0.125), (2, 1, -0.5, 0.5), (4, 3, -2.0, 0.0625), (1, 6, 0.75, 0.375)]
        )
    ]


def micro_batches(of: list[TrainedResponse], size: int, multiple: int = 1) -> list[MicroBatch]:
    """Packed; `multiple`: the tokens of a micro-batch are padded to it."""
    return list(share_of_rank(of, Place(tensor_ranks=multiple), micro_batch_size=size))


def objective(
    loss: Callable[[LossInputs], Any],
    batch: MicroBatch,
    logprobs: Tensor,
    *,
    entropies: Tensor | None = None,
    sampled: Tensor | None = None,
    reference: Tensor | None = None,
    first: bool = True,
    **algorithm: Any,
) -> tuple[Tensor, Metrics]:
    """Of one micro-batch with these switches; entropies are 0 unless given."""
    entropies = torch.zeros_like(logprobs) if entropies is None else entropies
    one = Objective(loss=loss, algorithm=AlgorithmConfig(**algorithm))
    return one(batch, logprobs, entropies, Given(sampled=sampled, reference=reference), first=first)


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
    one = TrainedResponse(
        prompt_ids=(5, 6), response_ids=(1,), rollout_logprobs=(-0.25,), advantage=1.0, weight=0.5, group=0, number=0
    )
    other = replace(one, response_ids=(2, 3, 4), rollout_logprobs=(-0.5, -1.0, -2.0))
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


@pytest.mark.parametrize("name", ["policy/entropy", "loss/objective", "mismatch/logprob_abs"])
def test_a_metric_whose_name_is_taken_is_refused(name: str) -> None:
    (batch,) = micro_batches(sequences()[:2], 2)
    logprobs = logprobs_of(batch)

    def own(inputs: LossInputs) -> LossOutput:
        return LossOutput(losses=inputs.logprobs, metrics={name: (torch.ones(()), torch.ones(()))})

    with pytest.raises(UserError, match=name):
        objective(own, batch, logprobs)


def test_metrics_of_a_loss_go_with_the_others() -> None:
    (batch,) = micro_batches(sequences()[:2], 2)
    logprobs = logprobs_of(batch)

    def own(inputs: LossInputs) -> LossOutput:
        return LossOutput(losses=inputs.logprobs, metrics={"loss/mine": (torch.tensor(3.0), torch.ones(()))})

    _, metrics = objective(own, batch, logprobs)
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
        objective(wrong, batch, logprobs)
    with pytest.raises(UserError, match=message):
        Objective(loss=wrong, algorithm=AlgorithmConfig()).try_out(torch.device("cpu"))


def test_the_losses_of_the_registry_pass_when_tried() -> None:
    for name in LOSSES:
        algorithm = AlgorithmConfig(loss=name)
        Objective(loss=load_loss(algorithm), algorithm=algorithm).try_out(torch.device("cpu"))


def test_a_clip_that_makes_no_sense_is_refused_when_tried() -> None:
    algorithm = AlgorithmConfig(loss="gspo", loss_kwargs={"clip_low": 2.0})
    with pytest.raises(UserError, match=r"^algorithm\.loss: gspo: ValueError: clip_low must be in 0\.\.1, got 2\.0"):
        Objective(loss=load_loss(algorithm), algorithm=algorithm).try_out(torch.device("cpu"))


def of_a_reference(inputs: LossInputs) -> LossOutput:
    return LossOutput(losses=inputs.logprobs - inputs.reference_logprobs)  # type: ignore[operator]


def of_entropies(inputs: LossInputs) -> LossOutput:
    return LossOutput(losses=-inputs.entropies)


@pytest.mark.parametrize(
    ("loss", "switches", "message"),
    [
        (of_a_reference, {"kl": {"coef": 0.1, "place": "reward"}}, r"TypeError: unsupported .* \(.*\.py:\d+\)$"),
        (of_a_reference, {}, "TypeError"),
        (of_entropies, {}, "carry no gradient"),
    ],
)
def test_a_loss_is_tried_with_what_training_will_give_it(
    loss: Callable[[LossInputs], LossOutput], switches: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        Objective(loss=loss, algorithm=AlgorithmConfig(**switches)).try_out(torch.device("cpu"))
    fitting = AlgorithmConfig(kl={"coef": 0.1}, entropy_gradient=True)  # type: ignore[arg-type]
    Objective(loss=loss, algorithm=fitting).try_out(torch.device("cpu"))


@pytest.mark.parametrize(
    "switches",
    [
        {"kl": {"coef": 0.1}, "entropy_coef": 0.1, "correction": {"level": "sequence", "mode": "mask"}},
        {"kl": {"coef": 0.1, "estimator": "k1", "place": "reward"}, "entropy_gradient": True},
    ],
)
def test_the_terms_around_a_loss_are_tried_with_it(switches: dict[str, Any]) -> None:
    Objective(loss=ppo_clip, algorithm=AlgorithmConfig(**switches)).try_out(torch.device("cpu"))


def half_of_it(inputs: LossInputs, *, factor: float = 0.5) -> LossOutput:
    """A user's loss."""
    return LossOutput(losses=factor * inputs.logprobs)


def test_a_loss_is_loaded_by_its_place_with_its_keyword_arguments() -> None:
    (batch,) = micro_batches(sequences()[:1], 1)
    logprobs = logprobs_of(batch)
    loss = load_loss(AlgorithmConfig(loss=f"{__name__}:half_of_it", loss_kwargs={"factor": 2.0}))
    total, _ = objective(loss, batch, logprobs)
    assert total.item() == pytest.approx(2.0 * 0.25 * logprobs[batch.mask].sum().item())


def test_the_kwargs_of_the_config_reach_the_clipped_loss() -> None:
    (batch,) = micro_batches(sequences()[:1], 1)  # A = 1.5, two tokens of weight 1/4
    current, old = (
        torch.zeros(batch.mask.shape, requires_grad=True),
        torch.full(batch.mask.shape, -1.0),
    )  # a ratio of e: clipped
    loss = load_loss(AlgorithmConfig(loss="ppo_clip", loss_kwargs={"clip_low": 0.2, "clip_high": 0.28}))
    total, _ = objective(loss, batch, current, sampled=old)
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


# ---- the terms around a loss: of every trained token, its weight, advantage, and log-probs, made up by its label


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
        for label, logprob in zip(one.response_ids, one.rollout_logprobs, strict=True)
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
        together = sum(map(sampled_of, one.response_ids)) - sum(one.rollout_logprobs)
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
    logprobs, entropies, _ = token_logprobs(
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


class Own:
    """No type that pydantic can check."""


def hinted(inputs: "NotImported", *, scale: Own = 2.0) -> LossOutput:  # type: ignore[name-defined, assignment]  # noqa: F821
    """As under `if TYPE_CHECKING: from ... import NotImported`."""
    return LossOutput(losses=float(scale) * inputs.logprobs)  # type: ignore[arg-type]


def test_hints_that_can_not_be_checked_are_let_be() -> None:
    loss = load_loss(AlgorithmConfig(loss=f"{__name__}:hinted", loss_kwargs={"scale": 3}))
    Objective(loss=loss, algorithm=AlgorithmConfig()).try_out(torch.device("cpu"))


def test_a_number_that_yaml_made_a_string_reaches_the_loss_as_a_number() -> None:
    loss = load_loss(AlgorithmConfig(loss="ppo_clip", loss_kwargs={"clip_low": "0.2"}))
    Objective(loss=loss, algorithm=AlgorithmConfig()).try_out(torch.device("cpu"))


@pytest.mark.parametrize("name", ["batch/reward", "train/grad_norm", "share_this/mine", "eval/accuracy"])
def test_a_metric_of_another_part_of_the_run_is_not_a_losss_to_add_to(name: str) -> None:
    def own(inputs: LossInputs) -> LossOutput:
        return LossOutput(losses=inputs.logprobs, metrics={name: (torch.ones(()), torch.ones(()))})

    with pytest.raises(UserError, match="whose name is taken"):
        Objective(loss=own, algorithm=AlgorithmConfig()).try_out(torch.device("cpu"))


def test_a_label_is_likeliest_where_no_allowed_token_is_likelier(group: dist.ProcessGroup) -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, 9.0], [0.0, 2.0, 1.0, 9.0], [1.0, 1.0, 0.0, 9.0]])  # the last one is banned
    _, _, likeliest = token_logprobs(logits, torch.tensor([1, 2, 0]), temperature=0.5, vocabulary=3, group=group)
    assert likeliest.tolist() == [True, False, True]


@pytest.mark.parametrize("chunk", [1, 2, 5, 99])
@pytest.mark.parametrize("entropy_gradient", [False, True])
def test_log_probs_from_hidden_states_in_chunks_are_those_of_all_logits(
    chunk: int, entropy_gradient: bool, group: dist.ProcessGroup
) -> None:
    draw = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(size, generator=draw).double().requires_grad_() for size in ((5, 3), (7, 3)))
    labels, probe = torch.tensor([0, 5, 2, 2, 4]), torch.randn(2, 5, generator=draw).double()
    options = {"temperature": 0.7, "vocabulary": 6, "entropy_gradient": entropy_gradient}
    whole = token_logprobs(hidden @ weight.t(), labels, group=group, **options)  # type: ignore[arg-type]
    parts = projected_logprobs(hidden, weight, labels, chunk=chunk, group=group, **options)  # type: ignore[arg-type]
    found = []
    for logprobs, entropies, _ in (whole, parts):
        total = (probe[0] * logprobs).sum() + ((probe[1] * entropies).sum() if entropy_gradient else 0)
        found.append(torch.autograd.grad(total, (hidden, weight)))
    for one, other in ((whole, parts), found):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
