"""Runs in every process of a torchrun: rank 2, which leads engine 1, hangs while engines generate."""

import os
import signal
import sys

import torch.distributed as dist

from megatron_rl.cli import BAD_INPUT
from megatron_rl.errors import UserError
from megatron_rl.rollout.groups import EngineGroup
from megatron_rl.rollout.waiting import EngineWait


def main() -> None:
    """One sampling that all come through, and one that rank 2 does not."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    group = EngineGroup(rank=rank, size=2, world=dist.get_world_size())
    wait = EngineWait(dist.distributed_c10d._get_default_store(), group, timeout_s=3)
    with wait.until_all_are_done():
        pass
    dist.barrier()
    print(f"rank {rank} came through\n", end="", flush=True)  # at once: other ranks write too
    try:
        with wait.until_all_are_done():
            if rank == 2:
                os.kill(os.getpid(), signal.SIGSTOP)
    except UserError as error:
        print(f"rank {rank}: {error}\n", end="", flush=True)
        sys.exit(BAD_INPUT)


if __name__ == "__main__":
    main()
