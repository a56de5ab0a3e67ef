"""From prompts to the groups of a training batch: dynamic sampling, in prompt order, over the borders of steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from megatron_rl.algorithms.filters import load_filter
from megatron_rl.config import Config
from megatron_rl.data.stream import PromptStream
from megatron_rl.rollout.engine import Sampling
from megatron_rl.rollout.figures import sampling_metrics
from megatron_rl.rollout.leader import Begun, Task, Work
from megatron_rl.rollout.ledger import TRAINING_STREAM, Carried, Draw, Ledger, Plan, Rates
from megatron_rl.rollout.leftover import NOTHING, Leftover, leftover_of, to_json
from megatron_rl.rollout.sampler import GroupSampler, SamplingEndedError
from megatron_rl.telemetry.metrics import MeanMetrics
from megatron_rl.types import Group

AHEAD = 0.75
"""Of the batches that prompts could be drawn ahead for: keep rates vary, and what grows too old is sampled anew."""

ENDS = "the run ends as the last finished step left it, which is saved"


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """What a rollout step gives."""

    groups: tuple[Group, ...]
    """The training batch, in prompt order; fewer than asked for when the rounds ran out."""

    sampled: tuple[Group, ...]
    """All groups that the step is done with, in prompt order: the batch, and those left out before its last one."""

    metrics: MeanMetrics


@dataclass(frozen=True, kw_only=True)
class _Start:
    """What a step begins with; of one that was collected early: how to begin it again and come to the same."""

    position: int
    """Of the stream."""

    leftover: Leftover
    rates: Rates
    rounds: int
    """That were drawn already."""


class Collector:
    """Draws prompts until a batch is full of groups that teach something."""

    def __init__(
        self, sampler: GroupSampler, stream: PromptStream, config: Config, warn: Callable[[str], None]
    ) -> None:
        """Collect from `stream`; `warn` is told, on every rank, when a batch stays short."""
        self.sampler, self.stream, self.config, self.warn = sampler, stream, config, warn
        self.keeps = load_filter(config.algorithm.group_filter)
        self.leftover = NOTHING
        self.rates = Rates()
        self.work = (0, 0)
        """Tokens and responses that the run's engines sampled, whatever became of them."""

        self._engines_lost = 0  # before this step
        self._begun_anew = 0
        self._rounds = 0
        self._start: _Start | None = None  # of the step that is under way, or was collected early
        self._ahead: tuple[int, Rollout] | None = None

    def collect(self, step: int) -> Rollout | None:
        """The groups of rollout step `step`. A collective; the same on every rank.

        With `algorithm.dynamic_sampling` groups that are all right or all wrong are left out and further prompts drawn,
        in at most `rollout.max_rounds` rounds.

        Returns:
            None if all engines were lost before it was done: bring them the weights, and call again.

        Raises:
            SamplingEndedError: an engine was lost too often, too few answers could be graded, or the batch stays short
                and `rollout.when_short` is `raise`.
        """
        rollout: Rollout | None
        if self._ahead and self._ahead[0] == step:
            rollout, self._ahead = self._ahead[1], None
        else:
            rollout = self._collect(step)
        if rollout:
            self._start = None
        return rollout

    def _collect(self, step: int) -> Rollout | None:
        if self.sampler.ledger is None:
            self._start = self._next
            self._begin(step)
        ledger = self.sampler.busy()
        if not self.sampler.go_on():
            return None
        sampled = self.sampler.end(pause=self.config.rollout.partial)
        passed = [sampled.groups[number] for number in range(ledger.passed)]
        self._check_grades(step, passed, sampled.work)
        assert self._start
        all_of_it = leftover_of(ledger, sampled.groups, sampled.begun, first=0)
        self._start = replace(self._start, position=self.stream.position, leftover=all_of_it, rounds=ledger.rounds)
        self.rates = self.rates.after(ledger.completed(0, ledger.passed))
        if ledger.plan.surplus != "cancel":
            self.leftover = leftover_of(ledger, sampled.groups, sampled.begun)
        batch = [sampled.groups[number] for number in ledger.batch]
        wanted = self.config.rollout.prompts_per_step
        if len(batch) < wanted:
            short = f"step {step}: {len(batch)} of {wanted} groups kept in {ledger.rounds} rounds of sampling"
            if ledger.plan.when_short == "raise":
                raise SamplingEndedError(f"rollout.max_rounds: {short}; {ENDS}")
            self.warn(f"{short}; {'training on these' if batch else 'the step trains on nothing'}")
        metrics = sampling_metrics(passed)
        self._add_counts(metrics, step, ledger, sampled.work)
        return Rollout(groups=tuple(batch), sampled=tuple(passed), metrics=metrics)

    def collect_ahead(self, step: int) -> MeanMetrics | None:
        """Collect a later step, which `collect` then gives; as that, but for what it returns."""
        rollout = self._collect(step)
        if rollout is None:
            return None
        self._ahead = step, rollout
        return MeanMetrics()

    @property
    def _next(self) -> _Start:
        """What the next step begins with, or began with. If it is collected already: all that it was made of."""
        return self._start or _Start(
            position=self.stream.position, leftover=self.leftover, rates=self.rates, rounds=self._rounds
        )

    @property
    def everything_left(self) -> Leftover:
        """What this rank has for the next step."""
        return self._next.leftover

    def state(self) -> dict[str, Any]:
        """What the next step depends on, as JSON; the tokens of `everything_left` apart. The same on every rank."""
        begins = self._next
        return {
            "position": begins.position,
            "rates": asdict(begins.rates),
            "rounds": begins.rounds,
            "work": self.work,
            "leftover": to_json(begins.leftover),
        }

    def restore(self, state: Mapping[str, Any], leftover: Leftover) -> None:
        """Go on from `state`."""
        self.stream.position = state["position"]
        self.rates = Rates(**state["rates"])
        self._rounds = state["rounds"]
        self.work = tuple(state["work"])
        self.leftover = leftover

    def _begin(self, step: int) -> None:
        rollout, dynamic = self.config.rollout, self.config.algorithm.dynamic_sampling
        plan = Plan(
            wanted=rollout.prompts_per_step,
            max_rounds=rollout.max_rounds if dynamic else 1,
            when_short=rollout.when_short if dynamic else "train_partial",
            dynamic=dynamic,
            max_ungraded=self.config.rewards.max_ungraded,
            surplus="pause" if rollout.partial else "finish" if rollout.max_staleness else "cancel",
            batches_ahead=AHEAD * rollout.max_staleness,
            engines=self.sampler.wait.group.engines,
            responses=rollout.responses_per_prompt,
        )

        def draw(count: int) -> list[Draw]:
            drawn = self.stream.draw(count)
            if dynamic and ledger.rounds > rollout.max_rounds:
                self.warn(f"step {step}: the batch is not full after {ledger.rounds - 1} rounds; another one is drawn")
            return [Draw(stream=TRAINING_STREAM, position=at, prompt=prompt, step=step) for at, prompt in drawn]

        self._begun_anew = 0
        carried, held, begun = self._fresh_enough(step)
        ledger = Ledger(plan=plan, rates=self.rates, draw=draw, rounds=self._rounds)
        ledger.begin(carried)
        task = Task(
            responses=rollout.responses_per_prompt,
            max_tokens=rollout.max_response_tokens,
            sampling=Sampling(temperature=rollout.temperature),
            seed=self.config.seed,
        )
        self.sampler.begin(ledger, task, keeps=self._teaches, held=held, begun=begun)
        self.leftover, self._rounds = NOTHING, 0

    def _fresh_enough(self, step: int) -> tuple[list[Carried], dict[int, Group], dict[int, Begun]]:
        """What is carried over. Draws that are too old are sampled anew, the finished ones too: to drop these, or only
        these, would be a choice by completion order."""
        carried, held, begun = [], dict(self.leftover.held), dict(self.leftover.begun)
        for one in self.leftover.draws:
            if step - one.draw.step > self.config.rollout.max_staleness:
                position = one.draw.position
                held.pop(position, None)
                begun.pop(position, None)
                self._begun_anew += 1
                one = Carried(draw=replace(one.draw, step=step))
            carried.append(one)
        return carried, held, begun

    def _teaches(self, group: Group) -> bool:
        """Whether a group is trained on: an advantage compares at least two grades."""
        scores = group.graded_scores
        return len(scores) > 1 and (not self.config.algorithm.dynamic_sampling or self.keeps(scores))

    def _check_grades(self, step: int, groups: list[Group], work: Work) -> None:
        answers = sum(len(group.responses) for group in groups)
        ungraded = answers - sum(len(group.graded_scores) for group in groups)
        if ungraded > self.config.rewards.max_ungraded * answers:
            reasons = "; ".join(f"{reason} ({count})" for reason, count in sorted(work.ungraded.items())[:5])
            raise SamplingEndedError(
                f"rewards.max_ungraded: step {step}: {ungraded} of {answers} answers could not be graded: {reasons}; "
                f"{ENDS}"
            )

    def _add_counts(self, metrics: MeanMetrics, step: int, ledger: Ledger, work: Work) -> None:
        batch = ledger.batch
        metrics.add("rollout/rounds", ledger.rounds)
        metrics.add("rollout/groups_kept", len(batch))
        metrics.add("rollout/groups_begun_anew", self._begun_anew)
        metrics.add("rollout/groups_left_over", len(self.leftover.draws))
        for number in batch:
            metrics.add("rollout/staleness", step - ledger.entries[number].draw.step)
        # All that engines did, also for nothing: with stragglers stopped it depends on timing.
        self.work = (self.work[0] + work.tokens, self.work[1] + work.samples)
        metrics.add("work/all_tokens", self.work[0])
        metrics.add("work/all_samples", self.work[1])
        metrics.add("work/tokens", work.tokens)
        metrics.add("work/samples", work.samples)
        metrics.add("work/continued", work.continued)
        metrics.add("work/stopped", work.aborted)
        if ledger.plan.surplus == "cancel":
            metrics.add("work/groups_discarded", sum(one.kept for one in ledger.completed(ledger.passed, None)))
        metrics.add("work/engines_lost", work.engines_lost - self._engines_lost)
        self._engines_lost = work.engines_lost
