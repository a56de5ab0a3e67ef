"""Responses to micro-batches of ranks: the rules for any lengths, cases worked by hand, and how even it comes out."""

import math
import random
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.training.flops import SequenceFlops, sequence_flops
from megatron_rl.training.schedule import schedule
from tests.cases.lengths import QWEN2_5_32B, imbalance, lockstep_loss, response_lengths

FLOPS = SequenceFlops(linear=10, quadratic=1)

arguments = st.fixed_dictionaries(
    {
        "lengths": st.lists(st.integers(1, 30), max_size=40),
        "ranks": st.integers(1, 5),
        "max_tokens": st.none() | st.integers(1, 60),
        "max_responses": st.none() | st.integers(1, 6),
        "multiple": st.integers(1, 3),
    }
)


@given(arguments)
def test_any_lengths_are_scheduled_by_the_rules(case: dict) -> None:
    lengths, max_tokens, max_responses = case["lengths"], case["max_tokens"], case["max_responses"]
    of_rank = schedule(flops=FLOPS, **case)
    assert len(of_rank) == case["ranks"]
    (count,) = {len(batches) for batches in of_rank}
    assert count >= 1
    assert count % case["multiple"] == 0
    all_batches = [batch for batches in of_rank for batch in batches]
    assert sorted(index for batch in all_batches for index in batch) == list(range(len(lengths)))
    for batch in all_batches:
        tokens = [lengths[index] for index in batch]
        assert max_tokens is None or sum(tokens) <= max_tokens or len(batch) == 1
        assert max_responses is None or len(batch) <= max_responses
        assert tokens == sorted(tokens, reverse=True)
    rounds = [
        sum(FLOPS(lengths[index]) for batch in batches for index in batch) for batches in zip(*of_rank, strict=True)
    ]
    assert rounds == sorted(rounds, reverse=True)
    assert schedule(flops=FLOPS, **case) == of_rank


@given(st.lists(st.integers(1, 30), min_size=1, max_size=40), st.integers(1, 5), st.integers(1, 60))
def test_there_are_no_more_micro_batches_than_best_fit_can_need(
    lengths: list[int], ranks: int, max_tokens: int
) -> None:
    """Any two of its micro-batches together exceed the limit, so they are fewer than twice the bound, and one."""
    count = len(schedule(lengths, FLOPS, ranks=ranks, max_tokens=max_tokens)[0])
    too_long = sum(length > max_tokens for length in lengths)
    rest = sum(length for length in lengths if length <= max_tokens)
    assert count <= max(1, math.ceil((too_long + 2 * rest / max_tokens + 1) / ranks))


