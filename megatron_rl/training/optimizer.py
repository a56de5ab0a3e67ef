"""Megatron's optimizer, and its state as it lies on each rank, for checkpoints.

Megatron's own way to save and load that state is not used (0.16.1 and 0.19.2). It gathers the whole state of a
data-parallel group on each of its ranks. With torch's AdamW, after a load all parameters silently share *one* `step`
tensor, which then counts as many steps as there are parameters. And when a gradient buffer has several buckets whose
sizes are not multiples of 128 and of the data-parallel size (a tied embedding under PP has a bucket of its own), it
joins them without their padding and looks parameters up with it: weights and moments come back shifted, silently.
"""

import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
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


@dataclass(frozen=True)
class HeldState:
    """What this rank's optimizer has of one parameter: a run of its elements, in the order in which they lie."""

    parameter: torch.nn.Parameter
    start: int
    """The first element, counted over the flattened parameter."""

    tensors: Mapping[str, Tensor]
    """Flat views, by name: `exp_avg`, `exp_avg_sq`, and `param`, the fp32 weights, unless they are the model's."""

    shared: bool
    """Whether every data-parallel rank has the same."""


def held_state(optimizer: MegatronOptimizer) -> Iterator[HeldState]:
    """The state of all parameters that this rank has some of, in an order that ranks with the same parameters share."""
    make_adam_state(optimizer)
    for part in _parts(optimizer):
        distributed = isinstance(part, DistributedOptimizer)
        for parameter, start, tensors in _of_distributed(part) if distributed else _of_plain(part):
            flat = {name: tensor.detach().view(-1) for name, tensor in tensors.items() if tensor.dim()}  # no step count
            if flat["param"].untyped_storage().data_ptr() == parameter.untyped_storage().data_ptr():
                del flat["param"]
            yield HeldState(parameter, start, flat, shared=not distributed)


def _of_distributed(part: DistributedOptimizer) -> Iterator[tuple[torch.nn.Parameter, int, dict[str, Tensor]]]:
    for by_dtype in part.gbuf_ranges:
        for buckets in by_dtype.values():
            for bucket in buckets:
                for parameter, ranges in bucket["param_map"].items():
                    yield parameter, ranges["param"].start, part._get_main_param_and_optimizer_states(parameter)


def _of_plain(part: MegatronOptimizer) -> Iterator[tuple[torch.nn.Parameter, int, dict[str, Tensor]]]:
    models = {id(main): model for model, main in _main_parameters(part)}
    for group in part.param_groups:
        for main in group["params"]:
            yield models.get(id(main), main), 0, {"param": main, **part.optimizer.state[main]}


def _main_parameters(part: MegatronOptimizer) -> Iterator[tuple[torch.nn.Parameter, Tensor]]:
    """Parameters of the model that have fp32 weights elsewhere, with those."""
    for of_model, in_fp32 in zip(
        getattr(part, "float16_groups", ()), getattr(part, "fp32_from_float16_groups", ()), strict=True
    ):
        yield from zip(of_model, in_fp32, strict=True)


def set_adam_steps(optimizer: MegatronOptimizer, steps: int) -> None:
    """Let Adam go on after so many steps: torch's counts them for each parameter, fused ones for each group."""
    for part in _parts(optimizer):
        hybrid = isinstance(part.optimizer, HybridDeviceOptimizer)
        for adam in part.optimizer.sub_optimizers if hybrid else [part.optimizer]:
            for state in adam.state.values():
                if "step" in state:
                    state["step"].fill_(steps)
            if not isinstance(adam, torch.optim.AdamW):
                for group in adam.param_groups:
                    group["step"] = steps


def _parts(optimizer: MegatronOptimizer) -> Iterator[MegatronOptimizer]:
    """The optimizers that Megatron chained, without those that have nothing to do."""
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    return (part for part in parts if not getattr(part, "is_stub_optimizer", False))
