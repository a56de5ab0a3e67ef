"""A leader that hangs, as torchrun would have it."""

import os
import subprocess
import sys


def test_a_leader_that_hangs_is_named_and_the_run_ends() -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    command = [*torchrun, "--shutdown-timeout", "2", "-m", "tests.distributed.hung_leader"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert ended.returncode != 0
    assert ended.stdout.count("came through") == 4
    assert "rank 2, which leads engine 1, has given no sign of life for" in ended.stdout
