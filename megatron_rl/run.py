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
from megatron_rl.data.prompts import load_prompts, load_tokenizer, usable_ids
from megatron_rl.data.stream import PromptStream
from megatron_rl.doubts import doubts
from megatron_rl.errors import UserError
from megatron_rl.files import replace_text
from megatron_rl.phases import Phases
from megatron_rl.resharding.hf_files import HfReader, write_hf
from megatron_rl.rewards.graders import check_graders
from megatron_rl.rewards.pool import GraderPool
from megatron_rl.rollout.collector import Collector, Rollout
from megatron_rl.rollout.delivery import ALL, bring_groups, deliver
from megatron_rl.rollout.engine import Engine
from megatron_rl.rollout.engines import make_engine
from megatron_rl.rollout.groups import EngineGroup, check_engine_groups
from megatron_rl.rollout.leftover import Leftover, write_tokens
from megatron_rl.rollout.leftover import read as read_leftover
from megatron_rl.rollout.parity import make_parity
from megatron_rl.rollout.sampler import GroupSampler
from megatron_rl.rollout.waiting import EngineWait
from megatron_rl.run_dir import RunLock, check_run_dir
from megatron_rl.stopping import StopWish
from megatron_rl.telemetry.metrics import MeanMetrics
from megatron_rl.telemetry.progress import Progress
from megatron_rl.telemetry.writer import RunWriter
from megatron_rl.training import cpu, setup
from megatron_rl.training.batch import try_batch
from megatron_rl.training.checkpoint import (
    RunState,
    latest_checkpoint,
    load_checkpoint,
    read_run_state,
    save_checkpoint,
    unchangeable,
)
from megatron_rl.training.hf_config import read_model_spec
from megatron_rl.training.implementation import choose
from megatron_rl.training.objective import Objective, load_loss
from megatron_rl.training.trainer import Trainer
from megatron_rl.types import Prompt

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
        check_run_dir(config.run_dir)
        spec = read_model_spec(config.model.path)
        setup.check_layout(config, spec.shape, setup.world_size())
        shared_by = config.rollout.tensor_parallel_size
        check_engine_groups(shared_by, setup.world_size(), setup.ranks_per_node())
        tokenizer = load_tokenizer(config.model.path)
        data = load_prompts(config.data.train, tokenizer, config.data)
        self.fixed = unchangeable(config, spec.shape, data.fingerprint)
        heldout = load_prompts(config.data.eval, tokenizer, config.data) if config.data.eval else None
        self.heldout = heldout.prompts if heldout else ()
        check_graders(config.rewards)
        loss = load_loss(config.algorithm)
        try_batch(config)
        with HfReader(config.model.path, spec.shape):
            vocabulary = usable_ids(tokenizer, spec.shape.vocab)
        _check_ids(spec.shape.vocab, config.data.train, data.prompts)
        _check_ids(spec.shape.vocab, config.data.eval, self.heldout)
        _check_positions(spec.max_positions, (*data.prompts, *self.heldout), config)
        eos = _usable_eos(spec.eos_token_ids, tokenizer.eos_token_id, vocabulary, config)
        self.step = 0

        setup.start(config)
        Objective(loss=loss, algorithm=config.algorithm).try_out(cpu.device())
        self.leader = dist.get_rank() == 0
        self.progress = Progress(config.steps, quiet=not self.leader)
        for path, prompts in ((config.data.train, data), (config.data.eval, heldout)):
            if prompts and prompts.skipped:
                self.progress.say(f"{path}: {prompts.skipped} prompts over data.max_prompt_tokens were skipped")
        for doubt in doubts(config):
            self.progress.say(f"warning: {doubt}")
        group = EngineGroup(rank=dist.get_rank(), size=shared_by, world=dist.get_world_size())
        self.engine: Engine = make_engine(config, spec, group, eos_token_ids=eos, vocabulary=vocabulary)
        store = dist.distributed_c10d._get_default_store()
        wait = EngineWait(store, group, timeout_s=config.rollout.heartbeat_timeout_s)
        self.parity = make_parity(config, data.prompts, vocabulary, self.engine, wait, self.progress.say)
        self.pool = GraderPool(config.rewards)
        self.sampler = GroupSampler(self.engine, wait, self.pool, tokenizer, self.parity.check_response)
        self.prompts = data.prompts
        stream = PromptStream(data.prompts, config.seed)
        self.collector = Collector(self.sampler, stream, config, self.progress.say)
        self.writer: RunWriter | None = None
        self._saved_step = 0
        with ExitStack() as started:
            self._from_leader(lambda: self._take_run_dir(started))
            started.callback(self.engine.stop)
            started.callback(self.pool.close)
            if group.leads:
                self.pool.start()
            # On a GPU the engine takes its memory first and gives it back; then the trainer allocates.
            self.engine.start()
            self.engine.sleep()
            self.trainer = Trainer(config, spec, vocabulary)
            self.phases = Phases(self.engine, self.trainer.memory)
            self._stop_wish = started.enter_context(StopWish())
            self._started = started.pop_all()
        seconds = time.perf_counter() - begun
        self.progress.say(f"{dist.get_world_size()} ranks on {cpu.device().type}, started in {seconds:.1f}s")
        self.progress.say(str(choose(config.trainer)))

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._started.close()
        if self.writer:
            self.writer.close()
        if error is None:
            setup.stop()  # a collective: others may never come to it after an error

    def resume(self) -> None:
        """Go on from the newest checkpoint of the run directory, if there is one, and open the run's files."""
        # One choice, whatever each node sees of the disk.
        newest = self._from_leader(lambda: latest_checkpoint(self.config))
        if newest is not None:
            state = read_run_state(newest, self.fixed)
            load_checkpoint(newest, self.trainer, state)
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
        dist.all_reduce(wish, dist.ReduceOp.MAX)
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
        dist.broadcast_object_list(message, src=0)
        if isinstance(message[0], UserError):
            raise message[0]
        return cast(T, message[0])

    def keep_batch(self, step: int, rollout: Rollout, kl: Sequence[float] | None) -> None:
        """Write down what the step trains on, before it does: also what a failure came from. A collective."""
        if not self.config.telemetry.keep_batches:
            return
        answers = [one for group in rollout.groups for one in group.responses]
        wanted = [range(len(answers)), *[range(0)] * (dist.get_world_size() - 1)]  # rank 0 writes
        blocks = deliver(answers, wanted, rows=ALL)
        if self.writer:
            try:
                self.writer.batch(step, rollout.groups, blocks, kl)
            except OSError as error:  # a full disk: the run is worth more than this file
                self.progress.say(f"warning: the batch of step {step} is not kept: {error.strerror}")

    def finish_step(self, step: int, rollout: Rollout, metrics: MeanMetrics) -> None:
        """Count the step as done and write down what happened in it. A collective."""
        self.step = step
        samples = bring_groups(rollout.sampled[: self.config.telemetry.samples_per_step], to=0)
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
        with self.phases.enter("train"):
            path = save_checkpoint(
                self.config,
                self.trainer,
                state,
                also=lambda directory: write_tokens(
                    directory / f"{LEFTOVER}{dist.get_rank():05d}.safetensors", self.collector.leftover
                ),
            )
        self._saved_step = self.step
        self.progress.say(f"saved {path} in {time.perf_counter() - begun:.1f}s")

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
        if not self.config.checkpoint.export_hf:
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


