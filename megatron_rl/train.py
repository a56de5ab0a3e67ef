"""The main job, one step after another. Every rank runs this."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

from megatron_rl.config import Config
from megatron_rl.evaluation.heldout import evaluate
from megatron_rl.rollout.sampler import SamplingEndedError
from megatron_rl.run import Run
from megatron_rl.telemetry.metrics import MeanMetrics
from megatron_rl.training.batch import make_batch

T = TypeVar("T")


def train(config: Config) -> bool:
    """Run (or go on with) the job that `config` describes.

    Returns:
        Whether all steps are done; False when it was asked to stop and should be started again.
    """
    with Run(config) as run:
        run.resume()
        evaluate_if_due(run)

        while run.step < config.steps:
            if run.asked_to_stop():
                run.save()
                run.saver.wait()
                return False
            step = run.step + 1

            # prompts → responses → rewards → groups kept
            rollout, metrics = with_engines(run, step, partial(run.collector.collect, step))
            metrics.merge(rollout.metrics)

            if rollout.groups:
                with run.phases.enter("train"):
                    kl = run.kl_of_responses(rollout.groups)  # None unless it is taken from the reward
                    run.keep_batch(step, rollout, kl)
                    batch = make_batch(rollout.groups, config, kl)  # advantages, loss weights, optimizer steps
                    metrics.merge(batch.metrics)
                    metrics.merge(run.trainer.train(batch))  # micro-batches → log-probs → loss → optimizer
            if config.rollout.async_steps and step < config.steps:  # ranks that only sample come here at once
                ahead, finish = partial(run.collector.collect_ahead, step + 1), partial(run.finish_step, step, rollout)
                with_engines(run, step + 1, ahead, sync=False, before_saving=partial(finish, metrics))

            run.finish_step(step, rollout, metrics)
            evaluate_if_due(run)
            if run.checkpoint_due():
                run.save()

        run.saver.wait()
        run.export()
        return True


def sync_weights(run: Run) -> None:
    """Trainer's layout → engines' layout, unless the engines have the current weights."""
    if not run.engines_are_current:
        with run.phases.enter("sync"):
            run.push_weights()


def with_engines(
    run: Run,
    step: int,
    act: Callable[[], T | None],
    *,
    sync: bool = True,
    before_saving: Callable[[], None] = lambda: None,
) -> tuple[T, MeanMetrics]:
    """What `act` gives with engines that have the current weights; it gives None when all of them were lost meanwhile.

    Also how engines and trainer agree. An engine that was lost is started again by its leader, and gets its weights
    with the others'. Without `sync` engines have weights that they are to go on with. When sampling can't go on
    the run is saved, after `before_saving`, which makes it one between two steps.
    """
    parity = MeanMetrics()
    while True:
        if sync:
            sync_weights(run)
        with run.phases.enter("rollout"):
            try:
                if sync:
                    parity = run.parity.check(step)  # engine and trainer agree, or the run ends
                result = act()
            except SamplingEndedError:
                before_saving()
                run.save()
                run.saver.wait()
                raise
        if result is not None:
            return result, parity
        sync = True
        run.parity.version = -1  # whatever they had
        with run.phases.enter("train"):
            run.progress.say("all engines were lost; they are started again and get the weights once more")


def evaluate_if_due(run: Run) -> None:
    """avg@k of the current weights, if there are held-out prompts."""
    if run.evaluation_due():
        metrics, parity = with_engines(run, run.step, lambda: evaluate(run.sampler, run.heldout, run.config))
        metrics.merge(parity)
        run.log_evaluation(metrics)
