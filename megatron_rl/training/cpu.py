"""Run the real Megatron-core without CUDA: the one place that knows about its absence.

Megatron-core has no CPU mode. It asks `torch.cuda` for the current device, writes `device="cuda"` literals, makes
streams, keeps its random state on the GPU, and sorts parameters by the string `torch.cuda.FloatTensor`. Where CUDA is
absent, `install()` gives Megatron's modules *their own view of torch*; the torch that everyone else in the process
sees, an engine or a library included, keeps working as it is. What is replaced, and why:

- `torch.cuda` in that view: `current_device()` is the CPU; `synchronize` and `empty_cache` do nothing; streams and
  events are stand-ins that are always ready (everything on a CPU runs in order); random state is the CPU generator's.
- the factories (`torch.zeros`, `torch.empty`, ...) in that view: `device="cuda"` means the CPU, `pin_memory` goes.
- `Tensor.type()`, `Tensor.cuda()`, `Tensor.pin_memory()`, `Tensor.to()`, `Module.cuda()`: methods can't be seen
  differently by one module, so these ask who calls: for Megatron the CPU answers, for anybody else nothing changes.
- how the hybrid optimizer finds what to copy to the host: it asks `is_cuda`, which nothing is here.
- the tracker of parallel random states: Megatron's own refuses to run when the CPU generator moves inside a fork,
  which here is the generator that is forked.

With CUDA present `install()` does nothing. Device and backend choices elsewhere in the system call `device()` and
`backend()`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.abc
import importlib.machinery
import logging
import os
import sys
import time
import types
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import psutil
import torch

log = logging.getLogger(__name__)
CPU = torch.device("cpu")
_FACTORIES = (
    "arange as_tensor empty empty_like full full_like linspace ones ones_like "
    "rand randint randn tensor zeros zeros_like"
).split()
_installed = False

SGLANG_ARGUMENTS = (
    "--device cpu --attention-backend torch_native --sampling-backend pytorch --disable-cuda-graph --sleep-on-idle"
).split()
"""What makes an SGLang server compute on a CPU, and leave it to the trainer while it has nothing to do."""


def has_cuda() -> bool:
    """Whether this process computes on a GPU."""
    return torch.cuda.is_available()


def device() -> torch.device:
    """The device this rank computes on."""
    return torch.device("cuda", torch.cuda.current_device()) if has_cuda() else CPU


def backend() -> str:
    """The torch.distributed backend for tensors on `device()`."""
    return "cpu:gloo,cuda:nccl" if has_cuda() else "gloo"


def sglang_environment(ranks: int) -> dict[str, str]:
    """Variables of an SGLang server on a CPU; its ranks share the cores, for which it would want a NUMA node each."""
    cores = sorted(os.sched_getaffinity(0))
    shares = [cores[rank % len(cores) :: ranks] for rank in range(ranks)]
    bound = "|".join(",".join(map(str, share)) for share in shares)
    return {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1", "SGLANG_CPU_OMP_THREADS_BIND": bound}


def sglang_units(intermediate: int, kv_heads: int, ranks: int) -> list[tuple[str, int, int]]:
    """What SGLang pads on a CPU, and only there: (name in config.json, number, what it becomes a multiple of)."""
    return [("intermediate_size", intermediate, 32 * ranks), ("num_key_value_heads", kv_heads, ranks)]


def used_bytes(of: torch.device) -> int:
    """Memory in use: of a GPU, by all processes on it; on a CPU the resident memory of this process."""
    if of.type == "cuda":
        free, total = torch.cuda.mem_get_info(of)
        return total - free
    return int(psutil.Process().memory_info().rss)


def wait_until_free() -> None:
    """Return when the GPU's memory in use has stopped falling: other processes give it back after they said so."""
    if has_cuda():
        wait_until_settled(partial(used_bytes, device()))


def wait_until_settled(read: Callable[[], int], *, quiet_s: float = 1.0, timeout_s: float = 30.0) -> None:
    """Return when `read` has not fallen for `quiet_s`; warn if it still falls after `timeout_s`."""
    begun = fell = time.monotonic()
    lowest = read()
    while time.monotonic() - fell < quiet_s:
        if time.monotonic() - begun > timeout_s:
            log.warning("the GPU's memory in use still falls after %g s, to %.1f GB", timeout_s, lowest / 1e9)
            return
        time.sleep(quiet_s / 10)
        if (now := read()) < lowest:
            lowest, fell = now, time.monotonic()


def install() -> None:
    """Give Megatron its view of torch. Call before the first Megatron object is built; again does nothing."""
    global _installed
    if has_cuda() or _installed:
        return
    _installed = True
    view = _torch_for_megatron()
    sys.meta_path.insert(0, _MegatronFinder(view))
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.") and module is not None:
            _give_view(module, view)
    _patch_methods()
    _patch_random_states()
    _patch_hybrid_optimizer()


class _AlwaysReady:
    """Stands for a CUDA stream and for an event on it: on a CPU all work is already done."""

    def __init__(self, *args: object, **kwargs: object) -> None: ...
    def __enter__(self) -> _AlwaysReady:
        return self

    def __exit__(self, *exc: object) -> None: ...
    def synchronize(self) -> None: ...
    def wait_stream(self, stream: object) -> None: ...
    def wait_event(self, event: object) -> None: ...
    def record_event(self, event: object = None) -> object:
        return event or _AlwaysReady()

    def record(self, stream: object = None) -> None: ...
    def wait(self, stream: object = None) -> None: ...
    def query(self) -> bool:
        return True