@given(st.integers(1, 30), st.integers(0, 60), st.integers(1, 5), st.none() | st.integers(1, 90), st.integers(1, 6))
def test_equal_lengths_are_spread_as_evenly_as_they_can_be(
    length: int, responses: int, ranks: int, max_tokens: int | None, max_responses: int
) -> None:
    of_rank = schedule([length] * responses, FLOPS, ranks=ranks, max_tokens=max_tokens, max_responses=max_responses)
    in_one = max_responses if max_tokens is None else max(1, min(max_responses, max_tokens // length))
    assert len(of_rank[0]) == max(1, math.ceil(math.ceil(responses / in_one) / ranks))
    shares = [sum(map(len, batches)) for batches in of_rank]
    assert max(shares) - min(shares) <= 1
    assert all(max(map(len, of_round)) - min(map(len, of_round)) <= 1 for of_round in zip(*of_rank, strict=True))


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("multiple", [1, 4])
def test_without_responses_every_rank_still_has_micro_batches(ranks: int, multiple: int) -> None:
    assert schedule([], FLOPS, ranks=ranks, max_tokens=10, multiple=multiple) == [[[]] * multiple] * ranks


def test_fewer_responses_than_ranks_leave_some_without() -> None:
    assert schedule([5, 9], FLOPS, ranks=4, max_tokens=100) == [[[1]], [[0]], [[]], [[]]]


def test_a_response_that_is_too_long_is_alone() -> None:
    # Best fit: 12; 7 with 3, which fills it; 4 with 2. The last cost least.
    assert schedule([3, 12, 4, 7, 2], FLOPS, ranks=1, max_tokens=10) == [[[1], [3, 0], [2, 4]]]


def test_without_a_limit_a_rank_has_one_micro_batch() -> None:
    assert schedule([1, 2, 3, 4], FLOPS, ranks=2, max_tokens=None) == [[[3, 0]], [[2, 1]]]


def test_the_number_of_responses_limits_a_micro_batch() -> None:
    assert schedule([4, 3, 2, 1], FLOPS, ranks=1, max_tokens=None, max_responses=2) == [[[0, 3], [1, 2]]]


def test_micro_batches_are_levelled_by_flops_and_not_by_tokens() -> None:
    # By tokens it would be 16 + 6 and 3 × 6. But 16 cost 160 + 256 = 416, and 4 × 6 nearly that: 4 (60 + 36) = 384.
    assert schedule([16, 6, 6, 6, 6], FLOPS, ranks=2, max_tokens=24) == [[[0]], [[1, 2, 3, 4]]]


def test_levelling_exceeds_no_limit() -> None:
    # 9 + 8 + 7 cost 434 and 8 × 3 cost 312; 8 against a 3 would level them, with 29 tokens in the lighter.
    assert schedule([9, 8, 7, *[3] * 8], FLOPS, ranks=2, max_tokens=24) == [[[0, 1, 2]], [[*range(3, 11)]]]
    # 24 + 3 cost 855 and 9 + 8 cost 315; 3 would fit in but for the number of responses.
    assert schedule([24, 9, 8, 3], FLOPS, ranks=2, max_tokens=45, max_responses=2) == [[[0, 3]], [[1, 2]]]


def test_the_heavier_micro_batch_goes_to_the_rank_with_less_to_do() -> None:
    first, second = schedule([9, 8, 4, 3], FLOPS, ranks=2, max_tokens=9)
    assert (first, second) == ([[0], [3]], [[1], [2]])


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("ranks", [4, 16])
@pytest.mark.parametrize("max_tokens", [20_480, 40_960])
def test_a_rollout_of_8192_responses_fills_micro_batches_and_loads_ranks_alike(
    max_tokens: int, ranks: int, seed: int
) -> None:
    lengths, flops = response_lengths(8192, seed), sequence_flops(QWEN2_5_32B)
    started = time.process_time()
    of_rank = schedule(lengths, flops, ranks=ranks, max_tokens=max_tokens)
    assert time.process_time() - started < 1
    assert len(of_rank[0]) <= math.ceil(sum(lengths) / (max_tokens * ranks)) + 1
    work = [[sum(flops(lengths[index]) for index in batch) for batch in batches] for batches in of_rank]
    assert imbalance(work) < 0.0005
    assert lockstep_loss(work) < 0.002


@pytest.mark.parametrize(("ranks", "lost"), [(4, 0.005), (16, 0.015)])
@pytest.mark.parametrize("multiple", [1, 4])
def test_an_optimizer_step_of_512_responses_loads_ranks_alike(ranks: int, lost: float, multiple: int) -> None:
    lengths, flops = response_lengths(512, seed=0), sequence_flops(QWEN2_5_32B)
    of_rank = schedule(lengths, flops, ranks=ranks, max_tokens=40_960, multiple=multiple)
    work = [[sum(flops(lengths[index]) for index in batch) for batch in batches] for batches in of_rank]
    assert imbalance(work) < 0.005
    assert lockstep_loss(work) < lost


def test_the_order_of_responses_changes_only_their_numbers() -> None:
    lengths = random.Random(1).sample(range(1, 20_480), 100)  # all distinct
    shuffled = random.Random(0).sample(range(100), 100)
    whole, other = (
        schedule(of, FLOPS, ranks=4, max_tokens=20_480) for of in (lengths, [lengths[index] for index in shuffled])
    )
    assert [[[shuffled[index] for index in batch] for batch in batches] for batches in other] == whole
