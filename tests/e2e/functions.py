"""Functions that the recipes of these tests name."""

import math
import random

import torch

from megatron_rl.algorithms.losses import LossInputs, LossOutput, ppo_clip
from megatron_rl.types import Prompt


def signed_loss(inputs: LossInputs, *, scale: float) -> LossOutput:
    """A policy gradient with a scale, and a metric to know it by."""
    one = torch.ones((), device=inputs.logprobs.device)
    return LossOutput(losses=-scale * inputs.advantages * inputs.logprobs, metrics={"loss/scale": (one * scale, one)})


def noisy_loss(inputs: LossInputs) -> LossOutput:
    """`ppo_clip`, each token weighed by chance: what a rank draws must go on where it was."""
    losses = ppo_clip(inputs).losses
    return LossOutput(losses=losses * (1 + torch.rand_like(losses)) * (1 + random.random()))


def last_digit(prompt: Prompt, text: str, finished: bool) -> float:
    """Right if the last character is the answer, however the response got there; fails on one prompt in five."""
    if prompt.index % 5 == 0:
        raise RuntimeError("this grader does not like prompts whose row is divisible by five")
    return float(text[-1:] == prompt.answer)


def spoilt_off_policy(inputs: LossInputs) -> LossOutput:
    """NaN for one group, as soon as the policy is not that which sampled: in the second optimizer step."""
    losses = ppo_clip(inputs).losses
    moved = (inputs.logprobs - inputs.old_logprobs).detach().abs() > 1e-6
    return LossOutput(losses=torch.where(moved & (inputs.group_ids == 5), math.nan, losses))
