"""Start several local processes of one command, as torchrun does, and pass on how they ended."""

import logging
import os
import sys
from collections.abc import Sequence

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

STOPPED = 75


def launch_local(processes: int, arguments: Sequence[str]) -> int:
    """Run `python -m megatron_rl ARGUMENTS` in `processes` processes of one process group.

    Returns:
        The exit code: 0, that of the first process that failed (128 + n for signal n), or 75 when this process was
        asked to stop and told its children so.
    """
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # its report hides the error above it
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        run_id=f"megatron_rl_{os.getpid()}",
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        max_restarts=0,
    )
    try:
        elastic_launch(config, sys.executable)("-m", "megatron_rl", *arguments)
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        return failure.exitcode if failure.exitcode >= 0 else 128 - failure.exitcode
    except SignalException:
        return STOPPED
    return 0
