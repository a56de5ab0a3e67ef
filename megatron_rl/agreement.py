"""What rank 0 finds out, on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import torch.distributed as dist

from megatron_rl.errors import UserError

T = TypeVar("T")


def from_leader(act: Callable[[], T], everyone: dist.ProcessGroup, what: str = "run_dir") -> T:
    """What `act` returns on rank 0, on every rank; or its mistake, on every rank. A collective.

    Args:
        act: called on rank 0.
        everyone: all ranks.
        what: named in front of what the system says.

    Raises:
        UserError: `act` did, or the system refused it something.
    """
    message: list[T | UserError | None] = [None]
    if dist.get_rank(everyone) == 0:
        try:
            message = [act()]
        except UserError as error:
            message = [error]
        except OSError as error:  # the others wait: tell them too
            message = [UserError(f"{what}: {error}")]
    dist.broadcast_object_list(message, src=0, group=everyone)
    if isinstance(message[0], UserError):
        raise message[0]
    return cast(T, message[0])
