"""Prompts from JSONL files, rendered and tokenised once."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from megatron_rl.config import DataConfig
from megatron_rl.errors import UserError
from megatron_rl.types import Prompt


@dataclass(frozen=True)
class PromptSet:
    """The usable prompts of a file."""

    prompts: tuple[Prompt, ...]
    skipped: int
    """Prompts over the limit that were left out."""

    fingerprint: str
    """SHA-256 of their token ids and answers: which data a run was made with."""


def load_tokenizer(directory: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of an HF directory.

    Raises:
        UserError: there is none.
    """
    if not any((directory / name).exists() for name in ("tokenizer.json", "vocab.json", "tokenizer.model")):
        raise UserError(f"{directory}: no usable tokenizer (no tokenizer.json)")
    try:
        return AutoTokenizer.from_pretrained(directory)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{directory}: no usable tokenizer ({str(error).splitlines()[0]})") from None


def load_prompts(path: Path, tokenizer: PreTrainedTokenizerBase, config: DataConfig) -> PromptSet:
    """Read a JSONL file of prompts.

    Raises:
        UserError: no such file, a malformed line (file and line number), no usable prompt, or a prompt over the limit
            while `data.overlong_prompts` is `refuse`.
    """
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    prompts, overlong = [], []
    for number, line in enumerate(raw.splitlines(), 1):
        if not line.strip():
            continue
        row = _parse(line, path, number)
        ids = _tokenise(row["prompt"], tokenizer, config, f"{path}:{number}")
        if len(ids) > config.max_prompt_tokens:
            overlong.append(number)
            continue
        metadata = {key: value for key, value in row.items() if key not in ("prompt", "answer")}
        text = tokenizer.decode(ids)
        prompts.append(Prompt(index=number, text=text, ids=ids, answer=str(row["answer"]), metadata=metadata))
    if overlong and config.overlong_prompts == "refuse":
        raise UserError(
            f"{path}:{overlong[0]}: prompt over data.max_prompt_tokens ({config.max_prompt_tokens}), one of "
            f"{len(overlong)}; raise the limit or set data.overlong_prompts=skip"
        )
    if not prompts:
        why = f"all {len(overlong)} are over data.max_prompt_tokens" if overlong else "the file is empty"
        raise UserError(f"{path}: no prompts: {why}")
    content = json.dumps([(prompt.ids, prompt.answer) for prompt in prompts])
    return PromptSet(tuple(prompts), len(overlong), hashlib.sha256(content.encode()).hexdigest())


def _parse(line: bytes, path: Path, number: int) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise UserError(f"{path}:{number}: not JSON ({error})") from None
    if not isinstance(row, dict):
        raise UserError(f"{path}:{number}: a line is a JSON object with `prompt` and `answer`")
    for key in ("prompt", "answer"):
        if key not in row:
            raise UserError(f"{path}:{number}: `{key}` is missing")
    if not isinstance(row["answer"], str | int | float):
        raise UserError(f"{path}:{number}: `answer` is a string or a number, put structured data under other keys")
    return row


def _tokenise(prompt: Any, tokenizer: PreTrainedTokenizerBase, config: DataConfig, where: str) -> tuple[int, ...]:
    if config.chat_template:
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        try:
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except (ValueError, TypeError, KeyError, TemplateError) as error:
            raise UserError(f"{where}: the chat template failed ({error})") from None
        ids = tokenizer(text, add_special_tokens=False).input_ids  # the template writes its own
    elif isinstance(prompt, str):
        ids = tokenizer(prompt).input_ids
    else:
        raise UserError(f"{where}: `prompt` is not a string; for a list of chat messages set data.chat_template=true")
    if not ids:
        raise UserError(f"{where}: the prompt has no tokens")
    return tuple(ids)
