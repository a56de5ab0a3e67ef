"""In the place of SGLang's CUDA kernels, whose wheel can't be loaded without CUDA: every name imports, none computes.

SGLang imports many of them at the top of its files and then, on a CPU, takes its own PyTorch paths (`forward_native`).
So no mathematics is replaced: a kernel that is called after all raises.
"""

from collections.abc import Callable
from typing import Any, NoReturn

__version__ = "0.0.0"


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} was called; there are no CUDA kernels on a CPU")

    missing.__name__ = name
    return missing
