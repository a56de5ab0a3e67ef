"""What a run is made of, how it starts, is resumed, stops, and what it writes down."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import TypeVar, cast

import torch
import torch.distributed as dist

from megatron_rl.agreement import from_leader
from megatron_rl.config import Config
from megatron_rl.config_files import dump_config
from megatron_rl.data.stream import PromptStream
from megatron_rl.doubts import doubts
from megatron_rl.errors import UserError
from megatron_rl.files import replace_text
from megatron_rl.inputs import Inputs, read_inputs
from megatron_rl.phases import GB, Phases
from megatron_rl.resharding.hf_files import plan_of, write_hf
from megatron_rl.resharding.names import hf_shapes
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
from megatron_rl.stopping import StopWish, TimeBudget, take_stop_file
from megatron_rl.telemetry.metrics import MeanMetrics
from megatron_rl.telemetry.progress import Progress
from megatron_rl.telemetry.writer import RunWriter
from megatron_rl.training import cpu, setup
from megatron_rl.training.checkpoint import load_checkpoint, newest_whole, tidy
from megatron_rl.training.elsewhere import TrainerElsewhere
from megatron_rl.training.implementation import choose
from megatron_rl.training.model import DTYPES
from megatron_rl.training.objective import Objective
from megatron_rl.training.random_state import random_state, read_random_state, set_random_state
from megatron_rl.training.run_state import RunState, checkpoints_dir, layout_of, read_run_state
from megatron_rl.training.saver import Saver, Snapshot
from megatron_rl.training.sharded_state import own_chunks
from megatron_rl.training.sharing import Sharing
from megatron_rl.training.trainer import Trainer
from megatron_rl.types import Group

T = TypeVar("T")

LEFTOVER, RANDOM = "leftover_", "random_"
"""Files of a checkpoint, one of each rank: tokens of what is carried over; the state of its random numbers."""

ASSUMED_BYTES_S = 100e6
"""How fast a rank saves, before that was measured."""


def _own(kind: str, suffix: str) -> str:
    """The name of this rank's file."""
    return f"{kind}{setup.rank():05d}{suffix}"


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
        self.saver = Saver(config, self.groups.everyone, self.groups.store, self.progress.say, self._sync_files)
        self.evaluated: int | None = None
        self._figures: dict[str, float] = {}
        self._told = -1  # the version whose parity stands in the row of an evaluation
        self._budget = TimeBudget(config.stop.after)
        self._saved_step = 0
        with ExitStack() as started:
            self._agree(lambda: self._take_run_dir(started))
            started.callback(self.saver.close)
            started.callback(self.engine.stop)
            started.callback(self.pool.close)
            self._start_phases(given)
            self._stop_wish = started.enter_context(StopWish())
            self._started = started.pop_all()
        seconds = time.perf_counter() - begun
        self.progress.say(f"{setup.world_size()} ranks on {cpu.device().type}, started in {seconds:.1f}s")
        self.progress.say(str(choose(config.trainer)))
        self._say_what_checkpoints_take()

    def _say_what_checkpoints_take(self) -> None:
        of_each = 14 if self.config.trainer.dtype == "bfloat16" else 12  # fp32 weights and moments; bf16 weights beside
        ranks, shape = setup.trainers(self.config), self.spec.shape
        size = of_each * sum(math.prod(size) for size in hf_shapes(shape).values())
        self.saver.seconds = size / ranks / ASSUMED_BYTES_S
        self.progress.say(
            f"a checkpoint is {size / GB:.1f} GB; while it is written each rank that trains holds about "
            f"{size / ranks / GB:.1f} GB more in host memory"
        )

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
        self._agree(lambda: tidy(checkpoints_dir(self.config)))
        newest = newest_whole(self.config, self.groups.everyone, self.progress.say)
        if newest is not None:
            self._go_on_from(newest, read_run_state(newest, self.fixed))
            self.progress.say(f"going on after step {self.step}, from {newest}")
        self._agree(self._open_files)

    def _go_on_from(self, checkpoint: Path, state: RunState) -> None:
        if isinstance(self.trainer, Trainer):
            load_checkpoint(checkpoint, self.trainer, state)
        self.trainer.updates_done = state.updates
        self.step = self._saved_step = state.step
        self.evaluated = state.evaluated
        self.parity.restore(state.parity)
        self.collector.restore(state.collector, self._read_leftover(checkpoint, state))
        if state.layout == layout_of(self.config, setup.world_size()):  # or whose random numbers were these?
            set_random_state(read_random_state(checkpoint / _own(RANDOM, ".pt")))

    def _agree(self, act: Callable[[], T]) -> T:
        """See `from_leader`."""
        return from_leader(act, self.groups.everyone)

    def _take_run_dir(self, until: ExitStack) -> None:
        until.enter_context(RunLock(self.config.run_dir))

    def _open_files(self) -> None:
        replace_text(self.config.run_dir / "config.yaml", dump_config(self.config))
        self.writer = RunWriter(self.config, self.step)

    def asked_to_stop(self) -> bool:
        """Whether the run is to stop here, between two steps: by a signal to any rank, the stop file, or the clock of
        rank 0. A collective.

        Raises:
            UserError: on every rank; a checkpoint could not be saved.
        """
        why = "asked to stop" if self._stop_wish.asked else None
        if self.leader:
            why = why or ("asked to stop by the stop file" if take_stop_file(self.config.run_dir) else None)
            late = self._budget.spent(self.saver.expected_s)
            why = why or late
        found = torch.tensor([why is not None, self.saver.look()], dtype=torch.int32, device=cpu.device())
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self.groups.everyone)
        stop, failed = found.tolist()
        if failed:
            self.saver.wait()
        if stop:
            why = why or "asked to stop"
            self.progress.say(f"{why}; stopping after step {self.step}; start the same command again to go on")
        return bool(stop)

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
        self.step, self._figures = step, {}
        samples = bring_groups(rollout.sampled[: self.config.telemetry.samples_per_step], 0, self.groups.everyone)
        for phase, seconds in self.phases.take_seconds().items():
            metrics.add(f"seconds/{phase}", seconds)
        self._add_memory_figures(metrics)
        if self.writer:
            values = metrics.values()
            self._note(values)
            self.writer.log(step, values)
            self.writer.samples(step, samples)
            self.progress.step(step, values)

    def log_evaluation(self, metrics: MeanMetrics) -> None:
        """Write down an evaluation of the current weights."""
        self.evaluated, self._told = self.step, self.parity.version
        metrics.add("seconds/evaluation", sum(self.phases.take_seconds().values()))
        self._add_memory_figures(metrics)
        if self.writer:
            self._note(metrics.values())
            self.writer.log(self.step, metrics.values())
            self.progress.evaluation(self.step, metrics.values())

    def _note(self, metrics: Mapping[str, float]) -> None:
        """Keep the figure by which the best checkpoint is told, on rank 0, for that of the current step."""
        name = self.config.checkpoint.keep_best
        if name and math.isfinite(metrics.get(name, math.nan)):
            self._figures = {name: metrics[name]}

    def _add_memory_figures(self, metrics: MeanMetrics) -> None:
        figures = self.trainer.memory.take_figures() if self.trainer.memory else {}
        figures |= {f"memory/peak_gb_{phase}": peak for phase, peak in self.phases.take_peaks().items()}
        for name, value in figures.items():
            metrics.add(name, value)

    def evaluation_due(self) -> bool:
        """Before the first step, after the last one, and every `evaluation.every`, if it was not made yet."""
        every = self.config.evaluation.every
        due = self.step in (0, self.config.steps) or (every is not None and self.step % every == 0)
        return bool(self.heldout) and due and self.evaluated != self.step

    def checkpoint_due(self) -> bool:
        """After the last step, and every `checkpoint.every`."""
        every = self.config.checkpoint.every
        return self.step == self.config.steps or (every is not None and self.step % every == 0)

    def save(self) -> None:
        """Have a checkpoint of the last finished step written, unless it is there already. A collective; the copy is
        made when it returns, the rest goes on beside training (`Saver`)."""
        if self.step == self._saved_step:
            return
        state = RunState(
            step=self.step,
            updates=self.trainer.updates_done,
            collector=self.collector.state(),
            fixed=self.fixed,
            layout=layout_of(self.config, setup.world_size()),
            evaluated=self.evaluated,
            # Engines that keep their weights through this save are not compared again; others are.
            parity=self.parity.state(self._told if self.phases.separate else -1),
            figures=self._figures,
        )
        left, random_numbers = self.collector.everything_left, random_state()

        def also(directory: Path) -> list[str]:
            torch.save(random_numbers, directory / _own(RANDOM, ".pt"))
            tokens = _own(LEFTOVER, ".safetensors")
            return [_own(RANDOM, ".pt"), *([tokens] if write_tokens(directory / tokens, left) else [])]

        with self.phases.enter("train"):
            chunks = own_chunks(self.trainer) if isinstance(self.trainer, Trainer) else {}
            self.saver.begin(Snapshot(state=state, layers=self.spec.shape.layers, chunks=chunks, also=also))
        self._saved_step = self.step

    def _sync_files(self) -> None:
        if self.writer:
            self.writer.sync()

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
        """Write the trained model as a Hugging Face directory. A collective.

        Raises:
            UserError: on every rank; it can't be written.
        """
        if not self.config.checkpoint.export_hf:
            return
        target = self.config.run_dir / "hf"
        fault: UserError | None = None
        with self.phases.enter("train"):
            weights = self.trainer.hf_weights() if isinstance(self.trainer, Trainer) else iter(())
            if self.leader:
                try:
                    planned = plan_of(self.spec.shape, DTYPES[self.config.trainer.dtype])
                    write_hf(target, self.config.model.path, weights, planned)
                except UserError as error:
                    fault = error
            for _ in weights:  # the ranks gather together, whatever becomes of it
                continue

        def complain() -> None:
            if fault:
                raise fault

        self._agree(complain)
        self.progress.say(f"exported {target}")
