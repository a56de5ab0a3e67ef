"""What computes: chosen from what is installed, or forced, or refused with the reason."""

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

from megatron_rl.errors import UserError
from megatron_rl.training import cpu, implementation
from megatron_rl.training.implementation import Implementation
from megatron_rl.training.options import TrainerConfig


def choose(dtype: str = "bfloat16", **options: Any) -> Implementation:
    return implementation.choose(TrainerConfig.model_validate({"dtype": dtype, "implementation": options}))


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    implementation._fault.cache_clear()
    yield
    implementation._fault.cache_clear()


def with_gpu(monkeypatch: pytest.MonkeyPatch, *installed: str) -> None:
    """A GPU, and importable modules of these names; the others are absent."""
    monkeypatch.setattr(cpu, "has_cuda", lambda: True)
    for name in implementation._MODULES.values():
        for part in (name.partition(".")[0], name):
            monkeypatch.setitem(sys.modules, part, ModuleType(part) if name in installed else None)


@pytest.mark.skipif(torch.cuda.is_available(), reason="what a machine without a GPU uses")
def test_without_a_gpu_everything_is_local_and_the_line_says_so() -> None:
    assert str(choose()) == (
        "local layers, SDPA attention, torch Adam, log-probs eager, gradient accumulation not fused"
    )


def test_the_fastest_that_is_installed_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpu(monkeypatch, "transformer_engine.pytorch", "fused_weight_gradient_mlp_cuda", "triton")
    chosen = choose(attention="flash", fp8="blockwise")
    assert (chosen.layers, chosen.attention, chosen.adam) == ("transformer_engine", "flash", "transformer_engine")
    assert (chosen.fused_gradients, chosen.logprobs, chosen.fp8) == (True, "compiled", "blockwise")
    assert str(chosen).endswith("gradient accumulation fused, FP8 blockwise")


def test_apex_comes_before_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpu(monkeypatch, "apex.optimizers")
    chosen = choose()
    assert (chosen.layers, chosen.attention, chosen.adam, chosen.fused_gradients) == ("local", "SDPA", "apex", False)


def test_slower_ones_can_be_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpu(monkeypatch, *implementation._MODULES.values())
    chosen = choose(layers="local", adam="torch", fused_gradients=False, logprobs="eager")
    assert (chosen.layers, chosen.adam, chosen.fused_gradients, chosen.logprobs) == ("local", "torch", False, "eager")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"layers": "transformer_engine"},
            "implementation.layers: .* there is no GPU",
        ),
        ({"adam": "apex"}, "implementation.adam: apex can't be used here: there is no GPU"),
        ({"fused_gradients": True}, "implementation.fused_gradients: fused_weight_gradient_mlp_cuda .* no GPU"),
        ({"fp8": "tensorwise"}, "implementation.fp8: needs the layers of transformer_engine: there is no GPU"),
        ({"attention": "flash"}, "implementation.attention: needs the layers of transformer_engine"),
    ],
)
def test_what_is_forced_and_absent_is_refused_with_the_reason(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        choose(**options)


def test_fp8_with_local_layers_is_refused_where_transformer_engine_is_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with_gpu(monkeypatch, *implementation._MODULES.values())
    with pytest.raises(UserError, match=r"set trainer\.implementation\.layers to it"):
        choose(layers="local", fp8="mxfp8")


def test_a_part_built_for_another_cuda_is_absent_and_its_error_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpu(monkeypatch)

    def broken(name: str) -> ModuleType:
        raise OSError(f"{name}:\n libcudart.so.99: cannot open")

    monkeypatch.setattr(implementation.importlib, "import_module", broken)
    assert choose().layers == "local"
    with pytest.raises(UserError, match=r"transformer_engine.*: libcudart\.so\.99: cannot open"):
        choose(layers="transformer_engine")


def test_float32_has_local_layers_and_refuses_transformer_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpu(monkeypatch, *implementation._MODULES.values())
    assert choose("float32").layers == "local"
    with pytest.raises(UserError, match=r"layers of transformer_engine: .* takes trainer\.dtype=bfloat16 only"):
        choose("float32", layers="transformer_engine")


def test_without_a_c_compiler_nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpu(monkeypatch, "triton")
    assert choose().logprobs == "compiled"
    implementation._fault.cache_clear()
    monkeypatch.setattr(implementation.shutil, "which", lambda name: None)
    assert choose().logprobs == "eager"
