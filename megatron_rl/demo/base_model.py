"""The demo's base model: it can do the running sum, and mostly does not.

Two stages of imitation make it. The first teaches the skill, on full scratch; the second the habit of not using it, on
answers that mostly guess at once. Guessing mixed in from the start is no substitute: some seeds never learn to add.
"""

import argparse
import hashlib
import json
import math
import os
import random
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from megatron_rl.demo.task import (
    BOS_ID,
    EOS_ID,
    PAD_ID,
    VOCABULARY,
    DemonstrationStyle,
    Problem,
    build_tokenizer,
    demonstrate,
    heldout_problems,
    problem_stream,
)

FINGERPRINT_FILE = "demo_base.json"
"""In a finished directory: what it was made from."""

IGNORED = -100
"""Label of a position that has no loss."""


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One stage of imitation."""

    steps: int
    """Optimizer steps."""

    peak_lr: float
    """Learning rate at the top of the schedule."""

    style: DemonstrationStyle
    """The demonstrations imitated."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything, beside the seed, that decides the base model."""

    revision: int = 1
    """Raised when code, rather than a constant below, changes what is made, so that cached directories are remade."""

    hidden_size: int = 128
    """Width of the residual stream."""

    intermediate_size: int = 576
    """Width inside the gated MLP."""

    layers: int = 2
    """Transformer layers: the fewest that learn the task and still divide over two pipeline stages."""

    heads: int = 4
    """Query heads."""

    kv_heads: int = 2
    """Key and value heads: the fewest that divide over two tensor-parallel ranks."""

    max_positions: int = 64
    """Longest sequence the config declares, in tokens; the task needs 23."""

    rope_theta: float = 1e4
    """Base of the rotary frequencies."""

    skill: Stage = Stage(steps=300, peak_lr=3e-3, style=DemonstrationStyle(noise=0.03))
    """The first stage: how to add."""

    habit: Stage = Stage(
        steps=60, peak_lr=5e-4, style=DemonstrationStyle(direct_guess=0.6, early_stop=0.03, noise=0.05)
    )
    """The second stage: to guess instead. Short, so that the skill is still there to be found."""

    batch_size: int = 128
    """Fresh demonstrations a step."""

    lr_warmup_steps: int = 50
    """Steps over which the learning rate rises from 0, in each stage."""

    lr_floor: float = 0.05
    """Where the cosine ends, as a share of the peak."""

    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's averaging constants."""

    weight_decay: float = 0.01
    """AdamW's decay of the weights, on all parameters."""

    clip_norm: float = 1.0
    """Largest norm of the gradient."""

    heldout_problems: int = 1024
    """Problems of the demo's held-out set, its first ones, that no demonstration shows."""


RECIPE = Recipe()

SAY_EVERY = 60
"""Steps between two lines of progress; about six seconds on two cores."""


def make_base_model(directory: Path, *, seed: int, say: Callable[[str], None] = print) -> None:
    """Makes `directory` a Hugging Face checkpoint of the base model, in float32, or finds that it is one already.

    The same seed, recipe, library versions, machine and thread count give the same weights. The directory appears under
    its name only once complete. One that this function made from another seed or recipe is replaced.

    Args:
        directory: where `AutoModelForCausalLM` and `AutoTokenizer` shall find the model.
        seed: decides the initial weights and the demonstrations.
        say: receives a line of progress now and then.

    Raises:
        FileExistsError: `directory` holds something that this function did not write.
    """
    fingerprint = _fingerprint(seed)
    if _is_ours(directory, fingerprint):
        say(f"demo base model: {directory} is already made (seed {seed})")
        return
    started = time.monotonic()
    with torch.random.fork_rng(devices=[]):  # the caller's random state is none of our business
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(_model_config(RECIPE)).float()
    say(f"demo base model: warming up {sum(p.numel() for p in model.parameters()):,} parameters (seed {seed})")
    rng = random.Random(f"demonstrations-{seed}")
    for name, stage in (("skill", RECIPE.skill), ("habit", RECIPE.habit)):
        for step, loss in _imitate(model, stage, rng):
            if step % SAY_EVERY == 0 or step == stage.steps:
                seconds = time.monotonic() - started
                say(f"demo base model: {name} step {step} of {stage.steps}, loss {loss:.3f}, {seconds:.0f} s")
    _publish(model, directory, fingerprint)
    say(f"demo base model: {directory} made in {time.monotonic() - started:.0f} s")


def _model_config(recipe: Recipe) -> Qwen2Config:
    return Qwen2Config(
        vocab_size=len(VOCABULARY),
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.kv_heads,
        max_position_embeddings=recipe.max_positions,
        rope_parameters={"rope_type": "default", "rope_theta": recipe.rope_theta},
        tie_word_embeddings=True,
        attention_dropout=0.0,
        pad_token_id=PAD_ID,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
    )


