"""Reward shaping: what is added to a graded outcome before advantages (never seen by group filters)."""

from torch import Tensor


def soft_overlong_penalty(lengths: Tensor, *, max_length: int, buffer: int, floor: float | None = -1.0) -> Tensor:
    """Soft overlong punishment of each response, in reward units (DAPO, eq. 13).

    Args:
        lengths: response lengths in tokens, `[responses]`.
        max_length: longest response. DAPO: 20,480.
        buffer: last tokens of `max_length` over which the penalty grows from 0 to −1. DAPO: 4,096.
        floor: the penalty is never below it; None as some code has it (it matters beyond `max_length` only).

    Returns:
        `[responses]`, float64, 0 up to `max_length - buffer`, then linear to −1 at `max_length`.

    Raises:
        ValueError: `buffer` is not in 1..max_length.
    """
    if not 0 < buffer <= max_length:
        raise ValueError(f"buffer must be in 1..{max_length} (max_length), got {buffer}")
    return ((max_length - buffer - lengths.double()) / buffer).clamp(min=floor, max=0.0)
