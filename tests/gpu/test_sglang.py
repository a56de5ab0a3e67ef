"""What only a GPU can show of SGLang's servers: CUDA IPC, memory that is really given back, CUDA graphs."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from megatron_rl.resharding.sync import WeightSync
from megatron_rl.rollout.engine import Request, Sampling, generate
from megatron_rl.rollout.groups import EngineGroup
from megatron_rl.rollout.sglang import SglangEngine
from megatron_rl.rollout.sglang_buckets import Buckets
from megatron_rl.training import cpu, setup
from megatron_rl.training.hf_config import read_model_spec
from tests.gpu.conftest import SHAPE, Make
from tests.tiny import run_config

pytestmark = [pytest.mark.needs("sglang"), pytest.mark.needs("torch_memory_saver")]
PROMPT = tuple(range(5, 45))
VOCABULARY = SHAPE.vocab - 3


@pytest.fixture(scope="module")
def engine(model: Path, joined: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SglangEngine]:
    """A server on this GPU with CUDA graphs, asleep."""
    config = run_config(
        run_dir=tmp_path_factory.mktemp("run"),
        model={"path": model},
        trainer={"dtype": "bfloat16"},
        rollout={"engine": "sglang", "sglang": {"memory_fraction": 0.5}},
    )
    group = EngineGroup(rank=0, size=1, world=1)
    running = SglangEngine(config, read_model_spec(model), group, eos_token_ids=frozenset({2}), vocabulary=VOCABULARY)
    before = cpu.used_bytes(cpu.device())
    try:
        running.start()
        running.sleep()
        # Graphs too are given back; what CUDA and SGLang's processes work in stays.
        assert cpu.used_bytes(cpu.device()) - before < 3e9
        yield running
    finally:
        running.stop()


def weights(model: Path) -> list[tuple[str, torch.Tensor]]:
    whole = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).to(cpu.device())
    return [(name, parameter.data) for name, parameter in whole.named_parameters()]


def scores(engine: SglangEngine) -> torch.Tensor:
    return torch.tensor(engine.score([PROMPT])[0])


def awake(engine: SglangEngine, tensors: list[tuple[str, torch.Tensor]], version: int) -> None:
    engine.wake()
    engine.update_weights(tensors, version)
    engine.resume()


def test_sglang_takes_weights_by_cuda_ipc(engine: SglangEngine, model: Path) -> None:
    whole = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    expected = whole(torch.tensor([PROMPT])).logits[0, :-1, :VOCABULARY].log_softmax(-1)
    expected = expected[range(len(PROMPT) - 1), list(PROMPT[1:])]
    tensors = weights(model)
    engine._buckets = Buckets(cpu.device(), 300_000)  # many
    for version, factor in ((1, 1.0), (2, 0.5), (3, 1.0)):
        awake(engine, [(name, tensor * factor) for name, tensor in tensors], version)
        far = (scores(engine) - expected).abs().mean()
        assert (far < 0.05) == (factor == 1.0), (version, far)
        engine.sleep()


def test_sglang_takes_slices_by_cuda_ipc(engine: SglangEngine, make: Make) -> None:
    """Bit by bit what whole tensors bring, from NaN, in many buckets of memory that is used again."""
    trainer, group = make(), dist.distributed_c10d._get_default_group()
    groups = setup.Groups(everyone=group, store=dist.distributed_c10d._get_default_store())
    sync = WeightSync(engine.config, SHAPE, VOCABULARY, groups, engine, engine.group)
    sync.bucket_bytes = 300_000
    spoilt = [(name, torch.full_like(tensor, torch.nan)) for name, tensor in trainer.hf_weights()]
    for version in (1, 2):
        engine.wake()
        engine.update_weights(spoilt, 0)
        sync.push(trainer.model, version)
        sync.compare(trainer.model, version)
        engine.sleep()


def test_sglang_sleeps_in_bytes_of_the_device(engine: SglangEngine, model: Path) -> None:
    asleep = cpu.used_bytes(cpu.device())
    awake(engine, weights(model), 4)
    total = torch.cuda.mem_get_info()[1]
    assert cpu.used_bytes(cpu.device()) - asleep > 0.3 * total  # half of it is the engine's, less what CUDA works in
    engine.sleep()
    assert abs(cpu.used_bytes(cpu.device()) - asleep) < 0.01 * total


def test_sglang_cuda_graphs_after_a_sleep(engine: SglangEngine, model: Path) -> None:
    """Graphs hold addresses: after a sleep decoding still reads the new weights and its own cache."""
    request = Request(prompt_ids=PROMPT, seeds=(0,), max_tokens=64)
    answers = []
    for version in (5, 6):
        awake(engine, weights(model), version)
        (answer,) = [response for _, _, response in generate(engine, [request], Sampling(greedy=True))]
        rescored = torch.tensor(engine.score([PROMPT + answer.ids])[0][len(PROMPT) - 1 :])
        assert (torch.tensor(answer.logprobs) - rescored).abs().mean() < 0.05  # decoded by graphs, scored without
        answers.append(answer.ids)
        engine.sleep()
    assert answers[0] == answers[1]
