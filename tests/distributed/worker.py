"""Runs in every process of a layout: many checks in one launch; each rank saves results for the tests to judge."""

import argparse
import queue
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core import parallel_state as mpu
from megatron.core.dist_checkpointing.strategies import filesystem_async
from transformers import AutoModelForCausalLM

from megatron_rl.config import AlgorithmConfig, Config
from megatron_rl.resharding.gather import gather_hf
from megatron_rl.resharding.hf_files import HfReader
from megatron_rl.rollout.embedded import EmbeddedEngine
from megatron_rl.rollout.engine import Request, Sampling, generate
from megatron_rl.training import setup
from megatron_rl.training.batch import make_batch
from megatron_rl.training.checkpoint import load_checkpoint
from megatron_rl.training.hf_config import read_model_spec
from megatron_rl.training.micro_batches import held_tokens
from megatron_rl.training.model import _build_chunk, all_tokens, load_weights, output_weight, transformer_config
from megatron_rl.training.objective import Given
from megatron_rl.training.optimizer import state_tensors
from megatron_rl.training.run_state import RunState, latest_checkpoint
from megatron_rl.training.saver import Saver, Snapshot
from megatron_rl.training.sharded_state import own_chunks
from megatron_rl.training.trainer import Share, Trainer
from megatron_rl.types import MicroBatch, TrainBatch, TrainedResponse
from tests.cases.responses import trained_response
from tests.distributed import delivery_cases, memory_cases, objectives
from tests.distributed.data import VOCABULARY, converted, make_config, make_groups

TP2: dict[str, object] = {"tensor_parallel_size": 2}
PP2: dict[str, object] = {"pipeline_parallel_size": 2}
CP2: dict[str, object] = {"context_parallel_size": 2}
SP: dict[str, object] = {"sequence_parallel": True}
INTERLEAVED: dict[str, object] = {"pipeline_chunks": 2}
SOME_AGAIN: dict[str, object] = {"memory": {"recompute": "selective", "recompute_modules": ["core_attn", "mlp"]}}
ALL_AGAIN: dict[str, object] = {"memory": {"recompute": "full"}}
SEQUENCES = ((1, 9, 17, 4, 4), (3, 21), tuple(range(3, 28)))
"""To be scored: three, which PP 2 does not divide; lengths that CP 2 pads."""

LAYOUTS: dict[str, tuple[int, dict[str, object]]] = {
    "single": (1, {}),
    "tp2": (2, TP2 | SOME_AGAIN),
    "cp2": (2, CP2),
    "tp2_pp2": (4, TP2 | PP2),
    "tp2_cp2_sp": (4, TP2 | CP2 | SP | ALL_AGAIN),
    "pp2_cp2": (4, PP2 | CP2 | ALL_AGAIN),
    "tp2_sp_dp2": (4, TP2 | SP),
    "pp2_dp2": (4, PP2 | INTERLEAVED),
    "cp2_dp2": (4, CP2 | {"overlap_grad_reduce": False}),
}
"""By name: processes and layout. Of TP, PP, CP and DP every pair meets in one of them; some compute activations again,
and in one the pipeline is interleaved."""

KINDS = ("untied", "tied")
"""Of Qwen2, for all checks."""

OTHER_FAMILIES = ("qwen3", "llama")
FEW_LAYOUTS = ("single", "tp2", "cp2", "tp2_sp_dp2", "pp2_dp2")
"""In these, other families are checked where they differ: weights and gradients."""


def main() -> None:
    """Check one layout on all models."""
    parser = argparse.ArgumentParser()
    parser.add_argument("layout", choices=LAYOUTS)
    parser.add_argument("directory", type=Path)
    arguments = parser.parse_args()
    results: dict[str, Any] = {}
    started = False
    for kind in KINDS + (OTHER_FAMILIES if arguments.layout in FEW_LAYOUTS else ()):
        model, out = arguments.directory / kind, arguments.directory / arguments.layout / kind

        def config_of(model: Path = model, out: Path = out, **trainer: object) -> Config:
            return make_config(model, out, trainer={**LAYOUTS[arguments.layout][1], **trainer})

        if not started:
            setup.start(config_of())
            started = True
        check = check_model if kind in KINDS else check_family
        results[kind] = check(config_of, arguments.directory / "single" / kind)
    (arguments.directory / arguments.layout).mkdir(exist_ok=True)
    torch.save(results, arguments.directory / arguments.layout / f"rank_{dist.get_rank()}.pt")
    setup.stop()


