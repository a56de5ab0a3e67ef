"""Objectives in every layout: the cases that each rank computes, and what they must come to."""

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_rl.algorithms.losses import LossInputs, LossOutput, masked_mean
from megatron_rl.config import Config
from megatron_rl.training.batch import make_batch
from megatron_rl.training.objective import Given
from megatron_rl.training.trainer import Trainer
from megatron_rl.types import Graded, Group, Prompt, Response
from tests.cases.responses import tokens_of
from tests.distributed.data import VOCABULARY, make_groups
from tests.distributed.plain import Gradients, Plain, objective, with_kl_and_entropy

VECTORS = json.loads((Path(__file__).parents[1] / "cases/loss_vectors.json").read_text())
NORMALISATIONS = ("sequence_mean", "token_mean_group", "token_mean_batch", "constant")
MICRO_BATCH_SIZES = (1, 2, 4)
BUDGET = 9
RATIOS = {token: 0.61 + 0.05 * (7 * token % 19) for token in range(VOCABULARY)}
"""By token id, from 0.61 to 1.51: some are clipped on either side."""

MOVED = 1.02

MASKED = {"mask_truncated": True}


@dataclass(frozen=True, kw_only=True)
class Case:
    """An objective on a batch."""

    algorithm: dict[str, Any]
    groups: list[Group]
    micro_batch_size: int = 2
    ratios: dict[int, float] | None = None
    """By token id: of the current to the old policy; None: the old policy is the current one."""

    rollout: dict[str, Any] = field(default_factory=dict)
    expected: Callable[[Plain], Tensor] | None = None
    """The objective of one process; None: the case is compared with the layout of one process alone."""

    loss: float | None = None
    """What it must be; None: that of `expected`."""

    moved: float | None = None
    """All weights are multiplied by this: the policy is not the reference any more."""

    bound: float = 2e-6
    """Largest difference between layouts, relative to the gradient."""


def cases() -> dict[str, Case]:
    """All of them, by name."""
    return (
        _normalisations()
        | _vectors()
        | {
            "a_rank_without_tokens": _case("token_mean_group", make_groups()[2:3], 1, off_policy=False),
            "sequence_level": _of_response("gspo", clip_low=0.1, clip_high=0.1),
            "through_the_sum": _of_response(f"{__name__}:through_the_sum", clip=0.1),
            "kl_and_entropy": Case(
                algorithm={"kl": {"coef": 0.7, "estimator": "k2"}, "entropy_coef": 0.05},
                groups=_graded(make_groups()),
                moved=MOVED,
                bound=1e-5,  # k2's gradient is a small difference of log-probs, and so is its rounding
                expected=lambda policy: with_kl_and_entropy(
                    policy, policy.scaled(1 / MOVED), _graded(make_groups()), kl=0.7, entropy=0.05
                ),
            ),
            "corrected": Case(
                algorithm={**MASKED, "correction": {"level": "sequence", "cap": 1.5}},
                groups=make_groups(),
                bound=1e-5,  # the product of a response's ratios adds up the rounding of its log-probs
            ),
        }
    )


def _graded(groups: list[Group]) -> list[Group]:
    """Those that are graded and finished throughout."""
    return [
        group
        for group in groups
        if len(group.graded_scores) == len(group.responses)
        and all(answer.finish_reason == "stop" for answer in group.responses)
    ]


def _normalisations() -> dict[str, Case]:
    return {
        f"{mode}_{policy}_{size}": _case(mode, make_groups(), size, off_policy=policy == "off_policy")
        for mode in NORMALISATIONS
        for size in MICRO_BATCH_SIZES
        for policy in ("on_policy", "off_policy")
    }


def _case(mode: str, groups: list[Group], size: int, *, off_policy: bool) -> Case:
    ratios = RATIOS if off_policy else None
    return Case(
        algorithm={**MASKED, "normalisation": mode},
        groups=groups,
        micro_batch_size=size,
        ratios=ratios,
        expected=lambda plain: objective(plain, groups, mode, budget=BUDGET, ratios=ratios or {}),
    )


def _of_response(loss: str, **loss_kwargs: float) -> Case:
    """One ratio for a response, whose tokens context parallelism puts on several ranks."""
    mode = "token_mean_group"
    return Case(
        algorithm={**MASKED, "normalisation": mode, "loss": loss, "loss_kwargs": loss_kwargs},
        groups=make_groups(),
        ratios=RATIOS,
        expected=lambda plain: objective(
            plain, make_groups(), mode, budget=BUDGET, ratios=RATIOS, clip=0.1, of_response=True
        ),
    )


def through_the_sum(inputs: LossInputs, *, clip: float) -> LossOutput:
    """A user's loss whose gradient goes through `sequence_sum`: GSPO as its eq. 5 has it, without stop-gradients."""
    lengths = inputs.sequence_sum(inputs.mask.to(inputs.logprobs.dtype)).clamp(min=1)
    ratio = (inputs.sequence_sum(inputs.logprobs - inputs.old_logprobs) / lengths).exp()
    gain = torch.minimum(ratio * inputs.advantages, ratio.clamp(1 - clip, 1 + clip) * inputs.advantages)
    return LossOutput(losses=-gain, metrics={"mine/ratio": masked_mean(ratio, inputs.mask)})


