"""A program that owns a server of TP 2 and ends in one of several ways.

python -m tests.engines.owner HOW CONFIG MODEL LOG
"""

import sys
import time
from pathlib import Path

from megatron_rl.rollout.options import SglangConfig
from megatron_rl.rollout.sglang_server import SglangServer


def main() -> None:
    """Start the server, say so, and end: `return`, `raise`, or wait to be killed."""
    how, config, model, log = sys.argv[1:]
    options = SglangConfig.model_validate_json(config)
    server = SglangServer(
        options, Path(model), number=0, tensor_parallel_size=2, gpus=(), dtype="float32", log_file=Path(log)
    )
    try:
        server.start()
        print("started", flush=True)
        if how == "raise":
            raise ValueError("as asked")
        if how == "wait":
            time.sleep(600)
    finally:
        server.stop()


if __name__ == "__main__":
    main()