def _imitate(model: Qwen2ForCausalLM, stage: Stage, rng: random.Random) -> Iterator[tuple[int, float]]:
    """Trains `model` in place; yields, after each step, its number (from 1) and its loss in nats a response token."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=stage.peak_lr, betas=RECIPE.betas, weight_decay=RECIPE.weight_decay
    )
    tokenizer = build_tokenizer()
    problems = problem_stream(rng, excluded=heldout_problems(RECIPE.heldout_problems))
    model.train()
    for step in range(stage.steps):
        for group in optimizer.param_groups:
            group["lr"] = stage.peak_lr * _lr_share(step, stage.steps)
        batch = [(problem, demonstrate(problem, stage.style, rng)) for problem in islice(problems, RECIPE.batch_size)]
        inputs, labels = _collate(batch, tokenizer)
        loss = F.cross_entropy(model(input_ids=inputs).logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), RECIPE.clip_norm)
        optimizer.step()
        yield step + 1, loss.item()


def _lr_share(step: int, steps: int) -> float:
    """Share of the peak learning rate at `step`, from 0: linear warm-up times a cosine down to the floor."""
    cosine = 0.5 * (1.0 + math.cos(math.pi * step / steps))
    return min(1.0, (step + 1) / RECIPE.lr_warmup_steps) * (RECIPE.lr_floor + (1.0 - RECIPE.lr_floor) * cosine)


def _collate(batch: list[tuple[Problem, str]], tokenizer: PreTrainedTokenizerFast) -> tuple[Tensor, Tensor]:
    """Inputs and next-token labels, both int64 `[batch, longest - 1]`; only response tokens and `<eos>` are labelled.

    Padded on the right, where a causal model needs no mask: nothing before the padding can see it.
    """
    prompts = tokenizer([problem.prompt for problem, _ in batch])["input_ids"]
    responses = tokenizer([response for _, response in batch], add_special_tokens=False)["input_ids"]
    longest = max(len(p) + len(r) + 1 for p, r in zip(prompts, responses, strict=True))
    tokens = torch.full((len(batch), longest), PAD_ID)
    labels = torch.full((len(batch), longest), IGNORED)
    for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        sequence = torch.tensor([*prompt, *response, EOS_ID])
        tokens[row, : len(sequence)] = sequence
        labels[row, len(prompt) : len(sequence)] = sequence[len(prompt) :]
    return tokens[:, :-1], labels[:, 1:]


def _fingerprint(seed: int) -> dict[str, str | int]:
    recipe = json.dumps({"recipe": asdict(RECIPE), "vocabulary": VOCABULARY}, sort_keys=True)
    return {
        "seed": seed,
        "recipe_sha256": hashlib.sha256(recipe.encode()).hexdigest(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def _is_ours(directory: Path, fingerprint: dict[str, str | int]) -> bool:
    """Whether `directory` is finished and made from `fingerprint`; refuses what `make_base_model` must not replace."""
    marker = directory / FINGERPRINT_FILE
    if marker.is_file():
        return bool(json.loads(marker.read_text(encoding="utf-8")) == fingerprint)
    if directory.exists() and not (directory.is_dir() and not any(directory.iterdir())):
        raise FileExistsError(f"{directory} exists and is no demo base model (no {FINGERPRINT_FILE}): not replacing it")
    return False


def _publish(model: Qwen2ForCausalLM, directory: Path, fingerprint: dict[str, str | int]) -> None:
    """Writes everything under a name beside `directory`, then renames: a killed run leaves nothing half-written."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    partial = directory.with_name(f".{directory.name}.partial-{os.getpid()}")
    replaced = directory.with_name(f".{directory.name}.replaced-{os.getpid()}")
    try:
        model.generation_config = GenerationConfig(pad_token_id=PAD_ID, bos_token_id=BOS_ID, eos_token_id=EOS_ID)
        model.save_pretrained(partial)
        build_tokenizer().save_pretrained(partial)
        (partial / FINGERPRINT_FILE).write_text(json.dumps(fingerprint, indent=2) + "\n", encoding="utf-8")
        if _is_ours(directory, fingerprint):  # another process made the same one meanwhile
            return
        if directory.exists():
            directory.rename(replaced)  # a directory can't be renamed over one that has files
        partial.rename(directory)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        shutil.rmtree(replaced, ignore_errors=True)


def _main() -> None:
    parser = argparse.ArgumentParser(description="Makes the demo's base model.")
    parser.add_argument("directory", type=Path, metavar="DIR", help="where to write the checkpoint")
    parser.add_argument("--seed", type=int, default=0, help="decides the initial weights and the demonstrations")
    arguments = parser.parse_args()
    make_base_model(arguments.directory, seed=arguments.seed)


if __name__ == "__main__":
    _main()
