"""Megatron's optimizer, and what goes wrong when its state is saved and loaded (0.16.1 and 0.19.2), mended.

The distributed optimizer was written for fused Adams that keep one step count for all parameters. torch's AdamW (used
without Apex and Transformer Engine) keeps a tensor `step` for each and makes its state lazily, and so: saving before
the first step asserts, loading raises KeyError('step'), and after a load all parameters silently share *one* `step`
tensor, which then counts as many steps as there are parameters.

With any Adam, when a gradient buffer has several buckets whose sizes are not multiples of 128 and of the data-parallel
size (a tied embedding under PP has a bucket of its own), the saved state is cut at the wrong places: Megatron joins the
buckets without their padding and looks parameters up with it. Weights and moments come back shifted, silently.
"""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core import optimizer as megatron_optimizer
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, distrib_optimizer, get_megatron_optimizer
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from megatron_rl.training.implementation import choose
from megatron_rl.training.model import DTYPES
from megatron_rl.training.options import Adam, TrainerConfig


def build_optimizer(trainer: TrainerConfig, models: list[DistributedDataParallel]) -> MegatronOptimizer:
    """AdamW with decoupled weight decay (none on biases and norms, as Megatron does) and gradient clipping."""
    dtype, on_host = DTYPES[trainer.dtype], trainer.memory.optimizer_on_host
    _use_adam(choose(trainer).adam)
    config = OptimizerConfig(
        optimizer="adam",
        lr=trainer.lr,
        weight_decay=trainer.weight_decay,
        adam_beta1=trainer.adam_beta1,
        adam_beta2=trainer.adam_beta2,
        adam_eps=trainer.adam_eps,
        clip_grad=trainer.clip_grad,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=trainer.distributed_optimizer,
        optimizer_cpu_offload=on_host,
        optimizer_offload_fraction=float(on_host),
        overlap_cpu_optimizer_d2h_h2d=on_host,
    )
    if on_host:
        # Otherwise the distributed optimizer keeps fp32 weights on the device as well. Set here, because Megatron's
        # constructor asks for Transformer Engine's version, and fails where there is none.
        config.use_precision_aware_optimizer = config.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = True
        config.store_param_remainders = False
    optimizer = get_megatron_optimizer(config, models)
    for group in optimizer.param_groups:  # the hybrid optimizer notes classes there, which no checkpoint can hold
        for key in [key for key, value in group.items() if isinstance(value, type)]:
            del group[key]
    return optimizer


def _use_adam(adam: Adam) -> None:
    """Have Megatron use this Adam; by itself it takes the first that imports."""
    if adam == "torch":
        chosen: Any = torch.optim.AdamW
    else:
        module = "transformer_engine.pytorch.optimizers" if adam == "transformer_engine" else "apex.optimizers"
        chosen = importlib.import_module(module).FusedAdam
    megatron_optimizer.Adam = distrib_optimizer.Adam = chosen
    megatron_optimizer.USING_PYTORCH_OPTIMIZER = adam == "torch"
    distrib_optimizer.HAVE_APEX_OR_TE = adam != "torch"
    distrib_optimizer.USING_TE_OPTIMIZER = adam == "transformer_engine"
    distrib_optimizer.USING_APEX_OPTIMIZER = adam == "apex"


def learning_rate(trainer: TrainerConfig, updates_done: int, *, updates_per_rollout: int = 1) -> float:
    """Learning rate of the next optimizer step: linear warm-up, counted in optimizer steps, then constant."""
    warmup = trainer.lr_warmup_steps or trainer.lr_warmup_rollout_steps * updates_per_rollout
    return trainer.lr * min(1.0, (updates_done + 1) / max(1, warmup))


def set_rates(optimizer: MegatronOptimizer, *, lr: float, weight_decay: float) -> None:
    """Learning rate and weight decay of the next optimizer step.

    Megatron's groups say in `wd_mult` which parameters decay; only its scheduler, which we don't use, applies that.
    """
    for group in optimizer.param_groups:
        group["lr"] = lr
        group["weight_decay"] = weight_decay * group["wd_mult"]


