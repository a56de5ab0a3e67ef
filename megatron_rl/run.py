"""What a run is made of, how it starts, is resumed, stops, and what it writes down."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import TypeVar, cast

import torch
import torch.distributed as dist

from megatron_rl.config import Config
from megatron_rl.config_files import dump_config
from megatron_rl.data.stream import PromptStream
from megatron_rl.doubts import doubts
from megatron_rl.errors import UserError
from megatron_rl.files import replace_text
from megatron_rl.inputs import Inputs, read_inputs
from megatron_rl.phases import Phases
from megatron_rl.resharding.hf_files import write_hf
from megatron_rl.resharding.sides import engine_group
from megatron_rl.resharding.sync import WeightSync
from megatron_rl.rewards.pool import GraderPool
from megatron_rl.rollout.collector import Collector, Rollout
from megatron_rl.rollout.delivery import ALL, bring_groups, deliver
from megatron_rl.rollout.engine import Engine
from megatron_rl.rollout.engines import NoEngine, make_engine
from megatron_rl.rollout.leftover import Leftover, write_tokens
from megatron_rl.rollout.leftover import read as read_leftover
from megatron_rl.rollout.parity import make_parity
from megatron_rl.rollout.sampler import GroupSampler
from megatron_rl.rollout.waiting import EngineWait
from megatron_rl.run_dir import RunLock
from megatron_rl.stopping import StopWish
from megatron_rl.telemetry.metrics import MeanMetrics
from megatron_rl.telemetry.progress import Progress
from megatron_rl.telemetry.writer import RunWriter
from megatron_rl.training import cpu, setup
from megatron_rl.training.checkpoint import (
    RunState,
    latest_checkpoint,
    load_checkpoint,
    read_run_state,
    save_checkpoint,
    unfinished,
)
from megatron_rl.training.elsewhere import TrainerElsewhere
from megatron_rl.training.implementation import choose
from megatron_rl.training.objective import Objective
from megatron_rl.training.sharing import Sharing
from megatron_rl.training.trainer import Trainer
from megatron_rl.types import Group

T = TypeVar("T")

LEFTOVER = "leftover_"
"""Files of a checkpoint: tokens of what is carried over, by rank."""


class Run:
    """The parts of a run on this rank. A context: what it started it ends."""

    def __init__(self, config: Config) -> None:
        """Check everything that can be checked, then start the process group, the engine and the trainer.

        Raises:
            UserError: bad input; nothing was written.
        """
        self.config = config
        begun = time.perf_counter()
        given = read_inputs(config)
        self.fixed, self.prompts, self.spec = given.fixed, given.data.prompts, given.spec
        self.heldout = given.heldout.prompts if given.heldout else ()
        self.step = 0
        self.engines = engine_group(config, self.spec.shape)
        self.groups = setup.start(config, self.engines)
        Objective(loss=given.loss, algorithm=config.algorithm).try_out(cpu.device())
        self.leader = dist.get_rank() == 0
        self.progress = Progress(config.steps, quiet=not self.leader)
        self._say_what_is_odd(given)
        self._make_rollout(given)
        self.writer: RunWriter | None = None
        self._saved_step = 0
        with ExitStack() as started:
            self._from_leader(lambda: self._take_run_dir(started))
            started.callback(self.engine.stop)
            started.callback(self.pool.close)
            self._start_phases(given)
            self._stop_wish = started.enter_context(StopWish())
            self._started = started.pop_all()
        seconds = time.perf_counter() - begun
        self.progress.say(f"{setup.world_size()} ranks on {cpu.device().type}, started in {seconds:.1f}s")
        self.progress.say(str(choose(config.trainer)))

    def _say_what_is_odd(self, given: Inputs) -> None:
        for path, prompts in ((self.config.data.train, given.data), (self.config.data.eval, given.heldout)):
            if prompts and prompts.skipped:
                self.progress.say(f"{path}: {prompts.skipped} prompts over data.max_prompt_tokens were skipped")
        for doubt in doubts(self.config):
            self.progress.say(f"warning: {doubt}")

    def _make_rollout(self, given: Inputs) -> None:
        """The engine of this rank's group, and what samples with all of them; nothing is started."""
        config, everyone, say = self.config, self.groups.everyone, self.progress.say
        group = self.engines
        self.engine: Engine = cast(Engine, NoEngine())
        if group.rank >= group.first:
            self.engine = make_engine(
                config,
                given.spec,
                group,
                eos_token_ids=given.eos,
                vocabulary=given.vocabulary,
                ranks=self.groups.engine,
            )
        self.weights = WeightSync(config, given.spec.shape, given.vocabulary, self.groups, self.engine, group)
        wait = EngineWait(self.groups.store, group, timeout_s=config.rollout.heartbeat_timeout_s)
        self.parity = make_parity(config, self.prompts, given.vocabulary, self.engine, wait, say, everyone)
        self.pool = GraderPool(config.rewards)
        check = self.parity.check_response
        self.sampler = GroupSampler(self.engine, wait, self.pool, given.tokenizer, check, everyone)
        self.collector = Collector(self.sampler, PromptStream(self.prompts, config.seed), config, say)

    def _start_phases(self, given: Inputs) -> None:
        """Start graders, the engine, and then the trainer: on a GPU the engine takes its memory first, and gives it
        back before the trainer allocates."""
        config, everyone = self.config, self.groups.everyone
        if self.sampler.wait.group.leads:
            self.pool.start()
        separate = config.rollout.placement == "separate"
        self.engine.start()
        if not separate:
            self.engine.sleep()
        trains, world = setup.trainers(config), setup.world_size()
        self.trainer: Trainer | TrainerElsewhere
        if dist.get_rank() < trains:
            self.trainer = Trainer(config, given.spec, given.vocabulary, everyone)
        else:
            sharing = Sharing(config=config, shape=given.spec.shape, trainers=trains, world=world)
            self.trainer = TrainerElsewhere(sharing, everyone)
        self.phases = Phases(self.engine, None if separate else self.trainer.memory, separate=separate)

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._started.close()
        if self.writer:
            self.writer.close()
        if error is None:
            setup.stop(self.groups)  # a collective: others may never come to it after an error

    def resume(self) -> None:
        """Go on from the newest checkpoint of the run directory, if there is one, and open the run's files."""
        # One choice, whatever each node sees of the disk.
        newest = self._from_leader(lambda: latest_checkpoint(self.config))
        if newest is not None:
            state = read_run_state(newest, self.fixed)
            if isinstance(self.trainer, Trainer):
                load_checkpoint(newest, self.trainer, state)
            self.trainer.updates_done = state.updates
            self.step = self._saved_step = state.step
            self.collector.restore(state.collector, self._read_leftover(newest, state))
            self.progress.say(f"going on after step {self.step}, from {newest}")
        self._from_leader(self._open_files)

    def _take_run_dir(self, until: ExitStack) -> None:
        until.enter_context(RunLock(self.config.run_dir))

    def _open_files(self) -> None:
        replace_text(self.config.run_dir / "config.yaml", dump_config(self.config))
        self.writer = RunWriter(self.config, self.step)

    def asked_to_stop(self) -> bool:
        """Whether any rank was asked to stop, at the boundary between two steps. A collective."""
        wish = torch.tensor(int(self._stop_wish.asked), device=cpu.device())
        dist.all_reduce(wish, dist.ReduceOp.MAX, group=self.groups.everyone)
        if wish:
            self.progress.say(f"asked to stop after step {self.step}; start the same command again to go on")
        return bool(wish)

    def _from_leader(self, act: Callable[[], T]) -> T:
        """What `act` returns on rank 0, on every rank; or its mistake, on every rank. A collective."""
        message: list[T | UserError | None] = [None]
        if self.leader:
            try:
                message = [act()]
            except UserError as error:
                message = [error]
            except OSError as error:  # the others wait: tell them too
                message = [UserError(f"run_dir: {error}")]
        dist.broadcast_object_list(message, src=0, group=self.groups.everyone)
        if isinstance(message[0], UserError):
            raise message[0]
        return cast(T, message[0])

    def push_weights(self) -> None:
        """The trainer's current weights into all engines, and its scores of the parity probe. A collective."""
        trainer, version = self.trainer, self.trainer.updates_done
        self.weights.push(trainer.model if isinstance(trainer, Trainer) else (), version)
        self.parity.expect(self._of_trainer(trainer.score(self.parity.probe)), version=version)

    def kl_of_responses(self, groups: Sequence[Group]) -> list[float] | None:
        """See `Trainer.kl_of_responses`; on all ranks."""
        return self._of_trainer(self.trainer.kl_of_responses(groups))

    def _of_trainer(self, value: T) -> T:
        """What the trainer says, also on ranks that only sample. A collective."""
        if not self.phases.separate:
            return value
        message = [value]
        dist.broadcast_object_list(message, src=0, group=self.groups.everyone)
        return message[0]

    @property
    def engines_are_current(self) -> bool:
        """Whether all engines have the trainer's weights; the same on every rank."""
        if self.phases.separate:
            return self.parity.version == self.trainer.updates_done
        return self.phases.phase == "rollout"

    def keep_batch(self, step: int, rollout: Rollout, kl: Sequence[float] | None) -> None:
        """Write down what the step trains on, before it does: also what a failure came from. A collective."""
        if not self.config.telemetry.keep_batches:
            return
        answers = [one for group in rollout.groups for one in group.responses]
        wanted = [range(len(answers)), *[range(0)] * (setup.world_size() - 1)]  # rank 0 writes
        blocks = deliver(answers, wanted, rows=ALL, group=self.groups.everyone)
        if self.writer:
            try:
                self.writer.batch(step, rollout.groups, blocks, kl)
            except OSError as error:  # a full disk: the run is worth more than this file
                self.progress.say(f"warning: the batch of step {step} is not kept: {error.strerror}")

    def finish_step(self, step: int, rollout: Rollout, metrics: MeanMetrics) -> None:
        """Count the step as done and write down what happened in it. A collective."""
        self.step = step
        samples = bring_groups(rollout.sampled[: self.config.telemetry.samples_per_step], 0, self.groups.everyone)
        for phase, seconds in self.phases.take_seconds().items():
            metrics.add(f"seconds/{phase}", seconds)
        self._add_memory_figures(metrics)
        if self.writer:
            values = metrics.values()
            self.writer.log(step, values)
            self.writer.samples(step, samples)
            self.progress.step(step, values)

    def log_evaluation(self, metrics: MeanMetrics) -> None:
        """Write down an evaluation of the current weights."""
        metrics.add("seconds/evaluation", sum(self.phases.take_seconds().values()))
        self._add_memory_figures(metrics)
        if self.writer:
            self.writer.log(self.step, metrics.values())
            self.progress.evaluation(self.step, metrics.values())

    def _add_memory_figures(self, metrics: MeanMetrics) -> None:
        figures = self.trainer.memory.take_figures() if self.trainer.memory else {}
        figures |= {f"memory/peak_gb_{phase}": peak for phase, peak in self.phases.take_peaks().items()}
        for name, value in figures.items():
            metrics.add(name, value)

    def evaluation_due(self) -> bool:
        """After the last step, and every `evaluation.every`."""
        every = self.config.evaluation.every
        return self.step == self.config.steps or (every is not None and self.step % every == 0)

    def checkpoint_due(self) -> bool:
        """After the last step, and every `checkpoint.every`."""
        every = self.config.checkpoint.every
        return self.step == self.config.steps or (every is not None and self.step % every == 0)

    def save(self) -> None:
        """Write a checkpoint of the last finished step, unless it is there already. A collective."""
        if self.step == self._saved_step:
            return
        begun = time.perf_counter()
        state = RunState(
            step=self.step,
            updates=self.trainer.updates_done,
            collector=self.collector.state(),
            fixed=self.fixed,
        )
        target = unfinished(self.config, self.step)
        with self.phases.enter("train"):
            if isinstance(self.trainer, Trainer):
                target = save_checkpoint(self.config, self.trainer, state, also=self._save_own)
            else:
                self._save_own(target)
        self._saved_step = self.step
        self.progress.say(f"saved {target} in {time.perf_counter() - begun:.1f}s")

    def _save_own(self, directory: Path) -> None:
        """Write what this rank alone has. A collective: after the directory is there, and before it counts."""
        dist.barrier(self.groups.everyone)
        try:
            write_tokens(directory / f"{LEFTOVER}{dist.get_rank():05d}.safetensors", self.collector.everything_left)
        except OSError as error:
            raise UserError(f"{directory}: {error.strerror}; the checkpoint before stays") from None
        dist.barrier(self.groups.everyone)

    def _read_leftover(self, checkpoint: Path, state: RunState) -> Leftover:
        return read_leftover(
            sorted(checkpoint.glob(f"{LEFTOVER}*.safetensors")),
            state.collector["leftover"],
            {prompt.index: prompt for prompt in self.prompts},
            self.sampler.wait.group,
            self.sampler.decode,
            responses=self.config.rollout.responses_per_prompt,
        )

    def export(self) -> None:
        """Write the trained model as a Hugging Face directory. A collective."""
        if not self.config.checkpoint.export_hf or not isinstance(self.trainer, Trainer):
            return
        target = self.config.run_dir / "hf"
        with self.phases.enter("train"):
            weights = self.trainer.hf_weights()
            if self.leader:
                write_hf(target, self.config.model.path, weights)
            else:
                for _ in weights:
                    continue
        self.progress.say(f"exported {target}")
