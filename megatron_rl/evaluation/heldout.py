"""avg@k: the share of right answers among k samples to each held-out prompt."""

from collections.abc import Sequence

from megatron_rl.config import Config
from megatron_rl.rollout.engine import Sampling
from megatron_rl.rollout.figures import sampling_metrics
from megatron_rl.rollout.leader import Task
from megatron_rl.rollout.ledger import EVALUATION_STREAM, Draw, Ledger, Plan, Rates
from megatron_rl.rollout.sampler import GroupSampler
from megatron_rl.telemetry.metrics import MeanMetrics
from megatron_rl.types import Prompt


def evaluate(sampler: GroupSampler, prompts: Sequence[Prompt], config: Config) -> MeanMetrics | None:
    """Sample and grade every prompt. A collective.

    The seeds do not depend on the step, so two evaluations of the same weights are the same.

    Returns:
        `eval/accuracy` (avg@k), `eval/length`, `eval/length_right`, `eval/length_wrong`, ...; None if all engines were
        lost before it was done: bring them the weights, and call again.
    """
    if sampler.ledger is None:
        options = config.evaluation
        plan = Plan(wanted=None, engines=sampler.wait.group.engines, responses=options.samples_per_prompt)
        ledger = Ledger(plan=plan, rates=Rates(), draw=lambda count: ())
        ledger.begin(draws=[Draw(stream=EVALUATION_STREAM, position=n, prompt=one) for n, one in enumerate(prompts)])
        task = Task(
            responses=options.samples_per_prompt,
            max_tokens=config.rollout.max_response_tokens,
            sampling=Sampling(temperature=options.temperature, greedy=options.greedy, top_p=options.top_p),
            seed=config.seed,
        )
        sampler.begin(ledger, task, keeps=lambda group: True)
    if not sampler.go_on():
        return None
    return sampling_metrics(list(sampler.end().groups.values()), "eval")
