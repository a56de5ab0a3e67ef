"""A process group of one, for functions that reduce over tensor-parallel ranks."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist


@contextmanager
def group_of_one() -> Iterator[dist.ProcessGroup]:
    """Joined inside, left after it."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        group = dist.group.WORLD
        assert group is not None
        yield group
    finally:
        dist.destroy_process_group()