def check_family(config_of: Any, _: Path) -> dict[str, Any]:
    """The checks of weights, gradients and memory; one step, with the engine before it."""
    trainer, batch, results = check_gradients(config_of)
    return results | {"engine": [engine_gaps(trainer, batch, version=0)]}


def check_gradients(config_of: Any) -> tuple[Trainer, TrainBatch, dict[str, Any]]:
    """With the weights as they were read."""
    config = config_of(distributed_optimizer=False)
    read = count_reads()
    trainer = new_trainer(config)
    results: dict[str, Any] = {
        "logits_gap": logits_gap(trainer, config.model.path),
        "read": sum(read),
        "held": sum(parameter.numel() for parameter in trainer.parameters()),
        "round_trip": {name: tensor.clone() for name, tensor in trainer.hf_weights()},
    }
    batch = make_batch(make_groups(), config)
    share = trainer.share(batch.updates[0])
    # On policy, and with log-probs of another policy as the old ones: ratios away from 1, some of them clipped.
    rollout = [Given(sampled=micro.rollout_logprobs) for micro in share]
    for name, given in (("on_policy", []), ("clipped", rollout)):
        metrics = trainer.gradients(share, given)
        results[name] = (hf_named(trainer, lambda parameter: parameter.main_grad), metrics.values())
    results["memory"] = memory_cases.compare(config_of)
    results["megatron"] = from_megatron_format(config_of, converted(config.model.path))
    return trainer, batch, results


def check_model(config_of: Any, reference: Path) -> dict[str, Any]:
    """All checks on one model."""
    trainer, batch, results = check_gradients(config_of)
    config, share = trainer.config, trainer.share(batch.updates[0])
    results["repeated"] = differing_gradients(trainer, share, [Given(sampled=one.rollout_logprobs) for one in share])
    results["objectives"] = {}
    for name, case in ({} if trainer.spec.shape.tied else objectives.cases()).items():  # most of the time
        loss = objectives.compute(trainer, config, case)
        results["objectives"][name] = (hf_named(trainer, lambda parameter: parameter.main_grad), loss)
    in_reward = {"kl": {"coef": 0.1, "estimator": "k3", "place": "reward"}}
    trainer.use(config.model_copy(update={"algorithm": AlgorithmConfig.model_validate(in_reward)}))
    results["kl_of_responses"] = trainer.kl_of_responses(make_groups())
    trainer.use(config)
    results["score"] = trainer.score(SEQUENCES)
    results["engine"] = [engine_gaps(trainer, batch, version) for version in range(3)]
    results["resume"] = {
        sharded: resume_gaps(config_of(distributed_optimizer=sharded), batch) for sharded in (False, True)
    }
    results["on_host"] = on_host_gaps(partial(config_of, out=config.run_dir / "on_host"), batch)
    results["delivery"] = delivery_cases.compare(trainer)
    results["checkpointed"] = hf_named(restored(config_of(distributed_optimizer=True)))
    if mpu.get_pipeline_model_parallel_world_size() > 1 and len(trainer.model) == 1:
        save_with_megatron(config)
    results["from_single"] = continue_from(config_of(distributed_optimizer=True), reference, batch)
    return results


