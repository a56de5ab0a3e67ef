"""Responses to packed micro-batches of data-parallel and context-parallel ranks."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.training.micro_batches import Place
from megatron_rl.types import MicroBatch, TrainedResponse
from tests.cases.micro import FLOPS, share_of_rank
from tests.cases.responses import tokens_of, trained_response


def sequence(number: int, prompt: int, length: int, weight: float = 1.0) -> TrainedResponse:
    """Distinct, positive ids; the log-probs say which response and position they belong to."""
    first = 1000 * (number + 1)
    return trained_response(
        prompt_ids=tuple(range(first, first + prompt)),
        response_ids=tuple(range(first + 500, first + 500 + length)),
        rollout_logprobs=tuple(-(number + 1) - position / 64 for position in range(length)),
        advantage=(-1) ** number * (number + 1) / 8,
        weight=weight * (number + 1) / 16,
        group=number // 2,
        number=number,
    )


UPDATE = [sequence(0, 2, 3), sequence(1, 4, 6), sequence(2, 1, 1), sequence(3, 3, 5, weight=0.0), sequence(4, 2, 9)]


def shares(
    update: list[TrainedResponse], ranks: int, size: int | None, max_tokens: int | None = None, **place: int
) -> list[tuple[MicroBatch, ...]]:
    return [
        share_of_rank(
            update,
            Place(rank=rank, ranks=ranks, **place),
            flops=FLOPS,
            micro_batch_size=size,
            max_tokens=max_tokens,
        )
        for rank in range(ranks)
    ]


def trained(batch: MicroBatch) -> dict[int, tuple[float, float, float]]:
    """Label to (weight, advantage, log-prob), of all that is trained."""
    columns = (batch.labels, batch.weights, batch.advantages, batch.rollout_logprobs)
    labels, *rest = (column[batch.mask].tolist() for column in columns)
    return dict(zip(labels, zip(*rest, strict=True), strict=True))


def test_responses_stand_one_after_another_and_the_mask_predicts_exactly_them() -> None:
    ((batch,),) = shares([sequence(0, 2, 3), sequence(1, 1, 2)], ranks=1, size=2)
    assert batch.tokens.tolist() == [[1000, 1001, 1500, 1501, 2000, 2500]]
    assert batch.labels.tolist() == [[1001, 1500, 1501, 1502, 2500, 2501]]
    assert batch.positions.tolist() == [[0, 1, 2, 3, 0, 1]]
    assert batch.mask.tolist() == [[False, True, True, True, True, True]]
    assert batch.weights.tolist() == [[0, 1 / 16, 1 / 16, 1 / 16, 1 / 8, 1 / 8]]
    assert batch.advantages.tolist() == [[0, 1 / 8, 1 / 8, 1 / 8, -1 / 4, -1 / 4]]
    assert batch.rollout_logprobs.tolist() == [[0, -1, -1 - 1 / 64, -1 - 2 / 64, -2, -2 - 1 / 64]]
    assert batch.response_ids.tolist() == [[-1, 0, 0, 0, 1, 1]]
    assert batch.group_ids.tolist() == [[-1, 0, 0, 0, 0, 0]]
    assert (batch.responses, batch.numbers, batch.lengths) == (2, (0, 1), (4, 2))
    assert batch.starts.tolist() == [0, 4, 6]
    assert batch.starts.dtype == torch.int32
    assert (batch.tokens.dtype, batch.labels.dtype, batch.mask.dtype) == (torch.int64, torch.int64, torch.bool)
    assert {batch.weights.dtype, batch.advantages.dtype, batch.rollout_logprobs.dtype} == {torch.float32}


def test_under_context_parallelism_a_rank_holds_a_chunk_from_the_front_and_one_from_the_back_of_each_response() -> None:
    update = [sequence(0, 2, 6), sequence(1, 1, 2)]  # 7 and 2 tokens, padded to 8 and 4
    (first,), (second,) = (
        share_of_rank(update, Place(context_rank=rank, context_ranks=2), flops=FLOPS, micro_batch_size=2)
        for rank in range(2)
    )
    assert first.tokens.tolist() == [[1000, 1001, 1505 - 1, 0, 2000, 0]]
    assert second.tokens.tolist() == [[1500, 1501, 1502, 1503, 2500, 0]]
    assert first.positions.tolist() == [[0, 1, 6, 7, 0, 3]]
    assert second.positions.tolist() == [[2, 3, 4, 5, 1, 2]]
    assert first.mask.tolist() == [[False, True, True, False, True, False]]
    assert second.mask.tolist() == [[True, True, True, True, True, False]]
    assert first.lengths == second.lengths == (8, 4)
    assert first.starts.tolist() == second.starts.tolist() == [0, 8, 12]
    assert trained(first).keys().isdisjoint(trained(second))
    assert sorted(trained(first) | trained(second)) == [1500, 1501, 1502, 1503, 1504, 1505, 2500, 2501]


def test_sequence_parallelism_splits_what_a_rank_holds_evenly() -> None:
    for context_rank in range(2):
        place = Place(context_rank=context_rank, context_ranks=2, multiple=3)
        for batch in share_of_rank(UPDATE, place, flops=FLOPS, micro_batch_size=2):
            assert batch.tokens.shape[1] % 3 == 0
            assert all(length % 4 == 0 for length in batch.lengths)
            assert sum(batch.lengths) == 2 * batch.tokens.shape[1] == int(batch.starts[-1])


def test_the_end_of_sequence_is_trained_when_sampled_and_never_invented() -> None:
    eos = 2
    cut, stopped = (
        trained_response(
            prompt_ids=(1, 9),
            response_ids=ids,
            rollout_logprobs=(-1.0, -2.0, -3.0)[: len(ids)],
            advantage=1,
            weight=1,
            group=0,
            number=number,
        )
        for number, ids in enumerate([(5, 6), (5, 6, eos)])
    )
    ((batch,),) = shares([cut, stopped], ranks=1, size=2)
    assert batch.labels[batch.mask].tolist() == [5, 6, eos, 5, 6]


@pytest.mark.parametrize(("ranks", "size"), [(1, 1), (1, 3), (1, 9), (2, 1), (2, 3), (3, 2), (7, 2)])
def test_ranks_together_hold_every_trained_response_once(ranks: int, size: int) -> None:
    all_shares = shares(UPDATE, ranks, size)
    found = [trained(batch) for share in all_shares for batch in share]
    expected = {
        label: (pytest.approx(one.weight), pytest.approx(one.advantage), pytest.approx(logprob))
        for one in UPDATE
        if one.weight
        for label, logprob in zip(tokens_of(one).ids, tokens_of(one).logprobs, strict=True)
    }
    assert {label: values for of_batch in found for label, values in of_batch.items()} == expected
    assert sum(map(len, found)) == len(expected)
    assert len({len(share) for share in all_shares}) == 1
    assert all(batch.responses <= size for share in all_shares for batch in share)


def test_a_rank_without_responses_runs_on_padding() -> None:
    *_, last = shares(UPDATE, ranks=7, size=2)
    (batch,) = last
    assert batch.tokens.tolist() == [[0]]
    assert not batch.mask.any()
    assert (batch.responses, batch.numbers) == (0, ())


@pytest.mark.parametrize(("context_ranks", "multiple", "tokens"), [(1, 1, 1), (1, 4, 4), (2, 1, 2), (2, 2, 4)])
def test_nothing_to_train_on_is_one_micro_batch_of_padding(context_ranks: int, multiple: int, tokens: int) -> None:
    untrained = [sequence(0, 2, 3, weight=0.0)]
    for share in shares(untrained, ranks=2, size=3, context_ranks=context_ranks, multiple=multiple):
        (batch,) = share
        assert batch.mask.shape == (1, tokens)
        assert not batch.mask.any()


@pytest.mark.parametrize(
    ("max_tokens", "lengths"), [(None, [(10, 9, 4, 1)]), (14, [(9, 4), (10, 1)]), (5, [(10,), (9,), (4, 1)])]
)
def test_a_micro_batch_holds_no_more_tokens_than_it_may_but_for_one_long_response(
    max_tokens: int | None, lengths: list[tuple[int, ...]]
) -> None:
    (share,) = shares(UPDATE, ranks=1, size=9, max_tokens=max_tokens)
    assert [batch.lengths for batch in share] == lengths


def test_the_padding_of_a_micro_batch_counts() -> None:
    (share,) = shares(UPDATE, ranks=1, size=None, max_tokens=14, multiple=8)  # 9 + 4 would be padded to 16
    assert [batch.lengths for batch in share] == [(16,), (16,), (4, 4)]


def test_a_pipeline_gets_as_many_micro_batches_as_it_needs() -> None:
    share = share_of_rank(UPDATE, Place(), flops=FLOPS, max_tokens=14, multiple=4)
    assert [batch.numbers for batch in share] == [(4,), (1, 2), (0,), ()]


def test_ranks_get_like_lengths() -> None:
    update = [sequence(number, 1, length) for number, length in enumerate([9, 1, 8, 2, 7, 3, 6, 4])]
    totals = [sum(int(batch.mask.sum()) for batch in share) for share in shares(update, ranks=2, size=2)]
    assert sum(totals) == 40
    assert max(totals) - min(totals) <= 4


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(1, 5), st.integers(1, 7), st.sampled_from([0.0, 1.0])), max_size=12),
    st.integers(1, 4),
    st.sampled_from([None, 1, 2, 4]),
    st.sampled_from([1, 2, 3]),
    st.sampled_from([1, 2, 8]),
    st.sampled_from([None, 3, 9, 20]),
)
def test_any_update_is_dealt_out_whole(
    sizes: list[tuple[int, int, float]],
    ranks: int,
    size: int | None,
    context_ranks: int,
    multiple: int,
    max_tokens: int | None,
) -> None:
    update = [sequence(number, *of_one) for number, of_one in enumerate(sizes)]
    of_context = [
        shares(
            update,
            ranks,
            size,
            max_tokens,
            context_ranks=context_ranks,
            context_rank=context_rank,
            multiple=multiple,
        )
        for context_rank in range(context_ranks)
    ]
    batches = [batch for all_shares in of_context for share in all_shares for batch in share]
    labels = [label for batch in batches for label in batch.labels[batch.mask].tolist()]
    assert sorted(labels) == sorted(label for one in update if one.weight for label in tokens_of(one).ids)
    total = sum(batch.weights.double().sum().item() for batch in batches)
    assert total == pytest.approx(sum(one.weight * one.length for one in update))
    assert len({len(share) for all_shares in of_context for share in all_shares}) == 1
    for batch in batches:
        assert size is None or batch.responses <= size
        assert batch.responses <= 1 or max_tokens is None or sum(batch.lengths) <= max_tokens
        assert batch.tokens.shape[1] * context_ranks == sum(batch.lengths)
        assert batch.tokens.shape[1] % multiple == 0
