"""Functions that users name in the config."""

import importlib
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from megatron_rl.errors import UserError


def load_function(name: str, option: str) -> Callable[..., object]:
    """The function behind `package.module:function`.

    Raises:
        UserError: naming the option, when there is no such thing.
    """
    module, _, attribute = name.partition(":")
    if not (module and attribute):
        raise UserError(f"{option}: {name!r} is neither a known name nor package.module:function")
    try:
        function = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise UserError(f"{option}: {name}: {error} (is its folder on PYTHONPATH?)") from None
    except Exception as error:  # their module, as it is imported: anything
        raise UserError(f"{option}: {name}: {type(error).__name__}: {error}{_place(error)}") from None
    if not callable(function):
        raise UserError(f"{option}: {name} is not a function")
    return function


@contextmanager
def trying(option: str) -> Iterator[None]:
    """While a user's function is tried out: whatever it raises becomes one line with the place in it.

    Raises:
        UserError: naming the option.
    """
    try:
        yield
    except UserError:
        raise
    except (Exception, SystemExit) as error:  # their function: anything
        raise UserError(f"{option}: {type(error).__name__}: {error}{_place(error)}") from None


def _place(error: BaseException) -> str:
    """Where it was raised; a syntax error says so itself."""
    if isinstance(error, SyntaxError):
        return ""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f" ({frame.filename}:{frame.lineno})"
