"""What the trainer gives back while engines sample: resident memory and seconds of sleep and wake, on a CPU.

python -m tests.benchmarks.bench_sleep
"""

import ctypes
import tempfile
import time
from pathlib import Path

import torch

from megatron_rl.config import Config
from megatron_rl.resharding.names import Shape
from megatron_rl.training import setup
from megatron_rl.training.hf_config import read_model_spec
from megatron_rl.training.optimizer import state_tensors
from megatron_rl.training.trainer import Trainer
from megatron_rl.types import TrainedResponse
from tests.cases.responses import trained_response
from tests.measure import gradient_bytes, resident, storages
from tests.tiny import run_config, write_model

SHAPE = Shape(
    layers=6, hidden=768, heads=12, kv_heads=2, head_dim=64, intermediate=2048, vocab=8192, tied=False
)  # 50 million parameters
GB = 1e9


def main() -> None:
    """Print one Markdown table."""
    with tempfile.TemporaryDirectory() as directory:
        write_model(Path(directory), SHAPE)
        setup.start(config_of(Path(directory)))
        print(table(config_of(Path(directory))))
        setup.stop()


def table(config: Config) -> str:
    """The table, in Markdown."""
    before = in_use()
    trainer = Trainer(config, read_model_spec(config.model.path), SHAPE.vocab)
    memory = trainer.memory
    assert memory
    trainer.gradients(trainer.share([response()]))
    trainer.step()
    rows = [("awake", in_use() - before, 0.0)]
    for turn in ("first", "second"):
        begun = time.perf_counter()
        memory.sleep()
        rows.append((f"asleep, {turn} time", in_use() - before, time.perf_counter() - begun))
        left = sum(sum(storages(kept).values()) for kept in (trainer.parameters(), state_tensors(trainer.optimizer)))
        left += gradient_bytes(trainer)
        begun = time.perf_counter()
        memory.wake()
        rows.append((f"awake again, {turn} time", in_use() - before, time.perf_counter() - begun))
    figures = memory.take_figures()
    moved, dropped = (figures[f"memory/{what}_gb"] / 2 for what in ("offloaded", "dropped"))
    lines = ["| | resident GB | seconds |", "|---|---|---|"]
    lines += [f"| {name} | {used / GB:.2f} | {seconds:.2f} |" for name, used, seconds in rows]
    sums = f"Moved to the arena {moved:.2f} GB, gradients dropped {dropped:.2f} GB, left of both {left} bytes."
    return "\n".join([*lines, "", sums])


def config_of(model: Path) -> Config:
    """A run of one process in fp32."""
    return run_config(model={"path": model}, trainer={"dtype": "float32", "lr": 1e-4})


def response() -> TrainedResponse:
    """A short one: its activations don't matter here."""
    ids = tuple(torch.randint(0, SHAPE.vocab, (16,), generator=torch.Generator().manual_seed(0)).tolist())
    return trained_response(
        prompt_ids=ids[:4],
        response_ids=ids[4:],
        rollout_logprobs=(-1.0,) * 12,
        advantage=1.0,
        weight=1 / 12,
        group=0,
        number=0,
    )


def in_use() -> int:
    """Bytes of this process that are in memory, without what the allocator could return at once."""
    ctypes.CDLL(None).malloc_trim(0)
    return resident()


if __name__ == "__main__":
    main()
