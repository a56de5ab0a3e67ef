"""Tokens from the rank that parsed them to the ranks that want them, and to no other.

Every rank computes the same table from what all know of a response: its length and its home. One all-to-all of host
memory moves the tokens, each response as one int32 block; nothing is asked or agreed on before.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.types import Graded, Group, Response

IDS, LOGPROBS, WEIGHT_VERSIONS = range(3)
"""Rows of a block, `[rows, tokens]`; log-probs are float32 bits."""

TRAINED, ALL = 2, 3
"""Rows that training needs; rows that there are."""


class Held(Protocol):
    """What every rank knows of a response."""

    @property
    def length(self) -> int:
        """In tokens."""

    @property
    def home(self) -> int:
        """The rank that has them."""

    @property
    def response(self) -> Response | None:
        """They; None elsewhere."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """What one rank sends and gets: indices of responses, in order."""

    sends: tuple[tuple[int, ...], ...]
    """To each rank, itself too."""

    gets: tuple[tuple[int, ...], ...]
    """From each rank, itself too."""


def table(homes: Sequence[int], wanted: Sequence[Sequence[int]], rank: int) -> Table:
    """The moves of `rank`. Pure: what one rank sends to another is what that one gets from it.

    Args:
        homes: of each response, the rank that has it.
        wanted: of each rank, the responses that it wants, each once.
        rank: whose moves.
    """
    gets: list[list[int]] = [[] for _ in wanted]
    for index in wanted[rank]:
        gets[homes[index]].append(index)
    return Table(
        sends=tuple(tuple(index for index in of_rank if homes[index] == rank) for of_rank in wanted),
        gets=tuple(map(tuple, gets)),
    )


def deliver(
    responses: Sequence[Held],
    wanted: Sequence[Sequence[int]],
    *,
    rows: int = TRAINED,
    group: dist.ProcessGroup | None = None,
) -> dict[int, Tensor]:
    """The tokens of the responses that this rank wants. A collective over all ranks.

    Args:
        responses: the same on every rank, but for the tokens.
        wanted: of each rank, which of them it wants; the same on every rank.
        rows: how many of a block's.
        group: all ranks; None: the default one.

    Returns:
        By index, int32 `[rows, tokens]` in host memory.
    """
    moves = table([one.home for one in responses], wanted, dist.get_rank(group))
    blocks = {index: block(responses[index], rows) for index in sorted({i for of_rank in moves.sends for i in of_rank})}
    nothing = torch.empty(0, dtype=torch.int32)
    outgoing = torch.cat([nothing, *(blocks[index].flatten() for of_rank in moves.sends for index in of_rank)])
    sent, gotten = (
        [rows * sum(responses[index].length for index in of_rank) for of_rank in side]
        for side in (moves.sends, moves.gets)
    )
    incoming = torch.empty(sum(gotten), dtype=torch.int32)
    dist.all_to_all_single(incoming, outgoing, output_split_sizes=gotten, input_split_sizes=sent, group=group)
    order = [index for of_rank in moves.gets for index in of_rank]
    parts = incoming.split([rows * responses[index].length for index in order])
    return {index: part.view(rows, -1) for index, part in zip(order, parts, strict=True)}


def block(one: Held, rows: int = TRAINED) -> Tensor:
    """The tokens of a response at its home, int32 `[rows, tokens]`.

    Raises:
        RuntimeError: they are not here.
    """
    if one.response is None:
        raise RuntimeError(f"the tokens of a response are asked of a rank that is not its home, {one.home}")
    found = torch.empty(rows, one.length, dtype=torch.int32)
    if not one.length:  # torch takes no empty buffer
        return found
    # Through an array: many times faster than a tensor of a tuple.
    found[IDS] = torch.frombuffer(array("i", one.response.ids), dtype=torch.int32)
    found[LOGPROBS] = torch.frombuffer(array("f", one.response.logprobs), dtype=torch.float32).view(torch.int32)
    if rows > WEIGHT_VERSIONS:
        versions = array("i", one.response.weight_versions)
        found[WEIGHT_VERSIONS] = torch.frombuffer(versions, dtype=torch.int32)
    return found


def at_home(responses: Sequence[Held], *, rows: int = TRAINED) -> dict[int, Tensor]:
    """As `deliver`, where all of them are here."""
    return {index: block(one, rows) for index, one in enumerate(responses)}


def bring_groups(groups: Sequence[Group], to: int, group: dist.ProcessGroup | None = None) -> list[Group]:
    """The groups, whole with texts and tokens on rank `to`; as they were on others. Few: they travel as objects.

    Ranks that have none of them do nothing; those that have some meet rank `to`.
    """
    rank = dist.get_rank(group)
    homes = sorted({one.home for of_prompt in groups for one in of_prompt.responses} - {to})
    found = {rank: _held(groups, rank)}
    host = torch.device("cpu")
    for home in homes:
        if rank == home:
            dist.send_object_list([found[rank]], dst=to, device=host, group=group)
        elif rank == to:
            message: list[dict[tuple[int, int], Graded]] = [{}]
            dist.recv_object_list(message, src=home, device=host, group=group)
            found[home] = message[0]
    if rank != to:
        return list(groups)
    return [
        Group(
            prompt=of_prompt.prompt,
            responses=tuple(found[one.home][place, sample] for sample, one in enumerate(of_prompt.responses)),
        )
        for place, of_prompt in enumerate(groups)
    ]


def _held(groups: Sequence[Group], rank: int) -> dict[tuple[int, int], Graded]:
    """By place and sample, those whose home is `rank`."""
    return {
        (place, sample): one
        for place, group in enumerate(groups)
        for sample, one in enumerate(group.responses)
        if one.home == rank
    }
