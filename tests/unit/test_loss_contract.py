"""Losses of the registry and of users: how they are loaded, tried before a run, and refused."""

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch

from megatron_rl.algorithms.losses import LOSSES, LossInputs, LossOutput, ppo_clip
from megatron_rl.config import AlgorithmConfig
from megatron_rl.errors import UserError
from megatron_rl.training.objective import Objective, load_loss
from tests.cases.micro import logprobs_of, micro_batches, objective, sequences


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
