"""What a run is given, read and checked before anything is started or written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from megatron_rl.config import Config
from megatron_rl.data.prompts import PromptSet, load_prompts, load_tokenizer, usable_ids
from megatron_rl.errors import UserError
from megatron_rl.resharding.megatron_files import open_weights
from megatron_rl.resharding.sides import check_engine
from megatron_rl.rewards.graders import check_graders
from megatron_rl.rollout.groups import check_engine_groups
from megatron_rl.run_dir import check_run_dir
from megatron_rl.training import setup
from megatron_rl.training.batch import try_batch
from megatron_rl.training.hf_config import ModelSpec, read_model_spec
from megatron_rl.training.objective import Loss, load_loss
from megatron_rl.training.run_state import unchangeable
from megatron_rl.types import Prompt


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """They are right, as far as can be told without starting."""

    spec: ModelSpec
    tokenizer: PreTrainedTokenizerBase
    data: PromptSet
    heldout: PromptSet | None
    loss: Loss
    vocabulary: int
    """Token ids from here on are never sampled."""

    eos: frozenset[int]
    """Sampling one of them ends a response."""

    fixed: Mapping[str, Any]
    """What a run that goes on must share with its checkpoint (`unchangeable`)."""


def read_inputs(config: Config) -> Inputs:
    """Read and check everything that `config` names.

    Raises:
        UserError: bad input, in one line.
    """
    check_run_dir(config.run_dir)
    spec = read_model_spec(config.model.path)
    world = setup.world_size()
    setup.check_layout(config, spec.shape, world)
    check_engine_groups(
        config.rollout.tensor_parallel_size, world, setup.ranks_per_node(), first=setup.first_that_samples(config)
    )
    check_engine(config, spec.shape)
    tokenizer = load_tokenizer(config.model.path)
    data = load_prompts(config.data.train, tokenizer, config.data)
    heldout = load_prompts(config.data.eval, tokenizer, config.data) if config.data.eval else None
    check_graders(config.rewards)
    loss = load_loss(config.algorithm)
    try_batch(config)
    with open_weights(config.model.path, spec.shape):
        vocabulary = usable_ids(tokenizer, spec.shape.vocab)
    prompts = (*data.prompts, *(heldout.prompts if heldout else ()))
    _check_ids(spec.shape.vocab, config.data.train, data.prompts)
    _check_ids(spec.shape.vocab, config.data.eval, heldout.prompts if heldout else ())
    _check_positions(spec.max_positions, prompts, config)
    return Inputs(
        spec=spec,
        tokenizer=tokenizer,
        data=data,
        heldout=heldout,
        loss=loss,
        vocabulary=vocabulary,
        eos=_usable_eos(spec.eos_token_ids, tokenizer.eos_token_id, vocabulary, config),
        fixed=unchangeable(config, spec.shape, data.fingerprint),
    )


def _check_ids(vocab: int, path: Path | None, prompts: Sequence[Prompt]) -> None:
    for prompt in prompts:
        if max(prompt.ids) >= vocab:
            raise UserError(
                f"{path}:{prompt.index}: token id {max(prompt.ids)} is beyond the model's vocab_size ({vocab}); "
                "the tokenizer belongs to another model"
            )


def _check_positions(positions: int | None, prompts: Sequence[Prompt], config: Config) -> None:
    longest = max(len(prompt.ids) for prompt in prompts)
    budget = config.rollout.max_response_tokens
    if positions is not None and longest + budget > positions:
        raise UserError(
            f"rollout.max_response_tokens: {budget} after a prompt of {longest} tokens is more than the {positions} "
            f"positions of the model (max_position_embeddings); lower it or data.max_prompt_tokens"
        )


def _usable_eos(of_model: frozenset[int], of_tokenizer: int | None, vocabulary: int, config: Config) -> frozenset[int]:
    """The ids that end a response, of those that can be sampled."""
    ids = of_model or frozenset(() if of_tokenizer is None else (of_tokenizer,))
    usable = frozenset(token for token in ids if token < vocabulary)
    if not usable:
        raise UserError(
            f"{config.model.path}: no end-of-sequence id among the {vocabulary} ids of the tokenizer (found "
            f"{sorted(ids)}); set eos_token_id in config.json or generation_config.json"
        )
    return usable
