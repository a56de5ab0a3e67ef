"""Who sends which tokens to whom: each response to every rank that wants it, once, and to nobody else."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.rollout.delivery import (
    ALL,
    IDS,
    LOGPROBS,
    TRAINED,
    WEIGHT_VERSIONS,
    at_home,
    block,
    bring_groups,
    deliver,
    table,
)
from megatron_rl.types import Graded, Response
from tests.cases.group import group_of_one
from tests.tiny import graded_group


def answer(length: int, home: int = 0) -> Graded:
    response = Response(
        ids=tuple(range(150_000, 150_000 + length)),
        logprobs=tuple(-0.1 * position for position in range(length)),
        finish_reason="stop",
        weight_versions=tuple(position // 2 for position in range(length)),
    )
    return Graded.of(response, score=1.0, home=home)


def test_the_moves_of_three_ranks_by_hand() -> None:
    # Ranks 0 and 2 lead engines; 0 and 1 train the same; nobody wants response 3.
    homes, wanted = [0, 2, 0, 2, 2], [[4, 0], [4, 0], [2, 1]]
    first, second, third = (table(homes, wanted, rank) for rank in range(3))
    assert first.sends == ((0,), (0,), (2,))
    assert first.gets == ((0,), (), (4,))
    assert second.sends == ((), (), ())
    assert second.gets == ((0,), (), (4,))
    assert third.sends == ((4,), (4,), (1,))
    assert third.gets == ((2,), (), (1,))


@given(st.data())
def test_any_wish_is_met_once_and_nothing_else_moves(data: st.DataObject) -> None:
    ranks = data.draw(st.integers(1, 6))
    homes = data.draw(st.lists(st.integers(0, ranks - 1), max_size=20))
    subset = st.lists(st.sampled_from(range(len(homes))), unique=True) if homes else st.just([])
    wanted = [data.draw(subset) for _ in range(ranks)]
    tables = [table(homes, wanted, rank) for rank in range(ranks)]
    for source, target in itertools.product(range(ranks), repeat=2):
        sent, gotten = tables[source].sends[target], tables[target].gets[source]
        assert sent == gotten
        assert all(homes[index] == source for index in sent)
    for rank in range(ranks):
        assert sorted(index for part in tables[rank].gets for index in part) == sorted(wanted[rank])


def test_a_block_holds_a_response_bit_by_bit() -> None:
    one = answer(5)
    found = block(one, ALL)
    assert found.dtype == torch.int32
    assert one.response is not None
    assert tuple(found[IDS].tolist()) == one.response.ids
    assert torch.equal(found[LOGPROBS].view(torch.float32), torch.tensor(one.response.logprobs))
    assert tuple(found[WEIGHT_VERSIONS].tolist()) == one.response.weight_versions
    assert torch.equal(block(one), found[:TRAINED])


def test_a_log_prob_that_is_not_finite_arrives_as_it_was() -> None:
    response = Response(ids=(1, 2), logprobs=(math.nan, -math.inf), finish_reason="stop", weight_versions=(0, 0))
    logprobs = block(Graded.of(response, score=1.0))[LOGPROBS].view(torch.float32)
    assert logprobs[0].isnan()
    assert logprobs[1] == -math.inf


def test_an_empty_response_is_an_empty_block() -> None:
    assert block(answer(0), ALL).shape == (3, 0)


def test_tokens_that_are_elsewhere_are_an_error_that_names_their_home() -> None:
    with pytest.raises(RuntimeError, match="not its home, 3"):
        block(Graded(length=2, finish_reason="stop", score=1.0, home=3))


def test_a_world_of_one_delivers_to_itself_what_it_wants_alone() -> None:
    answers = [answer(length) for length in (3, 1, 4, 2)]
    with group_of_one():
        found = deliver(answers, [[2, 0]])
        groups = [graded_group(0, [1, 0], [2, 3])]
        assert bring_groups(groups, to=0) == groups
    everything = at_home(answers)
    assert sorted(found) == [0, 2]
    assert all(torch.equal(found[index], everything[index]) for index in found)
    assert sum(part.nbytes for part in found.values()) == 8 * (3 + 4)