def _vectors() -> dict[str, Case]:
    """The worked-out numbers: loss and its gradient by log-prob, through a real model."""
    common = VECTORS["common_batch"]
    first = _group(0, common["rewards"], common["ratios"], 3)
    second = VECTORS["V6_dapo_two_groups_normaliser"]["group2"]
    higher: dict[str, Any] = {"loss_kwargs": {"clip_low": 0.2, "clip_high": 0.28}}
    entries: dict[str, dict[str, Any]] = {
        "V2_grpo_eps0.2": {"normalisation": "sequence_mean"},
        "V3_drgrpo_eps0.2": {"advantage": "dr_grpo", "normalisation": "constant"},
        "V4_dapo_token_level_0.2_0.28": {"normalisation": "token_mean_group", **higher},
        "V5_rloo_eps0.2": {"advantage": "rloo", "normalisation": "constant"},
    }
    found = {}
    for name, algorithm in entries.items():
        gradient = [value for response in VECTORS[name]["grad_logp"] for value in response]
        found[name] = Case(
            algorithm={"std_eps": 0.0, **algorithm},
            groups=[first[0]],
            ratios=first[1],
            rollout={"max_response_tokens": common["budget_L"]},
            expected=partial(_by_logprob, group=first[0], gradient=gradient),
            loss=VECTORS[name]["loss"],
        )
        on_policy = VECTORS[name].get("on_policy(all r=1)") or VECTORS[name].get("on_policy")
        if on_policy:
            gradient = [value for response in on_policy["grad_logp"] for value in response]
            found[f"{name}_on_policy"] = replace(
                found[name],
                ratios=dict.fromkeys(first[1], 1.0),
                expected=partial(_by_logprob, group=first[0], gradient=gradient),
                loss=on_policy["loss"],
            )
    both = _group(1, second["rewards"], second["ratios"], 13)
    two = VECTORS["V6_dapo_two_groups_normaliser"]
    for name, mode in (
        ("paper_per_group_then_mean_over_questions", "token_mean_group"),
        ("batch_level_token_mean (verl token-mean, TRL dapo)", "token_mean_batch"),
    ):
        found[f"V6_{mode}"] = Case(
            algorithm={"std_eps": 0.0, "normalisation": mode, **higher},
            groups=[first[0], both[0]],
            ratios=first[1] | both[1],
            rollout={"max_response_tokens": 20},
            loss=two[name],
        )
    return found


def _by_logprob(plain: Plain, *, group: Group, gradient: list[float]) -> Tensor:
    """Something whose gradient by each log-prob of the group is as given."""
    logprobs = torch.cat([plain.logprobs(group.prompt.ids, tokens_of(answer).ids) for answer in group.responses])
    return logprobs @ torch.tensor(gradient, dtype=torch.float64)


def _group(index: int, rewards: list[int], ratios: list[list[float]], first: int) -> tuple[Group, dict[int, float]]:
    """A group of these rewards and lengths; tokens of different ratios have different ids, from `first` on."""
    if index == 0:  # every token its own id
        flat = [ratio for response in ratios for ratio in response]
        ids = list(range(first, first + len(flat)))
    else:
        values = sorted({ratio for response in ratios for ratio in response})
        ids = [first + values.index(ratio) for response in ratios for ratio in response]
        flat = [ratio for response in ratios for ratio in response]
    answers, rest = [], list(ids)
    for reward, of_response in zip(rewards, ratios, strict=True):
        taken, rest = rest[: len(of_response)], rest[len(of_response) :]
        response = Response(
            ids=tuple(taken),
            logprobs=(0.0,) * len(taken),
            finish_reason="stop",
            weight_versions=(0,) * len(taken),
        )
        answers.append(Graded.of(response, score=float(reward)))
    prompt = Prompt(index=index, text="", ids=(20, 21, 22)[: 2 + index], answer="")
    return Group(prompt=prompt, responses=tuple(answers)), dict(zip(ids, flat, strict=True))


def compute(trainer: Trainer, config: Config, case: Case) -> float:
    """The case's loss; its gradient is left in the trainer's model."""
    values = config.model_dump()
    for section in ("algorithm", "trainer", "rollout"):
        new = {"trainer": {"micro_batch_size": case.micro_batch_size}}.get(section) or getattr(case, section)
        values[section] = {**values[section], **new}
    values["algorithm"]["updates_per_rollout"] = 1
    trainer.use(Config.model_validate(values))
    with _moved(trainer, case.moved or 1.0):
        (update,) = make_batch(case.groups, trainer.config).updates
        share = trainer.share(update)
        if case.ratios is None:
            (given,) = trainer.given([share])
        else:
            given = [
                Given(sampled=current - _log_ratios(micro.labels, micro.mask, case.ratios))
                for current, micro in zip(trainer.logprobs(share), share, strict=False)
            ]
        return trainer.gradients(share, given).values()["loss/objective"]


@contextmanager
def _moved(trainer: Trainer, factor: float) -> Iterator[None]:
    """The policy with all its weights multiplied, inside."""
    before = [parameter.detach().clone() for parameter in trainer.parameters()]
    with torch.no_grad():
        for parameter in trainer.parameters():
            parameter.mul_(factor)
    yield
    with torch.no_grad():
        for parameter, weights in zip(trainer.parameters(), before, strict=True):
            parameter.copy_(weights)


def _log_ratios(labels: Tensor, mask: Tensor, ratios: dict[int, float]) -> Tensor:
    by_id = torch.zeros(VOCABULARY + 6)
    for token, ratio in ratios.items():
        by_id[token] = math.log(ratio)
    return torch.where(mask, by_id[labels], 0.0)


def expected(plain: Plain) -> dict[str, tuple[Gradients, float]]:
    """For each case that can be computed without us: its gradient, and its loss."""
    found = {}
    for name, case in cases().items():
        if case.expected:
            policy = plain.scaled(case.moved or 1.0)
            total = case.expected(policy)
            found[name] = (policy.gradients(total), float(total.detach()) if case.loss is None else case.loss)
    return found
