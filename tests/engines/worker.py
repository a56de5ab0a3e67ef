"""Megatron ranks that push their weights into SGLang servers of TP 2, again and again.

torchrun --standalone --nproc-per-node 2|4 -m tests.engines.worker tp2|tp2pp2 DIRECTORY PYTHON
"""

import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from megatron_rl.errors import UserError
from megatron_rl.resharding.names import hf_shapes
from megatron_rl.resharding.sides import engine_group
from megatron_rl.resharding.sync import WeightSync
from megatron_rl.rollout.engine import EngineLost, Request, Sampling, generate
from megatron_rl.rollout.parity import Alarms, Parity
from megatron_rl.rollout.sglang import SglangEngine
from megatron_rl.rollout.waiting import EngineWait
from megatron_rl.training import setup
from megatron_rl.training.hf_config import read_model_spec
from megatron_rl.training.trainer import Trainer
from tests.engines.processes import writing_to
from tests.tiny import run_config

EOS, VOCABULARY = frozenset({2}), 31
"""Fewer ids than the model's 37."""

PROMPTS = [(5, 6, 7, 8, 9), (10, 11, 12), (20,) * 20, tuple(range(3, 30))]


def whole_model(trainer: Trainer, directory: Path) -> Qwen2ForCausalLM:
    """What transformers makes of the trainer's weights, without the ids that are never sampled."""
    weights = {name: tensor.clone() for name, tensor in trainer.hf_weights()}
    model = Qwen2ForCausalLM(Qwen2Config.from_pretrained(directory)).eval().requires_grad_(False)
    model.load_state_dict(weights, strict=not model.config.tie_word_embeddings)
    return model


def check_answers(
    engine: SglangEngine, model: Qwen2ForCausalLM, of_trainer: list[tuple[float, ...]], version: int
) -> None:
    """Greedy answers, samples and scores are those of the weights that were pushed, by transformers and the trainer."""
    requests = [Request(prompt_ids=prompt, seeds=tuple(range(16)), max_tokens=12) for prompt in PROMPTS]
    for sampling in (Sampling(greedy=True), Sampling(temperature=0.8)):
        answers = list(generate(engine, requests, sampling))
        assert len(answers) == 64
        for number, _, response in answers:
            prompt = PROMPTS[number]
            logits = model(torch.tensor([prompt + response.ids])).logits[0, len(prompt) - 1 : -1, :VOCABULARY]
            if sampling.greedy:
                assert response.ids == tuple(logits.argmax(-1).tolist())
            expected = (logits / sampling.temperature).log_softmax(-1)[range(len(response.ids)), list(response.ids)]
            torch.testing.assert_close(torch.tensor(response.logprobs), expected, atol=1e-4, rtol=0)
            assert response.weight_versions == (version,) * len(response.ids)
    for ids, scores, expected_scores in zip(PROMPTS, engine.score(PROMPTS), of_trainer, strict=True):
        torch.testing.assert_close(torch.tensor(scores), torch.tensor(expected_scores), atol=1e-4, rtol=0)
        logits = model(torch.tensor([ids])).logits[0, :-1, :VOCABULARY].log_softmax(-1)
        torch.testing.assert_close(torch.tensor(scores), logits[range(len(ids) - 1), list(ids[1:])], atol=1e-4, rtol=0)


@torch.no_grad()
def change(trainer: Trainer, version: int) -> None:
    """Other weights."""
    for number, parameter in enumerate(trainer.parameters()):
        generator = torch.Generator().manual_seed(100 * version + number)
        parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))


def check_stale(parity: Parity, trainer: Trainer) -> None:
    """A server that did not get an update is found out."""
    change(trainer, 77)
    parity.expect(trainer.score(PROMPTS), 3)
    with pytest.raises(UserError, match="engine 0 has the weights of the update before"):
        parity.check(3)


def spoil(engine: SglangEngine) -> None:
    """All of its parameters become NaN."""
    sizes = hf_shapes(replace(engine.spec.shape, vocab=VOCABULARY))
    engine.update_weights(((name, torch.full(size, torch.nan)) for name, size in sizes.items()), version=99)


def check_refused(engine: SglangEngine) -> None:
    """A parameter that the engine doesn't have is named, and does not end the server."""
    with pytest.raises(RuntimeError, match=r"no parameter model\.abnorm\.weight"):
        engine.digests(["model.norm.weight", "model.abnorm.weight"])
    engine.end_update(version=0)


def lose_server(engine: SglangEngine) -> None:
    """One of its two schedulers dies in mid-generation; the leader alone has the server started again."""
    log_file = engine.directory / "server.log"
    schedulers = [one for one in writing_to(log_file) if "scheduler" in Path(f"/proc/{one}/cmdline").read_text()]
    assert len(schedulers) == 2
    engine.submit(0, Request(prompt_ids=PROMPTS[0], seeds=(0,) * 16, max_tokens=400), Sampling())
    os.kill(schedulers[1], signal.SIGKILL)
    with pytest.raises(EngineLost):  # noqa: PT012
        while True:
            assert engine.poll(1.0) == []
    engine.restart()


def main() -> None:
    """Three updates: the first, and two with other weights, each through a sleep; with TP 2 one loses the server."""
    layout, directory, python = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    config = run_config(
        run_dir=directory / f"run_{layout}",
        model={"path": directory / "model"},
        trainer={
            "tensor_parallel_size": 2,
            "pipeline_parallel_size": setup.world_size() // 2,
            "dtype": "float32",
            "micro_batch_size": 4,
        },
        rollout={
            "engine": "sglang",
            "tensor_parallel_size": 2,
            "sglang": {
                "python": python,
                "extra_args": ["--max-total-tokens", "16384"],
                "start_timeout_s": 400,
                "hung_after_s": 30,
            },
        },
        reshard={"verify": "always"},
    )
    spec = read_model_spec(config.model.path)
    group = engine_group(config, spec.shape)
    groups = setup.start(config, group)
    engine = SglangEngine(config, spec, group, eos_token_ids=EOS, vocabulary=VOCABULARY, ranks=groups.engine)
    try:
        engine.start()
        engine.sleep()
        push_thrice(Trainer(config, spec, VOCABULARY), engine, groups)
    finally:
        engine.stop()
    setup.stop(groups)


def push_thrice(trainer: Trainer, engine: SglangEngine, groups: setup.Groups) -> None:
    """Each time every parameter was NaN before, and is afterwards what a gather makes of it, bit for bit."""
    config, group = engine.config, engine.group
    sync = WeightSync(config, engine.spec.shape, VOCABULARY, groups, engine, group)
    sync.bucket_bytes = engine._buckets.size = 30_000  # many, not one
    wait = EngineWait(groups.store, group, timeout_s=60)
    parity = Parity(PROMPTS, engine, wait, Alarms(1e-3), print)
    for version in (0, 1, 2):
        engine.wake()
        spoil(engine)
        sync.push(trainer.model, version)
        if version == 0:
            check_refused(engine)
        engine.resume()
        model, of_trainer = whole_model(trainer, config.model.path), trainer.score(PROMPTS)
        if group.leads:
            check_answers(engine, model, of_trainer, version)
        parity.expect(of_trainer, version)
        parity.check(version)
        sync.compare(trainer.model, version)
        if group.leads:
            print(f"version {version} is right\n", end="", flush=True)  # at once: other ranks write too
        if version == 2:
            check_stale(parity, trainer)
        if version == 1 and group.engines == 1 and group.leads:
            lose_server(engine)
        engine.sleep()
        change(trainer, version)


if __name__ == "__main__":
    main()
