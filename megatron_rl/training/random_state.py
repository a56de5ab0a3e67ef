"""Random numbers of a rank: seeded at the start, saved, and put back."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state as mpu
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, model_parallel_cuda_manual_seed

from megatron_rl.training import cpu


def seed_all(seed: int, rank: int) -> None:
    """Seed all generators that a loss or a filter of the user's may draw from.

    Ranks that compute the loss of the same tokens (TP) draw the same numbers; others differ.

    Args:
        seed: of the run.
        rank: of all ranks of the run; counts where this one does not train.
    """
    place = rank
    if mpu.is_initialized():
        model_parallel_cuda_manual_seed(seed)
        place = mpu.get_data_parallel_rank(with_context_parallel=True)
    mixed = int(np.random.SeedSequence([seed, place]).generate_state(1)[0])
    random.seed(mixed)
    np.random.seed(mixed)
    torch.manual_seed(mixed)


def random_state() -> dict[str, Any]:
    """Of all generators of this process."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(np.array(keys, dtype=np.int64)), *rest),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if cpu.has_cuda() else None,
        "megatron": {name: state.clone() for name, state in get_cuda_rng_tracker().get_states().items()},
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Go on from what `random_state` gave."""
    random.setstate(state["python"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and cpu.has_cuda():
        torch.cuda.set_rng_state(state["cuda"])
    get_cuda_rng_tracker().set_states(state["megatron"])


def read_random_state(path: Path) -> dict[str, Any]:
    """Of a file that `torch.save` wrote; no code is run."""
    found: dict[str, Any] = torch.load(path, weights_only=True)
    return found
