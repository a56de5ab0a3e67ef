"""Prompts from JSONL files, rendered and tokenised once."""

import hashlib
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from megatron_rl.config import DataConfig
from megatron_rl.errors import UserError
from megatron_rl.types import Prompt

_MAX_NESTING = 100
"""Levels of objects and lists in a row. Ranks exchange prompts pickled, and pickle gives up at some hundreds."""


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
        tokenizer = AutoTokenizer.from_pretrained(directory)
        tokenizer("")  # a model_max_length that is no number, for one, shows only here
    except Exception as error:  # the Rust library raises nothing narrower, and transformers what it stumbles over
        raise UserError(f"{directory}: no usable tokenizer ({_on_one_line(error)})") from None
    return tokenizer


def usable_ids(tokenizer: PreTrainedTokenizerBase, vocab: int) -> int:
    """How many ids may be sampled, of a model's vocabulary of `vocab`: those that the tokenizer has a text for."""
    return min(max(tokenizer.get_vocab().values()) + 1, vocab)


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
        where = f"{path}:{number}"
        row = _parse(line, where)
        ids = _tokenise(row["prompt"], tokenizer, config, where)
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


def _parse(line: bytes, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
        json.dumps(row, ensure_ascii=False).encode()  # half of a surrogate pair is no text: nothing can write it
    except UnicodeEncodeError as error:
        raise UserError(f"{where}: a lone surrogate, {error.object[error.start]!a}, is not text") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not JSON ({error})") from None
    if not isinstance(row, dict):
        raise UserError(f"{where}: a line is a JSON object with `prompt` and `answer`")
    if _is_deeper(row, _MAX_NESTING):
        raise UserError(f"{where}: nested deeper than {_MAX_NESTING} levels")
    for key in ("prompt", "answer"):
        if key not in row:
            raise UserError(f"{where}: `{key}` is missing")
    answer = row["answer"]
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        raise UserError(f"{where}: `answer` is a string or a number, put structured data under other keys")
    if isinstance(answer, float) and not math.isfinite(answer):
        raise UserError(f"{where}: `answer` is {answer}; write it as a string if that is the right answer")
    return row


def _is_deeper(value: Any, levels: int) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return inner is not None and (levels == 0 or any(_is_deeper(item, levels - 1) for item in inner))


def _tokenise(prompt: Any, tokenizer: PreTrainedTokenizerBase, config: DataConfig, where: str) -> tuple[int, ...]:
    text = _render(prompt, tokenizer, where) if config.chat_template else prompt
    if not isinstance(text, str):
        raise UserError(f"{where}: `prompt` is not a string; for a list of chat messages set data.chat_template=true")
    try:
        ids = tokenizer(text, add_special_tokens=not config.chat_template).input_ids  # a template writes its own
    except Exception as error:  # the Rust library raises nothing narrower
        raise UserError(f"{where}: the tokenizer failed ({_on_one_line(error)})") from None
    if not ids:
        raise UserError(f"{where}: the prompt has no tokens")
    return tuple(ids)


def _render(prompt: Any, tokenizer: PreTrainedTokenizerBase, where: str) -> str:
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if not isinstance(messages, list) or not messages or not all(map(_is_message, messages)):
        raise UserError(f"{where}: `prompt` is a string or a list of chat messages, objects with `role` and `content`")
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # a template is a program of the model's author
        raise UserError(f"{where}: the chat template failed ({_on_one_line(error)})") from None


def _is_message(message: Any) -> bool:
    return (
        isinstance(message, dict)
        and isinstance(message.get("role"), str)
        and (isinstance(message.get("content"), str | list) or "tool_calls" in message)
    )


def _on_one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
