"""The batch of a step as numbers, written before it is trained on, so that the step can be computed again."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from megatron_rl.errors import UserError
from megatron_rl.rollout.delivery import IDS, LOGPROBS, WEIGHT_VERSIONS
from megatron_rl.types import FinishReason, Graded, Group, Prompt, Response

_REASONS: tuple[FinishReason, ...] = ("stop", "length", "abort")


def write_batch(path: Path, groups: Sequence[Group], blocks: Mapping[int, Tensor], kl: Sequence[float] | None) -> None:
    """Write the groups of a training batch: ids, log-probs, scores; no texts. About 12 bytes a token.

    Args:
        path: a .safetensors file; whole or not there.
        groups: the batch.
        blocks: the tokens of each of its responses, all rows, as `deliver` gives them.
        kl: see `make_batch`.
    """
    answers = [answer for group in groups for answer in group.responses]
    ordered = [blocks[number] for number in range(len(answers))]
    columns: dict[str, Tensor] = {
        "prompt_index": torch.tensor([group.prompt.index for group in groups]),
        "prompt_lengths": torch.tensor([len(group.prompt.ids) for group in groups]),
        "prompt_ids": _flat((group.prompt.ids for group in groups), torch.int32),
        "group_sizes": torch.tensor([len(group.responses) for group in groups]),
        "lengths": torch.tensor([answer.length for answer in answers]),
        "ids": torch.cat([block[IDS] for block in ordered]),
        "logprobs": torch.cat([block[LOGPROBS] for block in ordered]).view(torch.float32),
        "weight_versions": torch.cat([block[WEIGHT_VERSIONS] for block in ordered]),
        "finish": torch.tensor([_REASONS.index(answer.finish_reason) for answer in answers], dtype=torch.uint8),
        "scores": torch.tensor([answer.score for answer in answers], dtype=torch.float64),
    }
    if kl is not None:
        columns["kl"] = torch.tensor(kl, dtype=torch.float64)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_bytes(save(columns))
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def read_batch(path: Path) -> tuple[list[Group], list[float] | None]:
    """The groups of a file of `write_batch`, without texts, and their divergence from the reference policy.

    Raises:
        UserError: it is not there, or can't be read.
    """
    try:
        columns = load_file(path)
        prompts = list(
            zip(columns["prompt_index"].tolist(), _cut(columns["prompt_ids"], columns["prompt_lengths"]), strict=True)
        )
        lengths = columns["lengths"]
        if int(columns["group_sizes"].sum()) != len(lengths):
            raise ValueError("group_sizes do not add up to the number of responses")
        per_token = [_cut(columns[name], lengths) for name in ("ids", "logprobs", "weight_versions")]
        rest = (columns["finish"].tolist(), columns["scores"].tolist())
        answers = iter(zip(*per_token, *rest, strict=True))
        groups = [
            Group(
                prompt=Prompt(index=index, text="", ids=ids, answer=""),
                responses=tuple(_answer(*row) for row in itertools.islice(answers, size)),
            )
            for (index, ids), size in zip(prompts, columns["group_sizes"].tolist(), strict=True)
        ]
    except (OSError, SafetensorError, LookupError, ValueError, RuntimeError, TypeError) as error:
        raise UserError(f"{path}: {error}") from None
    return groups, columns["kl"].tolist() if "kl" in columns else None


def _answer(
    ids: tuple[int, ...], logprobs: tuple[float, ...], versions: tuple[int, ...], finish: int, score: float
) -> Graded:
    reason = _REASONS[finish]
    response = Response(ids=ids, logprobs=logprobs, weight_versions=versions, finish_reason=reason)
    return Graded.of(response, score=score)


def _flat(rows: Iterable[Sequence[float]], dtype: torch.dtype) -> Tensor:
    return torch.tensor(list(itertools.chain.from_iterable(rows)), dtype=dtype)


def _cut(flat: Tensor, lengths: Tensor) -> list[tuple[Any, ...]]:
    return [tuple(part.tolist()) for part in flat.split(lengths.tolist())]
