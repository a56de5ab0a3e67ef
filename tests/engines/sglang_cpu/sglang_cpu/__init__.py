"""What lets the unmodified sglang wheel run where there is no CUDA. For tests only.

A .pth file of `make sglang-env` calls `install` when an interpreter starts, so it holds in every process that SGLang
spawns. It imports nothing heavy. Three things are replaced:

- `sgl_kernel`, the CUDA kernels: the package beside this one;
- the declarations of two torchvision operators: `declare_torchvision_operators`;
- `triton`, where it is not installed: `sglang_cpu/triton.py`.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

_triton_is_missing = importlib.util.find_spec("triton") is None
_library: Any = None
"""What torchvision's operators are declared in. The declarations last as long as it does."""


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Asked before all others: acts when torchvision is about to be imported, answers for a triton that is missing."""

    def __init__(self) -> None:
        self._torchvision_seen = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """A stand-in for triton and whatever is in it; nothing for other modules."""
        if fullname == "torchvision" and not self._torchvision_seen:
            self._torchvision_seen = True
            declare_torchvision_operators()
        if _triton_is_missing and fullname.split(".")[0] == "triton":
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """The module itself; there is no file to run."""
        from .triton import TritonModule

        return TritonModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing is left to do."""


def declare_torchvision_operators() -> None:
    """Declare two operators as torchvision's C++ library would.

    SGLang imports torchvision, whose PyPI wheel is built for CUDA: beside a CPU torch its library doesn't load, and its
    Python code then fails while it describes these two. Neither is ever called: no image is processed.
    """
    import torch

    if torch.version.cuda:
        return
    global _library
    _library = torch.library.Library("torchvision", "DEF")
    for operator in ("nms", "qnms"):
        _library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def install() -> None:
    """Put the finder before all others. Again does nothing: Python reads the .pth files of an environment twice."""
    if not any(isinstance(finder, Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, Finder())
