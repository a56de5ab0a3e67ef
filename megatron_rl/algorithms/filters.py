"""Which groups are trained on (dynamic sampling)."""

from collections.abc import Callable, Sequence

from megatron_rl.errors import UserError
from megatron_rl.functions import load_function, trying

GroupFilter = Callable[[Sequence[float]], bool]


def keep_group(accuracies: Sequence[float]) -> bool:
    """Whether a group teaches something: its unshaped outcomes differ; for outcomes of 0 and 1, 0 < correct < G.

    DAPO (Yu et al., 2025), eq. 11.

    Args:
        accuracies: the graded outcomes of one group; 1 is right, an ungraded response is left out.
    """
    return len(accuracies) > 1 and min(accuracies) < max(accuracies)


def load_filter(name: str) -> GroupFilter:
    """The filter `mixed` (`keep_group`), or `package.module:function`, called as `function(accuracies)`.

    The latter raises UserError if the function raises, or returns anything but True or False.

    Raises:
        UserError: there is no such function.
    """
    if name == "mixed":
        return keep_group
    function = load_function(name, "algorithm.group_filter")

    def keeps(accuracies: Sequence[float]) -> bool:
        with trying(f"algorithm.group_filter: {name}"):
            kept = function(accuracies)
        if not isinstance(kept, bool):
            raise UserError(f"algorithm.group_filter: {name} returned {kept!r}, not True or False")
        return kept

    return keeps