def differing_gradients(trainer: Trainer, share: Share, given: list[Given], times: int = 40) -> int:
    """How often of so many times the gradient is not, bit by bit, what it was at first: messages that get mixed up."""
    first, differing = None, 0
    for _ in range(times if trainer.config.trainer.pipeline_chunks > 1 else 2):
        trainer.gradients(share, given)
        found = torch.cat([parameter.main_grad.flatten() for parameter in trainer.parameters()])
        first = found if first is None else first
        differing += not torch.equal(found, first)
    return differing


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
    """Largest difference from transformers' logits, of sequences of several lengths packed; None without logits."""
    draw = torch.Generator().manual_seed(3)
    sequences = [tuple(torch.randint(0, 37, (length,), generator=draw).tolist()) for length in (12, 5, 1, 9)]
    share = trainer.share([scored(ids[:1], (*ids[1:], 0), number) for number, ids in enumerate(sequences)])

    def keep(batch: MicroBatch, number: int, output: torch.Tensor) -> Any:
        logits = all_tokens(output, trainer.model[-1]) @ output_weight(trainer.model[-1]).t()
        return logits.sum() * 0, torch.zeros((), dtype=torch.int), logits

    with torch.no_grad():
        kept = trainer._run(share, keep, forward_only=True)
    if not kept:  # not the last pipeline stage
        return None
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    gaps = []
    for micro, logits in zip(share, kept, strict=True):
        shards = [torch.empty_like(logits) for _ in range(mpu.get_tensor_model_parallel_world_size())]
        dist.all_gather(shards, logits.contiguous(), group=mpu.get_tensor_model_parallel_group())
        whole = torch.cat(shards, -1)[:, :37]
        held = held_tokens(micro.lengths, mpu.get_context_parallel_rank(), mpu.get_context_parallel_world_size())
        with torch.no_grad():
            for number, start, length in zip(micro.numbers, micro.starts.tolist(), micro.lengths, strict=False):
                ids = sequences[number]
                expected = reference(torch.tensor([ids])).logits[0]
                mine = ((held >= start) & (held < start + min(length, len(ids)))).nonzero().squeeze(1)
                gaps += (whole[mine] - expected[held[mine] - start]).abs().flatten().tolist()
    return max(gaps, default=None)


def scored(prompt: tuple[int, ...], response: tuple[int, ...], number: int) -> TrainedResponse:
    """A response to be scored."""
    return trained_response(
        prompt_ids=prompt,
        response_ids=response,
        rollout_logprobs=(0.0,) * len(response),
        advantage=0.0,
        weight=1.0,
        group=0,
        number=number,
    )


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
    answers = {number: response for number, _, response in generate(engine, requests, sampling)}
    asked = [scored(prompt, answers[number].ids, number) for number, prompt in enumerate(prompts)]
    share = trainer.share([replace(one, response=answers[one.number]) for one in asked])
    gaps, greedy = [], True
    for micro, mine, top in zip(share, trainer.logprobs(share), are_likeliest(trainer, share), strict=False):
        if micro.mask.any():
            gaps.append(float((mine - micro.rollout_logprobs)[micro.mask].abs().max()))
            greedy &= bool(top[micro.mask].all())
    metrics = trainer.train(batch)
    return {
        "logprob_gap": max(gaps) if gaps else None,
        "greedy": greedy,
        "version": {version for response in answers.values() for version in response.weight_versions},
        "grad_norm": metrics.values()["train/grad_norm"],
    }


def are_likeliest(trainer: Trainer, share: Share) -> list[torch.Tensor]:
    """Whether no token is likelier than the label, at each position."""

    def keep(batch: MicroBatch, number: int, output: torch.Tensor) -> Any:
        return output.sum() * 0, torch.zeros((), dtype=torch.int), trainer._score(output, batch)[2]

    with torch.no_grad():
        return trainer._run(share, keep, forward_only=True)


