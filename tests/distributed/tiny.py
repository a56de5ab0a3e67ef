"""A tiny Qwen2 with all-distinct dimensions, and RL data of uneven lengths and groups, the same in every process."""

from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from megatron_rl.config import Config
from megatron_rl.demo.task import build_tokenizer
from megatron_rl.types import Graded, Group, Prompt, Response

VOCABULARY = 31  # ids 31 to 36 are banned; with TP 2 the ban begins inside the second shard, which also has padding


def write_model(directory: Path, *, tied: bool) -> None:
    """Grouped heads 10/2, head_dim other than hidden / heads, a vocabulary that TP 2 has to pad."""
    config = Qwen2Config(
        vocab_size=37,
        hidden_size=40,
        num_hidden_layers=4,
        num_attention_heads=10,
        num_key_value_heads=2,
        head_dim=6,
        intermediate_size=28,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
        tie_word_embeddings=tied,
        eos_token_id=2,
        bos_token_id=1,
        pad_token_id=0,
    )
    torch.manual_seed(7)
    model = Qwen2ForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = 0.3 if name.endswith("bias") else 0.2
            parameter.copy_(torch.randn_like(parameter) * scale + (1.0 if "norm" in name else 0.0))
    model.save_pretrained(directory)
    build_tokenizer().save_pretrained(directory)


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
            answers.append(Graded(response=response, text="", score=score))
        prompt = Prompt(index=index, text="", ids=tokens(2 + 2 * index), answer="")
        groups.append(Group(prompt=prompt, responses=tuple(answers)))
    return groups
