"""Group advantages: what makes an answer better than the other answers to the same prompt."""

import torch
from torch import Tensor


def group_advantages(
    rewards: Tensor, group_ids: Tensor, *, estimator: str, std_ddof: int = 1, std_eps: float = 1e-6
) -> Tensor:
    """Advantage of each response within its group.

    A group whose rewards are all equal gets exactly 0 (no float noise divided by a tiny deviation); an ungraded
    response (NaN) leaves its group's statistics and gets 0; groups are told apart by id, in any order, of any size.

    Args:
        rewards: `[responses]`, NaN where ungraded.
        group_ids: `[responses]`, integers.
        estimator: `grpo` (r − mean)/(std + eps), DeepSeekMath eq. 3; `dr_grpo` r − mean, Liu et al. (2025);
            `rloo` r − mean of the others, Ahmadian et al. (2024).
        std_ddof: 1 divides the variance by n − 1 (verl, TRL, OpenRLHF), 0 by n (Megatron-LM).
        std_eps: added to the standard deviation.

    Returns:
        `[responses]`, float64.

    Raises:
        ValueError: unknown estimator, or a group of one graded response with `rloo`, which needs others.
    """
    if estimator not in ("grpo", "dr_grpo", "rloo"):
        raise ValueError(f"unknown advantage estimator {estimator!r}: grpo, dr_grpo or rloo")
    rewards = rewards.double()
    advantages = torch.zeros_like(rewards)
    for group in group_ids.unique():
        members = ((group_ids == group) & ~rewards.isnan()).nonzero().squeeze(1)
        if len(members) == 1 and estimator == "rloo":
            raise ValueError(f"group {int(group)} has one graded response: rloo needs the rewards of others")
        graded = rewards[members]
        if len(members) < 2 or graded.max() == graded.min():
            continue
        centred = graded - graded.mean()
        if estimator == "grpo":
            centred = centred / (graded.std(correction=std_ddof) + std_eps)
        elif estimator == "rloo":
            centred = centred * (len(members) / (len(members) - 1))
        advantages[members] = centred
    return advantages
