"""Runs in every process of a layout: many checks in one launch; each rank saves results for the tests to judge."""

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import Qwen2ForCausalLM

from megatron_rl.config import Config
from megatron_rl.resharding.gather import gather_hf
from megatron_rl.resharding.hf_files import HfReader
from megatron_rl.rollout.embedded import EmbeddedEngine
from megatron_rl.rollout.engine import Request, Sampling
from megatron_rl.training import setup
from megatron_rl.training.batch import make_batch
from megatron_rl.training.checkpoint import RunState, load_checkpoint, save_checkpoint
from megatron_rl.training.hf_config import read_model_spec
from megatron_rl.training.micro_batches import Share
from megatron_rl.training.objective import Given
from megatron_rl.training.trainer import Trainer
from megatron_rl.types import MicroBatch, TrainBatch
from tests.distributed import objectives
from tests.distributed.data import VOCABULARY, make_config, make_groups

LAYOUTS: dict[str, dict[str, object]] = {
    "single": {},
    "tp2": {"tensor_parallel_size": 2},
    "tp2_sp": {"tensor_parallel_size": 2, "sequence_parallel": True},
    "pp2": {"pipeline_parallel_size": 2},
    "tp2_pp2": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
    "dp2": {},
}


def main() -> None:
    """Check one layout on the untied and the tied model."""
    parser = argparse.ArgumentParser()
    parser.add_argument("layout", choices=LAYOUTS)
    parser.add_argument("directory", type=Path)
    arguments = parser.parse_args()
    results: dict[str, Any] = {}
    started = False
    for kind in ("untied", "tied"):
        model, out = arguments.directory / kind, arguments.directory / arguments.layout / kind

        def config_of(model: Path = model, out: Path = out, **trainer: object) -> Config:
            return make_config(model, out, trainer={**LAYOUTS[arguments.layout], **trainer})

        if not started:
            setup.start(config_of())
            started = True
        results[kind] = check_model(config_of, arguments.directory / "single" / kind)
    (arguments.directory / arguments.layout).mkdir(exist_ok=True)
    torch.save(results, arguments.directory / arguments.layout / f"rank_{dist.get_rank()}.pt")
    setup.stop()


def check_model(config_of: Any, reference: Path) -> dict[str, Any]:
    """All checks on one model."""
    config = config_of(distributed_optimizer=False)
    read = count_reads()
    trainer = new_trainer(config)
    results: dict[str, Any] = {
        "logits_gap": logits_gap(trainer, config.model.path),
        "read": sum(read),
        "held": sum(parameter.numel() for parameter in trainer.model.parameters()),
        "round_trip": {name: tensor.clone() for name, tensor in trainer.hf_weights()},
    }
    batch = make_batch(make_groups(), config)
    share = trainer.share(batch.updates[0])
    # On policy, and with log-probs of another policy as the old ones: ratios away from 1, some of them clipped.
    rollout = [Given(sampled=micro.rollout_logprobs) for micro in share.micro_batches]
    for name, given in (("on_policy", []), ("clipped", rollout)):
        metrics = trainer.gradients(share, given)
        results[name] = (hf_named(trainer, lambda parameter: parameter.main_grad), metrics.values())
    results["objectives"] = {}
    for name, case in objectives.cases().items():
        loss = objectives.compute(trainer, config, case)
        results["objectives"][name] = (hf_named(trainer, lambda parameter: parameter.main_grad), loss)
    trainer.use(config)
    results["engine"] = [engine_gaps(trainer, batch, version) for version in range(3)]
    results["resume"] = {
        sharded: resume_gaps(config_of(distributed_optimizer=sharded), batch) for sharded in (False, True)
    }
    results["from_single"] = continue_from(config_of(distributed_optimizer=True), reference, batch)
    return results


def count_reads() -> list[int]:
    """From now on, the number of elements of each read from a checkpoint of Hugging Face's."""
    counts: list[int] = []
    original = HfReader.read

    def read(self: HfReader, name: str, index: tuple[slice, ...]) -> torch.Tensor:
        tensor = original(self, name, index)
        counts.append(tensor.numel())
        return tensor

    HfReader.read = read  # type: ignore[method-assign]
    return counts


def new_trainer(config: Config) -> Trainer:
    """A trainer of the tiny model."""
    return Trainer(config, read_model_spec(config.model.path), VOCABULARY)


def hf_named(trainer: Trainer, read: Any = lambda parameter: parameter.data) -> dict[str, torch.Tensor]:
    """What `read` takes of each parameter, whole, in HF names."""
    return {name: tensor.clone() for name, tensor in gather_hf(trainer.model, trainer.spec.shape, read)}


