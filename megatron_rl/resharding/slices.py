"""What travels from the transport into an engine."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Slices:
    """What came for this rank, and where in its engine's parameters it belongs."""

    bucket: Tensor
    """Bytes."""

    names: list[str]
    """Of the parameters that are spoken of."""

    moves: Tensor
    """See `engine_side.megatron_rl_loader.apply`."""

    numbers: list[int]
    """The plan's moves that they are; −1: padding."""