def make_adam_state(optimizer: MegatronOptimizer) -> None:
    """Make Adam's state now rather than in its first step: what is to be saved or loaded must exist."""
    for part in _parts(optimizer):
        hybrid = isinstance(part.optimizer, HybridDeviceOptimizer)
        for adam in part.optimizer.sub_optimizers if hybrid else [part.optimizer]:
            if isinstance(adam, torch.optim.AdamW):
                _make_torch_state(adam)
            else:
                part.init_state_fn(adam, part.config)
        if hybrid:
            part.optimizer._sync_sub_optimizers_state_to_hdo()


def _make_torch_state(adam: torch.optim.AdamW) -> None:
    for group in adam.param_groups:
        for parameter in group["params"]:
            state = adam.state[parameter]
            if not state:
                state["step"] = torch.tensor(0.0)
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)


def state_tensors(optimizer: MegatronOptimizer) -> Iterator[Tensor]:
    """Everything that the optimizer keeps: fp32 parameters, moments, step counts. Some are views of the model's."""
    for part in _parts(optimizer):
        inner = part.optimizer
        for group in inner.param_groups:
            for parameter in group["params"]:
                yield parameter.data
                yield from (value for value in inner.state[parameter].values() if isinstance(value, Tensor))
        yield from getattr(inner, "param_to_fp32_param", {}).values()  # of the hybrid optimizer


def sharded_optimizer_state(
    optimizer: MegatronOptimizer, model_state: dict[str, Any], metadata: dict[str, Any], *, loading: bool
) -> dict[str, Any]:
    """Megatron's `sharded_state_dict`, with every parameter found where it lies."""
    make_adam_state(optimizer)
    with _places_without_padding(optimizer):
        return optimizer.sharded_state_dict(model_state, is_loading=loading, metadata=metadata)


@contextmanager
def _places_without_padding(optimizer: MegatronOptimizer) -> Iterator[None]:
    """Let each gradient buffer say where parameters lie when its buckets are joined without their padding."""
    buffers = [buffer for part in _parts(optimizer) for buffer in getattr(part, "buffers", [])]
    with_padding = [buffer.param_index_map for buffer in buffers]
    for buffer in buffers:
        padding = [bucket.grad_data.numel() - bucket.numel_unpadded for bucket in buffer.buckets]
        before = [sum(padding[:number]) for number in range(len(padding))]
        buffer.param_index_map = {
            parameter: (start - before[bucket], end - before[bucket], bucket)
            for parameter, (start, end, bucket) in buffer.param_index_map.items()
        }
    try:
        yield
    finally:
        for buffer, places in zip(buffers, with_padding, strict=True):
            buffer.param_index_map = places


def load_optimizer_state(optimizer: MegatronOptimizer, state: dict[str, Any]) -> None:
    """Megatron's `load_state_dict`, and each parameter's step count a tensor of its own again."""
    for part in _parts(optimizer):
        if isinstance(part, DistributedOptimizer):
            _keep_step(part)
    optimizer.load_state_dict(state)
    for part in _parts(optimizer):
        for of_parameter in part.optimizer.state.values():
            if "step" in of_parameter:
                of_parameter["step"] = of_parameter["step"].clone()


def _keep_step(optimizer: DistributedOptimizer) -> None:
    """Let the loader, which copies every entry of a parameter's state, find the `step` that is there already."""
    original = optimizer._set_main_param_and_optimizer_states

    def set_states(parameter: torch.nn.Parameter, tensors: dict[str, torch.Tensor]) -> None:
        group, order = optimizer.model_param_group_index_map[parameter]
        state = optimizer.optimizer.state[optimizer.optimizer.param_groups[group]["params"][order]]
        original(parameter, {**{key: state[key] for key in ("step",) if key in state}, **tensors})

    optimizer._set_main_param_and_optimizer_states = set_states


def _parts(optimizer: MegatronOptimizer) -> Iterator[MegatronOptimizer]:
    """The optimizers that Megatron chained, without those that have nothing to do."""
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    return (part for part in parts if not getattr(part, "is_stub_optimizer", False))
