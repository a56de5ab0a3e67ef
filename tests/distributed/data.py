"""The models that layouts train, and RL data of uneven lengths and groups, the same in every process."""

from dataclasses import replace
from pathlib import Path

import torch

from megatron_rl.config import Config
from megatron_rl.resharding.names import Shape
from megatron_rl.types import Graded, Group, Prompt, Response
from tests import tiny

VOCABULARY = 31  # ids 31 to 36 are banned; with TP 2 the ban begins inside the second shard, which also has padding


SHAPE = replace(tiny.SHAPE, layers=4, intermediate=28)  # as PP 2 and TP 2 want it

ROPE: dict[str, object] = {"rope_type": "default", "rope_theta": 5000.0}
MODELS: dict[str, tuple[Shape, dict[str, object]]] = {
    "untied": (SHAPE, ROPE),
    "tied": (replace(SHAPE, tied=True), ROPE),
    "qwen3": (replace(SHAPE, family="qwen3", tied=True, kv_heads=1), ROPE),  # TP 2 goes through the one key head
    "llama": (replace(SHAPE, family="llama"), tiny.LLAMA3_ROPE),
}
"""By kind: shape, and `rope_parameters` of config.json."""


def converted(model: Path) -> Path:
    """Where the same model is in Megatron's format."""
    return model.with_name(f"{model.name}_megatron")


def make_config(model: Path, run_dir: Path, **sections: dict[str, object]) -> Config:
    """A config for the tiny model; sections override."""
    values: dict[str, dict[str, object]] = {
        "trainer": {"dtype": "float32", "micro_batch_size": 2, "lr": 1e-3, "weight_decay": 0.1},
        "algorithm": {"normalisation": "token_mean_group", "mask_truncated": True, "updates_per_rollout": 2},
        "rollout": {"prompts_per_step": 4, "responses_per_prompt": 3, "max_response_tokens": 9, "temperature": 0.8},
    }
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section}
    return Config.model_validate(
        {"run_dir": run_dir, "steps": 3, "model": {"path": model}, "data": {"train": run_dir / "none.jsonl"}, **values}
    )


def make_groups(seed: int = 0) -> list[Group]:
    """Four groups of 2 to 5 responses, 1 to 9 tokens long; one truncated and one ungraded among them."""
    draw = torch.Generator().manual_seed(seed)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(3, VOCABULARY, (count,), generator=draw).tolist())

    groups = []
    for index, size in enumerate((3, 5, 2, 4)):
        answers = []
        for number in range(size):
            length = int(torch.randint(1, 10, (), generator=draw))
            response = Response(
                ids=tokens(length),
                logprobs=tuple((-3 + torch.rand(length, generator=draw)).tolist()),
                finish_reason="length" if (index, number) == (1, 2) else "stop",
                weight_versions=(0,) * length,
            )
            score = float("nan") if (index, number) == (3, 1) else float(number % 2)
            answers.append(Graded.of(response, score=score))
        prompt = Prompt(index=index, text="", ids=tokens(2 + 2 * index), answer="")
        groups.append(Group(prompt=prompt, responses=tuple(answers)))
    return groups
