"""avg@k: the share of right answers among k samples to each held-out prompt."""

from collections.abc import Sequence

from megatron_rl.config import Config
from megatron_rl.rollout.engine import Sampling
from megatron_rl.rollout.figures import sampling_metrics
from megatron_rl.rollout.sampler import EVALUATION_STREAM, Draw, GroupSampler
from megatron_rl.telemetry.metrics import MeanMetrics
from megatron_rl.types import Prompt


def evaluate(sampler: GroupSampler, prompts: Sequence[Prompt], config: Config) -> MeanMetrics:
    """Sample and grade every prompt. A collective.

    The seeds do not depend on the step, so two evaluations of the same weights are the same.

    Returns:
        `eval/accuracy` (avg@k), `eval/length`, `eval/length_right`, `eval/length_wrong`, ...
    """
    draws = [Draw(place=(EVALUATION_STREAM, 0, row), prompt=prompt) for row, prompt in enumerate(prompts)]
    groups = sampler.sample(
        draws,
        responses=config.evaluation.samples_per_prompt,
        max_tokens=config.rollout.max_response_tokens,
        sampling=Sampling(
            temperature=config.evaluation.temperature,
            greedy=config.evaluation.greedy,
            top_p=config.evaluation.top_p,
        ),
    )
    return sampling_metrics(groups, "eval")
