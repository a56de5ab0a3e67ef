"""Group advantages: what makes an answer better than the other answers to the same prompt."""

import torch
from torch import Tensor

from megatron_rl.errors import UserError
from megatron_rl.functions import load_function

ESTIMATORS = ("grpo", "dr_grpo", "rloo", "reinforce_plus_plus_baseline", "opo")


def group_advantages(
    rewards: Tensor,
    group_ids: Tensor,
    *,
    estimator: str,
    std_ddof: int = 1,
    std_eps: float = 1e-6,
    lengths: Tensor | None = None,
) -> Tensor:
    """Advantage of each response within its group.

    A group whose rewards are all equal gets exactly 0 (no float noise divided by a tiny deviation); an ungraded
    response (NaN) leaves its group's statistics and gets 0; groups are told apart by id, in any order, of any size.

    Args:
        rewards: `[responses]`, NaN where ungraded.
        group_ids: `[responses]`, integers.
        estimator: `grpo` (r − mean)/(std + eps), DeepSeekMath eq. 3; `dr_grpo` r − mean, Liu et al. (2025);
            `rloo` r − mean of the others, Ahmadian et al. (2024); `reinforce_plus_plus_baseline` (r − mean)/(std + eps)
            with the deviation of r − mean over all responses given, Hu et al. (2025); `opo` r − mean weighted by
            length, Hao et al. (2025); or `package.module:function`, called as `function(rewards, group_ids, lengths)`.
        std_ddof: 1 divides the variance by n − 1 (verl, TRL, OpenRLHF), 0 by n (Megatron-LM).
        std_eps: added to the standard deviation.
        lengths: of the responses in tokens, `[responses]`; `opo` needs them.

    Returns:
        `[responses]`, float64.

    Raises:
        ValueError: unknown estimator; a group of one graded response with `rloo`, which needs others; `opo` without
            lengths.
        UserError: there is no such function, or it returned another shape or something that is not finite.
    """
    rewards = rewards.double()
    if ":" in estimator:
        return _by_function(estimator, rewards, group_ids, lengths)
    if estimator not in ESTIMATORS:
        raise ValueError(
            f"unknown advantage estimator {estimator!r}: one of {', '.join(ESTIMATORS)}, or module:function"
        )
    if estimator == "opo" and lengths is None:
        raise ValueError("advantage estimator 'opo' weighs rewards by length: it needs lengths")
    advantages = torch.zeros_like(rewards)
    for group in group_ids.unique():
        members = ((group_ids == group) & ~rewards.isnan()).nonzero().squeeze(1)
        if len(members) == 1 and estimator == "rloo":
            raise ValueError(f"group {int(group)} has one graded response: rloo needs the rewards of others")
        graded = rewards[members]
        if len(members) < 2 or graded.max() == graded.min():
            continue
        if estimator == "opo" and lengths is not None:
            weights = lengths[members].double()
            advantages[members] = graded - (weights * graded).sum() / weights.sum()
            continue
        centred = graded - graded.mean()
        if estimator == "grpo":
            centred = centred / (graded.std(correction=std_ddof) + std_eps)
        elif estimator == "rloo":
            centred = centred * (len(members) / (len(members) - 1))
        advantages[members] = centred
    if estimator == "reinforce_plus_plus_baseline" and advantages.any():
        advantages = advantages / (advantages[~rewards.isnan()].std(correction=std_ddof) + std_eps)
    return advantages


def _by_function(name: str, rewards: Tensor, group_ids: Tensor, lengths: Tensor | None) -> Tensor:
    found = load_function(name, "algorithm.advantage")(rewards.clone(), group_ids, lengths)  # it may work in place
    if not isinstance(found, Tensor) or found.shape != rewards.shape:
        raise UserError(f"algorithm.advantage: {name} did not return one number for each of {len(rewards)} responses")
    advantages = torch.where(rewards.isnan(), 0.0, found.double())
    if not advantages.isfinite().all():
        raise UserError(f"algorithm.advantage: {name} returned {float(advantages[~advantages.isfinite()][0])}")
    return advantages