def resume_gaps(config: Config, batch: TrainBatch) -> dict[str, float]:
    """Train, save, train on; against a fresh trainer that loads and trains on. Largest differences after both."""
    first = new_trainer(config)
    first.train(batch)
    path = save_checkpoint(config, first, run_state(first))
    saved = hf_named(first)
    asleep = sleep_and_wake(first)
    first.train(batch)
    second = new_trainer(config)
    load_checkpoint(path, second, run_state(second, updates=first.updates_done // 2))
    loaded = hf_named(second)
    second.train(batch)
    return {"loaded": gap(saved, loaded), "continued": gap(hf_named(first), hf_named(second)), "asleep": asleep}


def sleep_and_wake(trainer: Trainer) -> float:
    """Send the trainer to sleep in two steps and wake it; bytes that it held on the device while it slept."""
    memory = trainer.memory
    assert memory
    held = [*trainer.parameters(), *state_tensors(trainer.optimizer)]
    grads = [buffer.grad_data for chunk in trainer.chunks for buffer in chunk.buffers]
    memory.sleep(keep_parameters=True)
    assert all(parameter.untyped_storage().nbytes() for parameter in trainer.parameters())
    memory.sleep()
    asleep = sum(tensor.untyped_storage().nbytes() for tensor in (*held, *grads))
    memory.wake()
    return float(asleep)


def on_host_gaps(config_of: Any, batch: TrainBatch) -> dict[str, float]:
    """The optimizer's state on the host: against the device, and stopped and resumed."""
    device, host = (config_of(dtype="bfloat16", memory={"optimizer_on_host": there}) for there in (False, True))
    trained = []
    for config in (device, host):
        trainer = new_trainer(config)
        trainer.train(batch)
        trained.append(hf_named(trainer))
    return resume_gaps(host, batch) | {"device": gap(*trained)}


def restored(config: Config) -> Trainer:
    """A trainer with the weights of the checkpoint that is there."""
    trainer, path = new_trainer(config), latest_checkpoint(config)
    assert path
    load_checkpoint(path, trainer, run_state(trainer, updates=0))
    return trainer


def from_megatron_format(config_of: Any, directory: Path) -> dict[str, dict[str, torch.Tensor]]:
    """The weights of a converted directory, as our reader and as Megatron's own loads them."""
    ours = new_trainer(config_of(model=directory))
    found = {"ours": hf_named(ours)}
    for parameter in ours.parameters():
        parameter.data.fill_(torch.nan)
    metadata = {"dp_cp_group": mpu.get_data_parallel_group(with_context_parallel=True)}
    wanted = {str(number): chunk.sharded_state_dict(metadata=metadata) for number, chunk in enumerate(ours.model)}
    loaded = dist_checkpointing.load(wanted, str(directory))
    for number, chunk in enumerate(ours.model):
        chunk.load_state_dict(loaded[str(number)])
    return found | {"megatron's": hf_named(ours)}


def save_with_megatron(config: Config) -> None:
    """As Megatron writes weights itself, the first of two pipeline stages with one layer of four."""
    spec = read_model_spec(config.model.path)
    options = transformer_config(spec, config.trainer)
    options.num_layers_in_first_pipeline_stage = 1
    chunk = _build_chunk(options, spec, config.trainer, 0)
    load_weights([chunk], spec.shape, config.model.path)
    out = config.run_dir / "uneven"
    if dist.get_rank() == 0:
        out.mkdir()
    dist.barrier()
    filesystem_async._results_queue = queue.Queue()  # else a process is started for it
    metadata = {"dp_cp_group": mpu.get_data_parallel_group(with_context_parallel=True)}
    dist_checkpointing.save(chunk.sharded_state_dict(metadata=metadata), str(out))


def continue_from(config: Config, reference: Path, batch: TrainBatch) -> dict[str, dict[str, torch.Tensor]]:
    """Weights as loaded from the checkpoint that the single process left, and after one more step."""
    path = next(reference.glob("checkpoints/step_*"), None)
    assert path is not None
    trainer = new_trainer(config)
    load_checkpoint(path, trainer, run_state(trainer, updates=2))
    loaded = hf_named(trainer)
    trainer.train(batch)
    return {"loaded": loaded, "continued": hf_named(trainer)}


def save_checkpoint(config: Config, trainer: Trainer, state: RunState) -> Path:
    """As a run does, but waiting for it."""
    default = dist.distributed_c10d
    saver = Saver(config, default._get_default_group(), default._get_default_store(), print)
    saver.begin(Snapshot(state=state, layers=trainer.spec.shape.layers, chunks=own_chunks(trainer), also=lambda _: []))
    saver.wait()
    path = latest_checkpoint(config)
    assert path
    return path


def run_state(trainer: Trainer, updates: int | None = None) -> RunState:
    """Only the number of updates matters here."""
    done = trainer.updates_done if updates is None else updates
    return RunState(step=1, updates=done, collector={}, fixed={})


def gap(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Largest absolute difference of two models."""
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)


if __name__ == "__main__":
    main()
