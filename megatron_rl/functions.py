"""Functions that users name in the config."""

import importlib
from collections.abc import Callable

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
    except (ImportError, AttributeError, TypeError) as error:  # TypeError: a relative import
        raise UserError(f"{option}: {name}: {error} (is its folder on PYTHONPATH?)") from None
    if not callable(function):
        raise UserError(f"{option}: {name} is not a function")
    return function
