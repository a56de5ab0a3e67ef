"""Functions that the recipes of these tests name."""

import torch

from megatron_rl.algorithms.losses import LossInputs, LossOutput
from megatron_rl.types import Prompt


def signed_loss(inputs: LossInputs, *, scale: float) -> LossOutput:
    """A policy gradient with a scale, and a metric to know it by."""
    one = torch.ones((), device=inputs.logprobs.device)
    return LossOutput(losses=-scale * inputs.advantages * inputs.logprobs, metrics={"loss/scale": (one * scale, one)})


def last_digit(prompt: Prompt, text: str, finished: bool) -> float:
    """Right if the last character is the answer, however the response got there; fails on one prompt in five."""
    if prompt.index % 5 == 0:
        raise RuntimeError("this grader does not like prompts whose row is divisible by five")
    return float(text[-1:] == prompt.answer)
