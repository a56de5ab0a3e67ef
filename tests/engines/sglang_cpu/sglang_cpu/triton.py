"""In the place of triton where it is not installed (it takes a gigabyte and compiles for GPUs only).

SGLang and torch import it, decorate kernels with it and read its constants when their files are loaded. Here decorators
keep the function, names are found, and launching a kernel raises.
"""

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, NoReturn

VERSION = "3.9.0"
"""Of the triton that torch 2.13 asks for; torch and SGLang compare it."""


class Anything:
    """A name in triton that has no meaning of its own here: value, annotation, decorator, base class or constant."""

    def __init__(self, name: str) -> None:
        self.__name__ = self.__qualname__ = name
        self.__module__ = "triton"

    def __getattr__(self, name: str) -> "Anything":
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "active":  # triton.runtime.driver.active: what triton says where there is no GPU
            raise RuntimeError("0 active drivers ([]). There should only be one.")
        return Anything(f"{self.__name__}.{name}")

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """As a decorator it makes a kernel, otherwise it stays what it is."""
        if len(arguments) == 1 and not options and callable(arguments[0]) and not isinstance(arguments[0], Anything):
            return Kernel(arguments[0])
        return self

    def __getitem__(self, key: object) -> "Anything":
        return self

    def __or__(self, other: object) -> "Anything":
        return self

    __ror__ = __or__

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return (object,)

    def __hash__(self) -> int:
        return hash(self.__name__)

    def __eq__(self, other: object) -> bool:
        return self is other

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __lt__(self, other: object) -> bool:  # versions and capabilities are compared; nothing is supported
        return False

    __gt__ = __le__ = __ge__ = __lt__


class Kernel:
    """A function decorated with `triton.jit`: it can be handed around and raises when it is launched."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.fn = function
        self.__name__ = getattr(function, "__name__", "kernel")
        self.__doc__ = function.__doc__
        self.__module__ = function.__module__

    def __call__(self, *arguments: Any, **options: Any) -> NoReturn:
        raise NotImplementedError(f"the triton kernel {self.__name__} was launched; there is no triton here")

    def __getitem__(self, grid: object) -> Callable[..., NoReturn]:
        return self

    def __getattr__(self, name: str) -> Anything:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything(name)


class TritonModule(ModuleType):
    """`triton` or a module in it."""

    __path__: list[str] = []  # noqa: RUF012  (what makes it a package)
    __version__ = VERSION

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in _FUNCTIONS:
            return _FUNCTIONS[name]
        if name[0].isupper():  # torch asks isinstance(x, triton.JITFunction) and the like, so it must be a class
            made = type(name, (), {"__init__": lambda self, *arguments, **options: None})
            setattr(self, name, made)
            return made
        return Anything(name)


def _jit(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    return Kernel if function is None else Kernel(function)


def _decorate(*arguments: Any, **options: Any) -> Callable[[Any], Any]:
    return lambda function: function


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "jit": _jit,
    "autotune": _decorate,
    "heuristics": _decorate,
    "constexpr_function": lambda function: function,
    # Used on the host too, for sizes
    "cdiv": lambda numerator, denominator: -(-numerator // denominator),
    "next_power_of_2": lambda number: 1 << max(int(number) - 1, 0).bit_length(),
}
