"""The trainer: Megatron's model, gradients and optimizer behind few calls: `logprobs`, `train` and the weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megatron_rl.algorithms.kl import kl_estimates
from megatron_rl.algorithms.losses import masked_mean
from megatron_rl.config import Config
from megatron_rl.errors import UserError
from megatron_rl.resharding.gather import gather_hf
from megatron_rl.rollout.delivery import deliver
from megatron_rl.telemetry.metrics import MeanMetrics
from megatron_rl.training import cpu
from megatron_rl.training.batch import untrained
from megatron_rl.training.data_parallel import wrap
from megatron_rl.training.hf_config import ModelSpec
from megatron_rl.training.implementation import choose
from megatron_rl.training.logprobs import projected_logprobs
from megatron_rl.training.micro_batches import Place, pack
from megatron_rl.training.model import all_tokens, build_model, load_weights, output_weight
from megatron_rl.training.objective import Given, Objective, load_loss
from megatron_rl.training.optimizer import build_optimizer, learning_rate, make_adam_state, set_rates
from megatron_rl.training.reduction import from_last_stage, reduce_metrics, sum_over
from megatron_rl.training.reference import ReferencePolicy
from megatron_rl.training.sharing import Sharing
from megatron_rl.training.sleep import TrainerMemory
from megatron_rl.types import Group, MicroBatch, TrainBatch, TrainedResponse

Share = tuple[MicroBatch, ...]
"""What one rank does in an optimizer step: as many micro-batches on every rank."""


class Trainer:
    """This rank's part of the policy and its optimizer."""

    def __init__(
        self, config: Config, spec: ModelSpec, vocabulary: int, everyone: dist.ProcessGroup | None = None
    ) -> None:
        """Build the model and read its weights from `config.model.path`, each rank only its slices.

        Args:
            config: of the run.
            spec: the architecture.
            vocabulary: number of token ids that may be sampled; higher ids are outside the softmax.
            everyone: all ranks of the run, where some only sample; None: all train.
        """
        self.everyone = everyone
        self.spec, self.vocabulary = spec, vocabulary
        self.model = build_model(spec, config.trainer)
        load_weights(self.model, spec.shape, config.model.path)
        self.chunks = wrap(self.model, config.trainer)
        self.optimizer = build_optimizer(config.trainer, self.chunks)
        self.model[0].config.grad_scale_func = self.optimizer.scale_loss
        self.memory: TrainerMemory | None = None
        if config.trainer.memory.offload_while_sampling:
            make_adam_state(self.optimizer)  # so that its place on the host is known at once
            self.memory = TrainerMemory(self.chunks, self.optimizer)
        self.updates_done = 0
        self.reference: ReferencePolicy | None = None
        self.use(config)

    def use(self, config: Config) -> None:
        """Go on with the objective of `config`, on the same model.

        The reference policy is made when it is first asked for: before any optimizer step, or it is not that of the
        beginning.
        """
        self.config = config
        world = dist.get_world_size(self.everyone)
        self.sharing = Sharing(config=config, shape=self.spec.shape, trainers=dist.get_world_size(), world=world)
        if config.algorithm.kl.wanted and self.reference is None:
            if self.updates_done:
                raise RuntimeError("a reference policy is asked for after the first optimizer step")
            self.reference = ReferencePolicy(self.parameters())
        self.objective = Objective(
            loss=load_loss(config.algorithm),
            algorithm=config.algorithm,
            over_context=partial(sum_over, group=mpu.get_context_parallel_group()),
        )

    def parameters(self) -> Iterator[Any]:
        """This rank's, in the order in which layers made them; Transformer Engine's make others."""
        return (parameter for chunk in self.model for parameter in chunk.parameters())

    def hf_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The current weights as whole HF tensors; a collective (see `gather_hf`)."""
        return gather_hf(self.model, self.spec.shape)

    def train(self, batch: TrainBatch) -> MeanMetrics:
        """The optimizer steps of one rollout step.

        Raises:
            UserError: loss or gradient is not finite; the run must stop before a checkpoint is written.
        """
        mine = [self.share(update) for update in batch.updates]
        metrics = MeanMetrics()
        for number, (share, given) in enumerate(zip(mine, self.given(mine), strict=True)):
            of_update = self.gradients(share, given, first=number == 0)
            self._check_finite("objective", of_update.pairs["loss/objective"][0])
            metrics.merge(of_update)
            metrics.merge(self.step())
        return metrics

    def step(self) -> MeanMetrics:
        """An optimizer step with the gradients that `gradients` left.

        Raises:
            UserError: the gradient's norm is not finite.
        """
        trainer, updates = self.config.trainer, self.config.algorithm.updates_per_rollout
        lr = learning_rate(trainer, self.updates_done, updates_per_rollout=updates)
        set_rates(self.optimizer, lr=lr, weight_decay=trainer.weight_decay)
        _, norm, _ = self.optimizer.step()
        self._check_finite("gradient norm", norm)
        self.updates_done += 1
        return MeanMetrics({"train/grad_norm": (float(norm), 1.0), "train/lr": (lr, 1.0)})

    def _check_finite(self, name: str, value: float) -> None:
        """Stop before a checkpoint is written. Raises UserError unless `value` is finite."""
        if not math.isfinite(value):
            raise UserError(
                f"{name} is {value} in optimizer step {self.updates_done + 1}; nothing of this rollout step is saved; "
                f"megatron-rl replay {self.config.run_dir} --step STEP says what it came from"
            )

    def gradients(self, share: Share, given: Sequence[Given] = (), *, first: bool = True) -> MeanMetrics:
        """Forward and backward over one optimizer step; the gradient is left in the parameters' `main_grad`.

        Args:
            share: this rank's micro-batches.
            given: what was computed before, for each of them, on the last pipeline stage; none: nothing was.
            first: whether the weights are still those that sampled.
        """
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

        def loss_of(batch: MicroBatch, number: int, output: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
            logprobs, entropies, likeliest = self._score(output, batch)
            known = given[number] if given else Given()
            total, metrics = self.objective(batch, logprobs, entropies, known, first=first)
            metrics["policy/top1"] = masked_mean(likeliest.to(logprobs.dtype), batch.mask)
            return total, torch.zeros((), dtype=torch.int), metrics

        metrics = reduce_metrics(self._run(share, loss_of, forward_only=False))
        total, _ = metrics.pairs["loss/objective"]
        metrics.pairs["loss/objective"] = (total, 1.0)  # a sum over the step, not a mean over micro-batches
        return metrics

    def logprobs(self, share: Share, *, temperature: float | None = None) -> list[Tensor]:
        """Log-probabilities of the labels of each micro-batch, `[1, tokens]`; on the last pipeline stage, else [].

        `temperature`: None is `rollout.temperature`.
        """

        def keep(batch: MicroBatch, number: int, output: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            logprobs = self._score(output, batch, temperature=temperature)[0]
            return output.new_zeros(()), torch.zeros((), dtype=torch.int), logprobs

        with torch.no_grad():
            return self._run(share, keep, forward_only=True)

    def score(self, sequences: Sequence[tuple[int, ...]]) -> list[tuple[float, ...]]:
        """Log-probabilities, at temperature 1, of each token after the first, as `Engine.score` has them.

        Every data-parallel rank scores all sequences, so no token moves. It needs the parameters on the device
        and nothing else. A collective; the same on every rank.

        Args:
            sequences: token ids, the same on every rank; each has at least 2.
        """
        share = self._one_by_one(sequences)
        mine: dict[tuple[int, int], float] = {}
        logprobs = self.logprobs(share, temperature=1.0)  # none but on the last stage
        for batch, found in zip(share, logprobs, strict=False):
            places = batch.positions[batch.mask].tolist()  # of this context-parallel rank's tokens
            for place, logprob in zip(places, found[batch.mask].tolist(), strict=True):
                mine[batch.numbers[0], place] = logprob
        whole: dict[tuple[int, int], float] = {}
        for part in from_last_stage(mine):
            whole |= part
        return [tuple(whole[number, place] for place in range(len(ids) - 1)) for number, ids in enumerate(sequences)]

    def _one_by_one(self, sequences: Sequence[tuple[int, ...]]) -> Share:
        """A micro-batch for each sequence, and empty ones until the schedule can run them."""
        asked = [
            TrainedResponse(
                prompt_ids=ids[:1],
                length=len(ids) - 1,
                home=0,
                response=None,
                advantage=0.0,
                weight=1.0,
                group=0,
                number=number,
            )
            for number, ids in enumerate(sequences)
        ]
        blocks = [torch.tensor([ids[1:], [0] * (len(ids) - 1)], dtype=torch.int32) for ids in sequences]
        batches = [pack([one], [block], self.place) for one, block in zip(asked, blocks, strict=True)]
        batches += [pack([], [], self.place) for _ in range(-len(batches) % self.sharing.rounds_of)]
        return tuple(_to_device(batch) for batch in batches)

    def kl_of_responses(self, groups: Sequence[Group]) -> list[float] | None:
        """Divergence from the reference policy, summed over each response; None unless it is taken from the reward.

        The policy's log-probs are the engine's, which sampled. A collective; the same on every rank.
        """
        kl = self.config.algorithm.kl
        if self.reference is None or kl.place != "reward":
            return None
        share = self.share(untrained(groups))
        with self.reference.in_place():
            references = self.logprobs(share)
        mine: dict[int, float] = {}
        for batch, reference in zip(share, references, strict=False):  # none but on the last stage
            estimates = kl_estimates(batch.rollout_logprobs, reference, estimator=kl.estimator).double()
            ids = batch.response_ids + 1
            sums = estimates.new_zeros(batch.responses + 1).index_add(0, ids.flatten(), estimates.flatten())
            mine |= dict(zip(batch.numbers, sums[1:].tolist(), strict=True))
        found = [0.0] * sum(len(group.responses) for group in groups)
        for part in from_last_stage(mine):  # of each data-parallel rank, and its tokens of each context-parallel one
            for number, value in part.items():
                found[number] += value
        return found

    def share(self, update: Sequence[TrainedResponse]) -> Share:
        """This rank's micro-batches of an optimizer step, on its device. A collective: tokens come from their homes."""
        of_ranks, place = self.sharing.scheduled(update), self.place
        blocks = deliver(update, self.sharing.wanted(of_ranks), group=self.everyone)
        return tuple(
            _to_device(pack([update[index] for index in batch], [blocks[index] for index in batch], place))
            for batch in of_ranks[place.rank]
        )

    @property
    def place(self) -> Place:
        """Which data this rank works on."""
        return self.sharing.place(rank=mpu.get_data_parallel_rank(), context_rank=mpu.get_context_parallel_rank())

    def given(self, shares: Sequence[Share]) -> list[list[Given]]:
        """What each update needs that is computed with the weights as they are now, or with the reference's."""
        sampled: list[list[Tensor]] = [[] for _ in shares]
        if self.config.algorithm.old_logprobs == "trainer":
            # Nothing changes before the first update: its own log-probs serve.
            sampled[1:] = [self.logprobs(share) for share in shares[1:]]
        references: list[list[Tensor]] = [[] for _ in shares]
        if self.reference is not None and self.config.algorithm.kl.place != "reward":
            with self.reference.in_place():
                references = [self.logprobs(share) for share in shares]
        return [
            [Given(sampled=old, reference=reference) for old, reference in zip_longest(*pair)]
            for pair in zip(sampled, references, strict=True)
        ]

    def _score(self, output: Tensor, batch: MicroBatch, *, temperature: float | None = None) -> tuple[Tensor, ...]:
        """Log-probabilities of the labels, entropies, and whether no token is likelier, `[1, tokens]` each.

        `temperature`: None is `rollout.temperature`.
        """
        last = self.model[-1]
        weight = output_weight(last)
        scores = projected_logprobs(
            all_tokens(output, last).to(weight.dtype),
            weight,
            batch.labels.flatten(),
            chunk=self.config.trainer.logits_chunk,
            temperature=self.config.rollout.temperature if temperature is None else temperature,
            vocabulary=self.vocabulary,
            group=mpu.get_tensor_model_parallel_group(),
            entropy_gradient=self.objective.entropy_gradient,
            compiled=choose(self.config.trainer).logprobs == "compiled",
        )
        return tuple(values.unsqueeze(0) for values in scores)

    def _run(self, share: Share, loss_of: Callable[..., Any], *, forward_only: bool) -> list[Any]:
        def step(batches: Iterator[tuple[int, MicroBatch]], model: torch.nn.Module) -> Any:
            number, batch = next(batches)
            packed = PackedSeqParams(
                qkv_format="thd",
                cu_seqlens_q=batch.starts,
                cu_seqlens_kv=batch.starts,
                max_seqlen_q=max(batch.lengths),
                max_seqlen_kv=max(batch.lengths),
            )
            return model(batch.tokens, batch.positions, None, packed_seq_params=packed), partial(loss_of, batch, number)

        return get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=[iter(list(enumerate(share))) for _ in self.chunks],
            model=self.chunks,
            num_microbatches=len(share),
            seq_length=share[0].tokens.shape[1],  # pipeline stages tell one another the real lengths
            micro_batch_size=1,
            forward_only=forward_only,
        )


def _to_device(batch: MicroBatch) -> MicroBatch:
    device = cpu.device()
    if device.type == "cpu":
        return batch
    moved: dict[str, Any] = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in vars(batch).items()}
    return MicroBatch(**moved)