def _check_ids(vocab: int, path: Path | None, prompts: Sequence[Prompt]) -> None:
    for prompt in prompts:
        if max(prompt.ids) >= vocab:
            raise UserError(
                f"{path}:{prompt.index}: token id {max(prompt.ids)} is beyond the model's vocab_size ({vocab}); "
                "the tokenizer belongs to another model"
            )


def _check_positions(positions: int | None, prompts: Sequence[Prompt], config: Config) -> None:
    longest = max(len(prompt.ids) for prompt in prompts)
    budget = config.rollout.max_response_tokens
    if positions is not None and longest + budget > positions:
        raise UserError(
            f"rollout.max_response_tokens: {budget} after a prompt of {longest} tokens is more than the {positions} "
            f"positions of the model (max_position_embeddings); lower it or data.max_prompt_tokens"
        )


def _usable_eos(of_model: frozenset[int], of_tokenizer: int | None, vocabulary: int, config: Config) -> frozenset[int]:
    """The ids that end a response, of those that can be sampled."""
    ids = of_model or frozenset(() if of_tokenizer is None else (of_tokenizer,))
    usable = frozenset(token for token in ids if token < vocabulary)
    if not usable:
        raise UserError(
            f"{config.model.path}: no end-of-sequence id among the {vocabulary} ids of the tokenizer (found "
            f"{sorted(ids)}); set eos_token_id in config.json or generation_config.json"
        )
    return usable
