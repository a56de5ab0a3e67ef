"""One layer of Qwen2.5-32B with its real shapes and vocabulary (2.04 B parameters): its memory, measured.

Two processes (TP 2), bf16, fp32 gradients, no optimizer: loss and gradient of 2,048 packed tokens, in 24 GB
of host memory and less than two minutes on two cores. Prints a table of bytes computed and measured.

    torchrun --standalone --nproc-per-node 2 -m tests.benchmarks.one_layer
"""

import math
import time
from types import SimpleNamespace

import torch
import torch.distributed as dist

from megatron_rl.config import Config
from megatron_rl.resharding.names import Shape
from megatron_rl.training import cpu, setup
from megatron_rl.training.buffers import Seat
from megatron_rl.training.data_parallel import wrap
from megatron_rl.training.hf_config import ModelSpec
from megatron_rl.training.memory import GB, memory
from megatron_rl.training.model import build_model
from megatron_rl.training.trainer import Trainer
from megatron_rl.types import TrainedResponse
from tests.cases.responses import trained_response
from tests.measure import gradient_bytes, in_memory, kept_for_backward, peak, reset_peak, storages
from tests.tiny import run_config

SPEC = ModelSpec(
    shape=Shape(
        layers=1, hidden=5120, heads=40, kv_heads=8, head_dim=128, intermediate=27648, vocab=152064, tied=False
    ),
    norm_eps=1e-5,
    rope_theta=1e6,
    rope_factor=None,
    max_positions=32768,
    eos_token_ids=frozenset({151645}),
)
VOCABULARY = 151665  # of Qwen2.5's tokenizer
LENGTHS = (900, 500, 350, 200, 98)
TRAINER = {
    "tensor_parallel_size": 2,
    "micro_batch_size": len(LENGTHS),
    "distributed_optimizer": False,
}
TOLERANCE = 0.1


class WithoutOptimizer(Trainer):
    """A trainer that computes gradients and never steps: fp32 parameters and moments would not fit."""

    def __init__(self, config: Config, spec: ModelSpec, vocabulary: int) -> None:
        """As the trainer does, but for the optimizer, and with random weights."""
        self.spec, self.vocabulary = spec, vocabulary
        self.model = build_model(spec, config.trainer)
        for parameter in self.parameters():
            fill(parameter.data)
        self.chunks = wrap(self.model, config.trainer)
        self.optimizer = SimpleNamespace(zero_grad=lambda: None)
        self.updates_done, self.reference = 0, None
        self.use(config)


def fill(weights: torch.Tensor) -> None:
    """Norms 1, the rest normal with a deviation of 0.02, a million at a time: torch draws them in fp32 first."""
    if weights.dim() == 1:
        weights.fill_(1.0)
        return
    for part in weights.view(-1).split(1 << 20):
        part.normal_(std=0.02)


def responses() -> list[TrainedResponse]:
    """Behind prompts of 50 tokens, `LENGTHS` tokens with their prompts, 2,048 in all."""
    draw = torch.Generator().manual_seed(0)
    found = []
    for number, length in enumerate(LENGTHS):
        ids = tuple(torch.randint(0, VOCABULARY, (length + 1,), generator=draw).tolist())
        found.append(
            trained_response(
                prompt_ids=ids[:50],
                response_ids=ids[50:],
                rollout_logprobs=(-math.log(VOCABULARY),) * (length - 49),
                advantage=(-1.0) ** number,
                weight=1 / 2048,
                group=0,
                number=number,
            )
        )
    return found


def main() -> None:
    """Measure, print, and fail when the formula is off."""
    config = run_config(trainer=TRAINER)
    setup.start(config)
    baseline = in_memory()
    trainer = WithoutOptimizer(config, SPEC, VOCABULARY)
    share = trainer.share(responses())
    dist.barrier()
    reset_peak()
    begun = time.perf_counter()
    with kept_for_backward(trainer) as kept:
        loss = trainer.gradients(share).values()["loss/objective"]
    seconds = time.perf_counter() - begun
    most = peak() - baseline
    squares = torch.stack([parameter.main_grad.norm() for parameter in trainer.parameters()]).square().sum()
    dist.all_reduce(squares)  # the norms' gradients, which both ranks have, twice
    expected = memory(SPEC.shape, config.trainer, Seat(), lengths=share[0].lengths, on_cpu=not cpu.has_cuda())
    parameters, gradients = sum(storages(trainer.parameters()).values()), gradient_bytes(trainer)
    activations = sum(kept.values())
    rows = {
        "parameters (bf16)": (expected.parameters, parameters),
        "gradients (fp32)": (expected.gradients, gradients),
        "activations": (expected.activations, activations),
        "logits, in backward": (expected.backward, most - parameters - gradients - activations),
        "peak": (expected.training - expected.optimizer, most),
    }
    elements = sum(parameter.numel() for parameter in trainer.parameters())
    if dist.get_rank() == 0:
        print(f"loss {loss:.4f}, gradient norm {float(squares) ** 0.5:.3f}; {sum(LENGTHS)} tokens in {seconds:.0f} s;")
        print(f"{2 * elements / 1e9:.2f} B parameters, of each of 2 processes:\n")
        print("| part | formula, GB | measured, GB |\n|---|---:|---:|")
        for part, (computed, measured) in rows.items():
            print(f"| {part} | {computed / GB:.2f} | {measured / GB:.2f} |")
    assert math.isfinite(loss)
    assert math.isfinite(squares)
    assert squares > 0
    assert (expected.parameters, expected.gradients) == (parameters, gradients)
    assert abs(most / rows["peak"][0] - 1) < TOLERANCE, f"peak {most:,} bytes, formula {rows['peak'][0]:,}"
    setup.stop()


if __name__ == "__main__":
    main()
