"""Tiny models with dimensions that are all distinct, and the smallest config of a run; shared by the tests."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedConfig, PreTrainedModel

from megatron_rl.config import Config
from megatron_rl.demo.task import EOS_ID, build_tokenizer
from megatron_rl.resharding.names import Shape
from megatron_rl.types import Graded, Group, Prompt, Response

SHAPE = Shape(layers=3, hidden=40, heads=10, kv_heads=2, head_dim=6, intermediate=24, vocab=37, tied=False)
"""Grouped heads, a head size that is not hidden / heads, a vocabulary that neither TP 2 nor TP 4 divides."""

TIED = replace(SHAPE, tied=True)
QWEN3 = replace(TIED, family="qwen3", kv_heads=1)
LLAMA = replace(SHAPE, family="llama")
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1e8,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""Of the three pairs of a head of 6, it leaves one as it is, smooths one, and slows one down by the factor."""


def hf_config(shape: Shape = SHAPE, **fields: Any) -> PreTrainedConfig:
    """The Hugging Face config of a model of `shape`."""
    return AutoConfig.for_model(
        shape.family,
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        tie_word_embeddings=shape.tied,
        **{"max_position_embeddings": 64, "eos_token_id": EOS_ID, "bos_token_id": 1, "pad_token_id": 0, **fields},
    )


def random_model(shape: Shape = SHAPE, seed: int = 0, **fields: Any) -> PreTrainedModel:
    """A model whose every parameter matters: biases that are not 0, norms that are not 1, logits well apart."""
    model = AutoModelForCausalLM.from_config(hf_config(shape, **fields)).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.copy_(1 + 0.2 * noise if "norm" in name else 0.2 * noise)
    return model


def write_model(directory: Path, shape: Shape = SHAPE, seed: int = 0, **fields: Any) -> PreTrainedModel:
    """Write a random model with the demo's tokenizer (23 tokens) as a Hugging Face directory, and return it."""
    model = random_model(shape, seed, **fields)
    model.generation_config = GenerationConfig(eos_token_id=EOS_ID, bos_token_id=1, pad_token_id=0)
    model.save_pretrained(directory)
    build_tokenizer().save_pretrained(directory)
    return model


def run_config(**sections: Any) -> Config:
    """A config with no preset; `rollout={"temperature": 2}` and so on change it."""
    values: dict[str, Any] = {"run_dir": "run", "steps": 1, "model": {"path": "m"}, "data": {"train": "d"}}
    return Config.model_validate(values | sections)


def graded_group(
    index: int,
    scores: list[float],
    lengths: list[int],
    *,
    prompt_ids: tuple[int, ...] = (1, 9),
    truncated: tuple[int, ...] = (),
) -> Group:
    """A group whose responses have the given scores and lengths; those in `truncated` were cut off."""
    answers = tuple(
        Graded.of(
            Response(
                ids=tuple(range(100 * index + 10 * number, 100 * index + 10 * number + length)),
                logprobs=tuple(-0.5 - position / 8 for position in range(length)),
                finish_reason="length" if number in truncated else "stop",
                weight_versions=(3,) * length,
            ),
            text=f"text {number}",
            score=score,
        )
        for number, (score, length) in enumerate(zip(scores, lengths, strict=True))
    )
    prompt = Prompt(index=index, text=f"prompt {index}", ids=prompt_ids, answer=str(index))
    return Group(prompt=prompt, responses=answers)
