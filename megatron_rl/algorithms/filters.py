"""Which groups are trained on (dynamic sampling)."""

from collections.abc import Sequence


def keep_group(accuracies: Sequence[float]) -> bool:
    """Whether a group teaches something: its unshaped outcomes differ; for outcomes of 0 and 1, 0 < correct < G.

    DAPO (Yu et al., 2025), eq. 11.

    Args:
        accuracies: the graded outcomes of one group; 1 is right, an ungraded response is left out.
    """
    return len(accuracies) > 1 and min(accuracies) < max(accuracies)
