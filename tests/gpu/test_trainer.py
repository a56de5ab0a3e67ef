"""What only a GPU can show of the trainer: Transformer Engine against local layers, kernels, device memory."""

from typing import Any

import pytest
import torch

from megatron_rl.resharding.gather import gather_hf
from megatron_rl.resharding.names import FAMILIES, Family
from megatron_rl.training.objective import Given
from megatron_rl.training.optimizer import state_tensors
from megatron_rl.training.trainer import Share, Trainer
from megatron_rl.types import TrainedResponse
from tests.cases.responses import trained_response
from tests.gpu.conftest import SHAPE, Make, device_bytes

LENGTHS = (3, 200, 17, 64, 1, 129)
TE = {"implementation": {"layers": "transformer_engine"}}
LOCAL = {"implementation": {"layers": "local", "adam": "torch", "logprobs": "eager", "fused_gradients": False}}


def responses(lengths: tuple[int, ...] = LENGTHS) -> list[TrainedResponse]:
    """Random answers of these lengths behind prompts of 5 tokens; the same for the same length."""
    made = []
    for number, length in enumerate(lengths):
        draw = torch.Generator().manual_seed(length)
        ids = torch.randint(0, SHAPE.vocab - 3, (5 + length,), generator=draw).tolist()
        made.append(
            trained_response(
                prompt_ids=tuple(ids[:5]),
                response_ids=tuple(ids[5:]),
                rollout_logprobs=(-1.0,) * length,
                advantage=1.0 - number,
                weight=1.0 / sum(lengths),
                group=number // 2,
                number=number,
            )
        )
    return made


def by_length(trainer: Trainer, lengths: tuple[int, ...] = LENGTHS) -> dict[int, torch.Tensor]:
    """Log-probs of each response, packed with the others."""
    share = trainer.share(responses(lengths))
    found = {}
    for micro, logprobs in zip(share, trainer.logprobs(share), strict=True):
        for place, number in enumerate(micro.numbers):
            found[lengths[number]] = logprobs[micro.response_ids == place].float()
    return found


def gradient(trainer: Trainer) -> torch.Tensor:
    """Of an update, off policy, flat, in the order of HF's names."""
    share: Share = trainer.share(responses())
    trainer.gradients(share, [Given(sampled=micro.rollout_logprobs) for micro in share])
    read: Any = lambda parameter: parameter.main_grad  # noqa: E731
    whole = gather_hf(trainer.model, SHAPE, read)  # Transformer Engine has other parameters
    return torch.cat([tensor.flatten().clone() for _, tensor in whole])


def far(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


@pytest.mark.needs("transformer_engine")
@pytest.mark.parametrize("family", FAMILIES)
def test_transformer_engine_equals_local_layers_in_logprobs_and_gradients(family: Family, make: Make) -> None:
    local, te = make(family, **LOCAL), make(family, **TE)
    expected, found = by_length(local), by_length(te)
    for length in LENGTHS:
        assert (found[length] - expected[length]).abs().mean() < 0.02, length  # bfloat16
    assert far(gradient(te), gradient(local)) < 0.05


@pytest.mark.needs("transformer_engine")
def test_transformer_engine_keeps_packed_sequences_apart(make: Make) -> None:
    trainer = make(**TE)
    together, alone = by_length(trainer), {length: by_length(trainer, (length,))[length] for length in LENGTHS}
    for length in LENGTHS:
        assert (together[length] - alone[length]).abs().mean() < 0.01, length


def test_compiled_logprobs_equal_eager_ones(make: Make) -> None:
    eager = make(**LOCAL)
    compiled = make(implementation={**LOCAL["implementation"], "logprobs": "compiled"})
    expected, found = by_length(eager), by_length(compiled)
    for length in LENGTHS:
        assert (found[length] - expected[length]).abs().max() < 1e-3, length
    assert far(gradient(compiled), gradient(eager)) < 1e-3


def test_asleep_the_device_is_given_back_and_waking_restores_every_bit(make: Make) -> None:
    trainer = make(**LOCAL)
    assert trainer.memory
    share = trainer.share(responses())
    trainer.gradients(share)
    trainer.step()
    held = [*trainer.parameters(), *state_tensors(trainer.optimizer)]
    before = [tensor.detach().cpu().clone() for tensor in held]
    awake = device_bytes()
    trainer.memory.sleep()
    trainer.memory.sleep()
    asleep, figures = device_bytes(), trainer.memory.take_figures()
    given_back = (figures["memory/offloaded_gb"] + figures["memory/dropped_gb"]) * 1e9
    assert given_back > 2e7
    assert awake - asleep > 0.9 * given_back  # the allocator keeps pieces of its blocks
    trainer.memory.wake()
    trainer.memory.wake()
    assert all(torch.equal(tensor.detach().cpu(), was) for tensor, was in zip(held, before, strict=True))
    trainer.gradients(share)
    trainer.step()


def test_optimizer_state_on_the_host_trains_as_on_the_device(make: Make) -> None:
    device, host = make(**LOCAL), make(**LOCAL, memory={"optimizer_on_host": True})
    for trainer in (device, host):
        for _ in range(2):
            trainer.gradients(trainer.share(responses()))
            trainer.step()
    for a, b in zip(host.parameters(), device.parameters(), strict=True):
        assert far(a.float(), b.float()) < 1e-3


@pytest.mark.needs("fused_weight_gradient_mlp_cuda")
def test_fused_gradient_accumulation_equals_the_unfused(make: Make) -> None:
    fused = make(implementation={"layers": "local", "fused_gradients": True})
    assert far(gradient(fused), gradient(make(**LOCAL))) < 0.02


@pytest.mark.needs("transformer_engine")
@pytest.mark.parametrize("fp8", ["tensorwise", "blockwise"])
def test_fp8_is_near_bfloat16(make: Make, fp8: str) -> None:
    expected = by_length(make(**TE))
    found = by_length(make(implementation={"layers": "transformer_engine", "fp8": fp8}))
    for length in LENGTHS:
        assert (found[length] - expected[length]).abs().mean() < 0.2, length


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recompute_changes_no_gradient(make: Make, recompute: str) -> None:
    assert far(gradient(make(**LOCAL, memory={"recompute": recompute})), gradient(make(**LOCAL))) < 1e-3
