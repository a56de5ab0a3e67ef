"""Which rank trains on which responses, in which micro-batches. Pure: every rank computes the same schedule.

Tokens decide the memory of a micro-batch and FLOPs its time; of as many tokens, those of long responses cost more. So
micro-batches are filled by tokens and levelled by FLOPs, over a *round* (the micro-batches that the ranks work on at
the same time: with expert parallelism they wait for one another in each) and over all that a rank does.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple

FINEST = 10_000
"""Differences below this part of a micro-batch's FLOPs are left: far less than FLOPs are off as a measure of time."""


class _Response(NamedTuple):
    tokens: int
    flops: int
    number: int


_NOTHING = _Response(0, 0, -1)
"""What is taken in exchange where a response is only given."""


@dataclass
class _MicroBatch:
    responses: list[_Response] = field(default_factory=list)
    tokens: int = 0
    flops: int = 0

    def add(self, one: _Response) -> None:
        self.responses.append(one)
        self.tokens += one.tokens
        self.flops += one.flops

    def remove(self, one: _Response) -> None:
        self.responses.remove(one)
        self.tokens -= one.tokens
        self.flops -= one.flops


_flops = attrgetter("flops")


@dataclass(frozen=True, kw_only=True)
class _Limits:
    """Of a micro-batch."""

    tokens: int
    responses: int


def schedule(
    lengths: Sequence[int],
    flops: Callable[[int], int],
    *,
    ranks: int,
    max_tokens: int | None,
    max_responses: int | None = None,
    multiple: int = 1,
) -> list[list[list[int]]]:
    """The micro-batches of every data-parallel rank: each response once, as many micro-batches on every rank.

    They are as few as best fit decreasing needs, and about alike full. The rounds with most FLOPs, which have the
    longest responses, come first. Where responses are few, some micro-batches are empty; a rank has at least one.

    Args:
        lengths: tokens of each response, with its prompt and padding.
        flops: of a response of so many tokens, growing with them.
        ranks: how many there are.
        max_tokens: most tokens in a micro-batch; a longer response gets one of its own. None: no limit.
        max_responses: most responses in a micro-batch. None: no limit.
        multiple: what the number of micro-batches on a rank is a multiple of, as a pipeline may need.

    Returns:
        `[ranks][micro-batches][responses]`: indices of `lengths`, in a micro-batch the longest first.
    """
    responses = sorted(
        (_Response(length, flops(length), number) for number, length in enumerate(lengths)), reverse=True
    )
    limits = _Limits(
        tokens=sum(lengths) if max_tokens is None else max_tokens,
        responses=len(lengths) if max_responses is None else max_responses,
    )
    needed = len(_best_fit(responses, limits))
    rounds = max(1, -(-needed // (ranks * multiple))) * multiple
    batches = sorted(_alike_full(responses, limits, rounds * ranks), key=_flops, reverse=True)
    of_rank: list[list[list[int]]] = [[] for _ in range(ranks)]
    done = [0] * ranks
    for start in range(0, len(batches), ranks):
        together = batches[start : start + ranks]  # neighbours by FLOPs
        _level(together, limits)
        least_done_first = sorted(range(ranks), key=done.__getitem__)
        for rank, batch in zip(least_done_first, sorted(together, key=_flops, reverse=True), strict=True):
            longest_first = sorted(batch.responses, key=lambda one: (-one.tokens, one.number))
            of_rank[rank].append([one.number for one in longest_first])
            done[rank] += batch.flops
    return of_rank


def _best_fit(responses: Sequence[_Response], limits: _Limits) -> list[_MicroBatch]:
    """Each response into the fullest micro-batch with room for it, or into a new one. Longest first packs densest."""
    batches: list[_MicroBatch] = []
    rooms: list[tuple[int, int]] = []  # (tokens left, which micro-batch), sorted, of those that may take more
    for one in responses:
        at = bisect_left(rooms, (one.tokens, 0))
        if at == len(rooms):
            batches.append(_MicroBatch())
            room, which = limits.tokens, len(batches) - 1
        else:
            room, which = rooms.pop(at)
        batches[which].add(one)
        if len(batches[which].responses) < limits.responses:
            insort(rooms, (room - one.tokens, which))
    return batches


def _alike_full(responses: Sequence[_Response], limits: _Limits, count: int) -> list[_MicroBatch]:
    """`count` micro-batches by best fit, with the least tokens in each that it can do with (MULTIFIT).

    Fewer than the longest response has are not tried: its micro-batch takes as long anyhow.
    """

    def fit(tokens: int) -> list[_MicroBatch]:
        return _best_fit(responses, _Limits(tokens=tokens, responses=limits.responses))

    longest = responses[0].tokens if responses else 0
    least = min(max(longest, sum(one.tokens for one in responses) // count), limits.tokens)
    tokens = least + bisect_left(range(least, limits.tokens), True, key=lambda tokens: len(fit(tokens)) <= count)
    batches = fit(tokens)
    return batches + [_MicroBatch() for _ in range(count - len(batches))]


def _level(together: Sequence[_MicroBatch], limits: _Limits) -> None:
    """Lower the heaviest micro-batch of a round, by exchange with lighter ones, for as long as one can."""
    mean = sum(map(_flops, together)) // len(together)
    least = mean // FINEST + 1
    while True:
        *lighter, heaviest = sorted(together, key=_flops)
        if heaviest.flops <= mean + least or not any(_exchange(heaviest, one, limits, least) for one in lighter):
            return


def _exchange(heavy: _MicroBatch, light: _MicroBatch, limits: _Limits, least: int) -> bool:
    """Swap two responses, or move one, so that both micro-batches come nearest to each other.

    Returns:
        False where nothing was done, as the heavier of the two would not have lost `least` FLOPs.
    """
    half = (heavy.flops - light.flops) // 2  # to move exactly so much would level the two
    room = limits.tokens - light.tokens
    takable = sorted(light.responses)
    if len(takable) < limits.responses:
        takable.insert(0, _NOTHING)
    found = []
    for given in heavy.responses:
        at = bisect_left(takable, given.flops - half, key=_flops)
        for taken in takable[max(at - 1, 0) : at + 1]:  # those that move a little more than half, and a little less
            off = abs(given.flops - taken.flops - half)
            if given.tokens - taken.tokens <= room and off <= half - least:
                found.append((off, given, taken))
    if not found:
        return False
    _, given, taken = min(found)
    heavy.remove(given)
    light.add(given)
    if taken is not _NOTHING:
        light.remove(taken)
        heavy.add(taken)
    return True