def logits_gap(trainer: Trainer, model: Path) -> float | None:
    """Largest difference from transformers' logits; None where this rank has no logits."""
    tokens = torch.randint(0, 37, (2, 12), generator=torch.Generator().manual_seed(3))
    blank = torch.zeros(2, 12)
    micro = MicroBatch(
        tokens=tokens,
        labels=tokens,
        mask=blank.bool(),
        weights=blank,
        advantages=blank,
        rollout_logprobs=blank,
        response_ids=blank.long() - 1,
        group_ids=blank.long() - 1,
        responses=2,
        numbers=(),
    )

    def keep(batch: MicroBatch, number: int, logits: torch.Tensor) -> Any:
        return logits.sum() * 0, torch.zeros((), dtype=torch.int), logits

    with torch.no_grad():
        kept = trainer._run(Share(micro_batches=(micro,), seq_length=12), keep, forward_only=True)
    if not kept:
        return None
    group = setup_group()
    shards = [torch.empty_like(kept[0]) for _ in range(group.size())]
    dist.all_gather(shards, kept[0].contiguous(), group=group)
    with torch.no_grad():
        expected = Qwen2ForCausalLM.from_pretrained(model, dtype=torch.float32)(tokens).logits
    return float((torch.cat(shards, -1)[..., :37] - expected).abs().max())


def setup_group() -> dist.ProcessGroup:
    """The tensor-parallel group."""
    from megatron.core import parallel_state

    return parallel_state.get_tensor_model_parallel_group()


def engine_gaps(trainer: Trainer, batch: TrainBatch, version: int) -> dict[str, Any]:
    """Sync, sample greedily, and score what was sampled with the trainer; then train a step, for the next round."""
    prompts = [group.prompt.ids for group in make_groups()]
    engine = EmbeddedEngine(
        trainer.config.model.path,
        eos_token_ids=frozenset({2}),
        vocabulary=VOCABULARY,
        dtype=torch.float32,
        max_concurrent=3,
    )
    engine.start()
    engine.update_weights(trainer.hf_weights(), version)
    sampling = Sampling(temperature=trainer.config.rollout.temperature, greedy=True)
    requests = [Request(prompt_ids=prompt, seeds=(0,), max_tokens=9) for prompt in prompts]
    answers = {number: response for number, _, response in engine.generate(requests, sampling)}
    gaps, greedy = [], True
    for number, prompt in enumerate(prompts):
        ids, start = prompt + answers[number].ids, len(prompt) - 1
        width = len(ids) - 1 + (len(ids) - 1) % 2  # sequence parallelism wants an even length
        tokens = torch.tensor([*ids, *[0] * (width + 1 - len(ids))])
        blank = torch.zeros(1, width)
        micro = MicroBatch(
            tokens=tokens[None, :-1],
            labels=tokens[None, 1:],
            mask=blank.bool(),
            weights=blank,
            advantages=blank,
            rollout_logprobs=blank,
            response_ids=blank.long() - 1,
            group_ids=blank.long() - 1,
            responses=1,
            numbers=(),
        )
        best = best_logprobs(trainer, micro)
        scored = trainer.logprobs(Share(micro_batches=(micro,), seq_length=width))
        if scored:
            mine = scored[0][0, start : len(ids) - 1]
            gaps.append(float((mine - torch.tensor(answers[number].logprobs)).abs().max()))
            greedy &= bool((best[0, start : len(ids) - 1] - mine).abs().max() < 1e-6)
    metrics = trainer.train(batch)
    return {
        "logprob_gap": max(gaps) if gaps else None,
        "greedy": greedy,
        "version": {version for response in answers.values() for version in response.weight_versions},
        "grad_norm": metrics.values()["train/grad_norm"],
    }


def best_logprobs(trainer: Trainer, micro: MicroBatch) -> torch.Tensor:
    """The highest log-probability of any token at each position, by scoring every token as if it were the label."""
    seq_length = micro.tokens.shape[1]
    best = torch.full(micro.tokens.shape, float("-inf"))
    for token in range(VOCABULARY):
        labels = torch.full_like(micro.tokens, token)
        asked = MicroBatch(**{**vars(micro), "labels": labels})
        for scored in trainer.logprobs(Share(micro_batches=(asked,), seq_length=seq_length)):
            best = torch.maximum(best, scored)
    return best


def resume_gaps(config: Config, batch: TrainBatch) -> dict[str, float]:
    """Train, save, train on; against a fresh trainer that loads and trains on. Largest differences after both."""
    first = new_trainer(config)
    first.train(batch)
    path = save_checkpoint(config, first, run_state(first))
    saved = hf_named(first)
    first.train(batch)
    second = new_trainer(config)
    load_checkpoint(path, second, run_state(second, updates=first.updates_done // 2))
    loaded = hf_named(second)
    second.train(batch)
    return {"loaded": gap(saved, loaded), "continued": gap(hf_named(first), hf_named(second))}


def continue_from(config: Config, reference: Path, batch: TrainBatch) -> dict[str, dict[str, torch.Tensor]]:
    """Weights as loaded from the checkpoint that the single process left, and after one more step."""
    path = next(reference.glob("checkpoints/step_*"), None)
    assert path is not None
    trainer = new_trainer(config)
    load_checkpoint(path, trainer, run_state(trainer, updates=2))
    loaded = hf_named(trainer)
    trainer.train(batch)
    return {"loaded": loaded, "continued": hf_named(trainer)}


def run_state(trainer: Trainer, updates: int | None = None) -> RunState:
    """Only the number of updates matters here."""
    done = trainer.updates_done if updates is None else updates
    return RunState(step=1, updates=done, prompts_drawn=0, fixed={})


def gap(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Largest absolute difference of two models."""
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)


if __name__ == "__main__":
    main()