class _View(types.ModuleType):
    """A module that answers for another one where it has no answer of its own."""

    def __init__(self, original: types.ModuleType, **replacements: object) -> None:
        super().__init__(original.__name__)
        self.__dict__.update(original.__dict__)  # attribute look-ups cost what they cost on the original
        self.__dict__.update(replacements)
        self.__dict__["_original"] = original

    def __getattr__(self, name: str) -> object:
        return getattr(self.__dict__["_original"], name)


def _torch_for_megatron() -> types.ModuleType:
    def nothing(*args: object, **kwargs: object) -> None: ...

    def set_rng_state(state: torch.Tensor, device: object = None) -> None:
        torch.set_rng_state(state)

    def get_rng_state(device: object = None) -> torch.Tensor:
        return torch.get_rng_state()

    random = _View(
        torch.cuda.random, get_rng_state=get_rng_state, set_rng_state=set_rng_state, manual_seed=torch.manual_seed
    )
    cuda = _View(
        torch.cuda,
        current_device=lambda: CPU,
        synchronize=nothing,
        empty_cache=nothing,
        stream=_AlwaysReady,
        current_stream=_AlwaysReady,
        default_stream=_AlwaysReady,
        Stream=_AlwaysReady,
        Event=_AlwaysReady,
        get_rng_state=get_rng_state,
        set_rng_state=set_rng_state,
        manual_seed=torch.manual_seed,
        random=random,
    )
    return _View(torch, cuda=cuda, **{name: _on_cpu(getattr(torch, name)) for name in _FACTORIES})


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = _cpu_for_cuda(kwargs["device"])
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return make


def _cpu_for_cuda(device: Any) -> Any:
    is_cuda = getattr(device, "type", device if isinstance(device, str) else "").startswith("cuda")
    return CPU if is_cuda else device


def _give_view(module: types.ModuleType, view: types.ModuleType) -> None:
    if module.__dict__.get("torch") is torch:
        module.__dict__["torch"] = view


class _MegatronFinder(importlib.abc.MetaPathFinder):
    """Gives Megatron's modules the view when they are imported later."""

    def __init__(self, view: types.ModuleType) -> None:
        self.view = view

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith("megatron."):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is None or spec.loader is None:
            return None
        load, view = spec.loader.exec_module, self.view

        def load_with_view(module: types.ModuleType) -> None:
            load(module)
            _give_view(module, view)

        spec.loader.exec_module = load_with_view  # type: ignore[method-assign]
        return spec


def _for_megatron(original: Callable[..., Any], answer: Callable[..., Any]) -> Callable[..., Any]:
    """`original`, but `answer` for callers inside Megatron."""

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        return (answer if caller.startswith("megatron.") else original)(self, *args, **kwargs)

    return method


def _patch_methods() -> None:
    tensor_type, tensor_to = torch.Tensor.type, torch.Tensor.to

    def type_(self: torch.Tensor, dtype: Any = None, **kwargs: Any) -> Any:
        if dtype is not None:
            return tensor_type(self, dtype, **kwargs)
        return tensor_type(self).replace("torch.", "torch.cuda.", 1)

    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if "device" in kwargs:
            kwargs["device"] = _cpu_for_cuda(kwargs["device"])
        return tensor_to(self, *(_cpu_for_cuda(a) for a in args), **kwargs)

    def stay(self: Any, *args: object, **kwargs: object) -> Any:
        return self

    for owner, name, answer in (
        (torch.Tensor, "type", type_),
        (torch.Tensor, "to", to),
        (torch.Tensor, "cuda", stay),
        (torch.Tensor, "pin_memory", stay),
        (torch.nn.Module, "cuda", stay),
    ):
        setattr(owner, name, _for_megatron(getattr(owner, name), answer))


def _patch_random_states() -> None:
    from megatron.core.tensor_parallel import random as states

    def get_state(*args: object, **kwargs: object) -> torch.Tensor:
        return torch.get_rng_state()

    def set_state(state: torch.Tensor, *args: object, **kwargs: object) -> None:
        torch.set_rng_state(state)

    class CpuStatesTracker(states.CudaRNGStatesTracker):
        @contextlib.contextmanager
        def fork(self, name: str = states._MODEL_PARALLEL_RNG_TRACKER_NAME) -> Iterator[None]:
            """Draw from the state called `name`, then go on with the one from before."""
            outside = torch.get_rng_state()
            torch.set_rng_state(self.states_[name])
            try:
                yield
            finally:
                self.states_[name] = torch.get_rng_state()
                torch.set_rng_state(outside)

    states._get_cuda_rng_state, states._set_cuda_rng_state = get_state, set_state
    states.CudaRNGStatesTracker = CpuStatesTracker


def _patch_hybrid_optimizer() -> None:
    from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

    def on_host(self: Any, fraction: float) -> tuple[Any, ...]:
        """Megatron's `_get_sub_optimizer_param_groups` with the CPU as the device, of which everything is copied."""
        groups, copies, fp32 = [], {}, {}
        for group in self.param_groups:
            for parameter in group["params"]:
                copies[parameter] = parameter.detach().clone()
                if self.param_update_in_fp32 and parameter.dtype != torch.float32:
                    copies[parameter] = fp32[parameter] = copies[parameter].float()
            groups.append({**group, "params": [copies[parameter] for parameter in group["params"]]})
        groups = [group for group in groups if group["params"]]
        return groups, [], copies, {copy: parameter for parameter, copy in copies.items()}, fp32

    HybridDeviceOptimizer._get_sub_optimizer_param_groups = on_host
