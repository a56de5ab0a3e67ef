"""What a step leaves to the next: groups that were kept beyond the batch, answers that pause. Also in checkpoints."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from megatron_rl.errors import UserError
from megatron_rl.rollout.groups import EngineGroup
from megatron_rl.rollout.leader import Begun
from megatron_rl.rollout.ledger import TRAINING_STREAM, Carried, Completed, Draw, Ledger
from megatron_rl.types import FinishReason, Graded, Group, Prompt, Response

_REASONS: tuple[FinishReason, ...] = ("stop", "length", "abort")


@dataclass(frozen=True, kw_only=True)
class Leftover:
    """What a step leaves to the next one, as one rank has it."""

    draws: tuple[Carried, ...] = ()
    """In prompt order; the same on every rank."""

    held: Mapping[int, Group]
    """By position: groups of them that are completed and have their home on this rank."""

    begun: Mapping[int, Begun]
    """By position: what this rank has of the answers to others."""


NOTHING = Leftover(held={}, begun={})


def leftover_of(
    ledger: Ledger, groups: Mapping[int, Group], begun: Mapping[int, Begun], first: int | None = None
) -> Leftover:
    """The draws behind the batch of a ledger that is over.

    Args:
        ledger: it.
        groups: by number, all that are completed; with tokens those of this rank.
        begun: by number, what this rank has of others.
        first: from which draw on; None: behind the batch.
    """
    behind = list(enumerate(ledger.entries))[ledger.passed if first is None else first :]
    whole = {number for number, one in behind if one.done and all(g.response for g in groups[number].responses)}
    return Leftover(
        draws=tuple(Carried(draw=one.draw, engine=one.engine, done=one.done) for _, one in behind),
        held={one.draw.position: groups[number] for number, one in behind if number in whole},
        begun={one.draw.position: begun[number] for number, one in behind if number in begun},
    )


def to_json(leftover: Leftover) -> list[dict[str, Any]]:
    """What every rank knows of it."""
    return [
        {
            "position": one.draw.position,
            "step": one.draw.step,
            "row": one.draw.prompt.index,
            "answers": one.done and [(n, reason, None if s != s else s) for n, reason, s in one.done.answers],
            "kept": one.done and one.done.kept,
        }
        for one in leftover.draws
    ]


def write_tokens(path: Path, leftover: Leftover) -> bool:
    """Write the tokens that this rank has; no file if it has none. Whether there is one."""
    found = [(place, n, g.response, g.details) for place, group in leftover.held.items() for n, g in _numbered(group)]
    found += [(place, n, one, {}) for place, answers in leftover.begun.items() for n, one in enumerate(answers)]
    rows = [(place, n, one, details) for place, n, one, details in found if one is not None]
    if not rows:
        return False
    responses = [one for _, _, one, _ in rows]
    columns = {
        "position": torch.tensor([place for place, *_ in rows]),
        "sample": torch.tensor([n for _, n, *_ in rows]),
        "length": torch.tensor([len(one.ids) for one in responses]),
        "finish": torch.tensor([_REASONS.index(one.finish_reason) for one in responses]),
        "ids": torch.tensor([token for one in responses for token in one.ids], dtype=torch.int32),
        "logprobs": torch.tensor([x for one in responses for x in one.logprobs], dtype=torch.float64),
        "versions": torch.tensor([v for one in responses for v in one.weight_versions], dtype=torch.int32),
    }
    details = json.dumps([dict(each) for *_, each in rows])
    save_file(columns, path, metadata={"details": details})
    return True


def read(
    files: Sequence[Path],
    known: Sequence[Mapping[str, Any]],
    prompts: Mapping[int, Prompt],
    group: EngineGroup,
    decode: Callable[[Sequence[int]], str],
    *,
    responses: int,
) -> Leftover:
    """What a checkpoint holds of it, divided anew over the engines.

    Args:
        files: of `write_tokens`, of all ranks.
        known: of `to_json`.
        prompts: of the data, by row.
        group: the engine of this rank.
        decode: token ids to text.
        responses: size of a group; the file has nothing of answers that were not begun.

    Raises:
        UserError: a file is damaged, or answers are missing.
    """
    draws = []
    for number, row in enumerate(known):
        engine = number % group.engines
        draw = Draw(stream=TRAINING_STREAM, position=row["position"], prompt=prompts[row["row"]], step=row["step"])
        done = None
        if row["answers"]:
            answers = tuple((n, reason, float("nan") if s is None else s) for n, reason, s in row["answers"])
            done = Completed(number=number, engine=engine, answers=answers, kept=row["kept"])
        draws.append(Carried(draw=draw, engine=engine, done=done))
    if not group.leads:
        return Leftover(draws=tuple(draws), held={}, begun={})
    wanted = {one.draw.position: one for one in draws if one.engine == group.number}
    found: dict[int, dict[int, tuple[Response, dict[str, Any]]]] = {}
    for path in files:
        for position, sample, response, details in _rows(path):
            if position in wanted:
                found.setdefault(position, {})[sample] = response, details
    held, begun = {}, {}
    for position, one in wanted.items():
        answers_of = found.get(position, {})
        if one.done:
            held[position] = _group(one, answers_of, group.rank, decode)
        elif answers_of:
            size = max(responses, *(n + 1 for n in answers_of))
            begun[position] = [answers_of[n][0] if n in answers_of else None for n in range(size)]
    return Leftover(draws=tuple(draws), held=held, begun=begun)


def _numbered(group: Group) -> list[tuple[int, Graded]]:
    return list(enumerate(group.responses))


def _group(
    one: Carried,
    found: Mapping[int, tuple[Response, dict[str, Any]]],
    home: int,
    decode: Callable[[Sequence[int]], str],
) -> Group:
    assert one.done is not None
    if len(found) < len(one.done.answers):
        raise UserError(
            f"the checkpoint has {len(found)} of {len(one.done.answers)} answers to row {one.draw.prompt.index} of a "
            "later step: a file of it is missing; move it away to go on from the one before"
        )
    answers = (
        Graded.of(found[n][0], score=score, text=decode(found[n][0].ids), details=found[n][1], home=home)
        for n, (_, _, score) in enumerate(one.done.answers)
    )
    return Group(prompt=one.draw.prompt, responses=tuple(answers))


def _rows(path: Path) -> list[tuple[int, int, Response, dict[str, Any]]]:
    from safetensors import safe_open

    try:
        columns = load_file(path)
        with safe_open(path, "pt") as file:
            details = json.loads(file.metadata()["details"])
        lengths = columns["length"].tolist()
        parts = [columns[name].split(lengths) for name in ("ids", "logprobs", "versions")]
        places = zip(columns["position"].tolist(), columns["sample"].tolist(), columns["finish"].tolist(), strict=True)
        return [
            (position, sample, _response(finish, *tokens), each)
            for (position, sample, finish), tokens, each in zip(places, zip(*parts, strict=True), details, strict=True)
        ]
    except (OSError, SafetensorError, LookupError, ValueError, RuntimeError) as error:
        raise UserError(f"{path}: {error}; move its checkpoint away to go on from the one before") from None


def _response(finish: int, ids: torch.Tensor, logprobs: torch.Tensor, versions: torch.Tensor) -> Response:
    return Response(
        ids=tuple(ids.tolist()),
        logprobs=tuple(logprobs.tolist()),
        finish_reason=_REASONS[finish],
        weight_versions=tuple(versions.tolist()),
    )
