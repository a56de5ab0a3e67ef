"""Responses to padded micro-batches of data-parallel ranks."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.training.micro_batches import Share, share_of_rank
from megatron_rl.types import MicroBatch, TrainedResponse


def sequence(number: int, prompt: int, length: int, weight: float = 1.0) -> TrainedResponse:
    """Distinct, positive ids; the log-probs say which response and position they belong to."""
    first = 1000 * (number + 1)
    return TrainedResponse(
        prompt_ids=tuple(range(first, first + prompt)),
        response_ids=tuple(range(first + 500, first + 500 + length)),
        rollout_logprobs=tuple(-(number + 1) - position / 64 for position in range(length)),
        advantage=(-1) ** number * (number + 1) / 8,
        weight=weight * (number + 1) / 16,
        group=number // 2,
        number=number,
    )


UPDATE = [sequence(0, 2, 3), sequence(1, 4, 6), sequence(2, 1, 1), sequence(3, 3, 5, weight=0.0), sequence(4, 2, 9)]


def shares(update: list[TrainedResponse], ranks: int, size: int, multiple: int = 1) -> list[Share]:
    return [
        share_of_rank(update, rank=rank, ranks=ranks, micro_batch_size=size, multiple=multiple) for rank in range(ranks)
    ]


def rows(batch: MicroBatch) -> list[dict[int, tuple[float, float, float]]]:
    """For each row that trains something: label to (weight, advantage, log-prob)."""
    return [
        {
            int(batch.labels[row, t]): (
                batch.weights[row, t].item(),
                batch.advantages[row, t].item(),
                batch.rollout_logprobs[row, t].item(),
            )
            for t in batch.mask[row].nonzero().squeeze(1).tolist()
        }
        for row in range(len(batch.mask))
        if batch.mask[row].any()
    ]


def test_a_row_is_the_sequence_and_its_mask_predicts_exactly_the_response() -> None:
    (share,) = shares([sequence(0, 2, 3)], ranks=1, size=1, multiple=3)
    (batch,) = share.micro_batches
    assert share.seq_length == 6  # four positions, rounded up to threes
    assert batch.tokens.tolist() == [[1000, 1001, 1500, 1501, 1502, 0]]
    assert batch.labels.tolist() == [[1001, 1500, 1501, 1502, 0, 0]]
    assert batch.mask.tolist() == [[False, True, True, True, False, False]]
    assert batch.weights.tolist() == [[0, 1 / 16, 1 / 16, 1 / 16, 0, 0]]
    assert batch.advantages.tolist() == [[0, 1 / 8, 1 / 8, 1 / 8, 0, 0]]
    assert batch.rollout_logprobs.tolist() == [[0, -1, -1 - 1 / 64, -1 - 2 / 64, 0, 0]]
    assert batch.response_ids.tolist() == batch.group_ids.tolist() == [[-1, 0, 0, 0, -1, -1]]
    assert (batch.responses, batch.numbers) == (1, (0,))
    assert (batch.tokens.dtype, batch.labels.dtype, batch.mask.dtype) == (torch.int64, torch.int64, torch.bool)
    assert {batch.weights.dtype, batch.advantages.dtype, batch.rollout_logprobs.dtype} == {torch.float32}
    assert batch.tokens.is_contiguous()
    assert batch.labels.is_contiguous()


def test_the_end_of_sequence_is_trained_when_sampled_and_never_invented() -> None:
    eos = 2
    stopped = TrainedResponse(
        prompt_ids=(1, 9),
        response_ids=(5, 6, eos),
        rollout_logprobs=(-1.0, -2.0, -3.0),
        advantage=1,
        weight=1,
        group=0,
        number=1,
    )
    cut = replace(stopped, response_ids=(5, 6), rollout_logprobs=(-1.0, -2.0), number=0)
    (share,) = shares([cut, stopped], ranks=1, size=2)
    trained = [sorted(row) for row in rows(share.micro_batches[0])]
    assert trained == [[eos, 5, 6], [5, 6]]


@pytest.mark.parametrize(("ranks", "size"), [(1, 1), (1, 3), (1, 9), (2, 1), (2, 3), (3, 2), (7, 2)])
def test_ranks_together_hold_every_trained_sequence_once(ranks: int, size: int) -> None:
    all_shares = shares(UPDATE, ranks, size)
    found = [row for share in all_shares for batch in share.micro_batches for row in rows(batch)]
    expected = [
        {
            label: (pytest.approx(s.weight), pytest.approx(s.advantage), pytest.approx(logprob))
            for label, logprob in zip(s.response_ids, s.rollout_logprobs, strict=True)
        }
        for s in UPDATE
        if s.weight
    ]
    assert sorted(found, key=min) == sorted(expected, key=min)
    assert len({len(share.micro_batches) for share in all_shares}) == 1
    assert {share.seq_length for share in all_shares} == {10}
    count = len(all_shares[0].micro_batches)
    for share in all_shares:
        for batch in share.micro_batches:
            assert batch.tokens.shape == batch.labels.shape == batch.mask.shape == (math.ceil(4 / (ranks * count)), 10)


def test_a_rank_without_sequences_runs_on_padding() -> None:
    *_, last = shares(UPDATE, ranks=7, size=2)
    (batch,) = last.micro_batches
    assert not batch.mask.any()
    assert not batch.weights.any()
    assert batch.tokens.eq(0).all()


@pytest.mark.parametrize("multiple", [1, 4])
def test_nothing_to_train_on_is_one_micro_batch_of_padding(multiple: int) -> None:
    untrained = [sequence(0, 2, 3, weight=0.0)]
    for share in shares(untrained, ranks=2, size=3, multiple=multiple):
        (batch,) = share.micro_batches
        assert batch.mask.shape == (1, multiple)
        assert not batch.mask.any()


def test_a_row_knows_its_response_its_group_and_its_number_in_the_batch() -> None:
    (share,) = shares(UPDATE[:3], ranks=1, size=4)
    (batch,) = share.micro_batches
    # Longest first: the second response, the first, the third; groups 0, 0 and 1.
    assert batch.numbers == (1, 0, 2)
    assert [sorted(set(row.tolist())) for row in batch.response_ids] == [[-1, 0], [-1, 1], [-1, 2]]
    assert [sorted(set(row.tolist())) for row in batch.group_ids] == [[-1, 0], [-1, 0], [-1, 1]]
    assert batch.responses == 3
    assert torch.equal(batch.response_ids >= 0, batch.mask)
    assert torch.equal(batch.group_ids >= 0, batch.mask)


def test_ranks_get_like_lengths() -> None:
    update = [sequence(number, 1, length) for number, length in enumerate([9, 1, 8, 2, 7, 3, 6, 4])]
    totals = [sum(int(batch.mask.sum()) for batch in share.micro_batches) for share in shares(update, ranks=2, size=2)]
    assert sum(totals) == 40
    assert max(totals) - min(totals) <= 4


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 5), st.integers(1, 7), st.sampled_from([0.0, 1.0])), max_size=12),
    st.integers(1, 5),
    st.integers(1, 4),
    st.sampled_from([1, 2, 4]),
)
def test_any_update_is_dealt_out_whole(
    sizes: list[tuple[int, int, float]], ranks: int, size: int, multiple: int
) -> None:
    update = [sequence(number, *of_one) for number, of_one in enumerate(sizes)]
    trained = [s for s in update if s.weight]
    all_shares = shares(update, ranks, size, multiple)
    labels = [label for share in all_shares for batch in share.micro_batches for row in rows(batch) for label in row]
    assert sorted(labels) == sorted(label for s in trained for label in s.response_ids)
    total = sum(batch.weights.double().sum().item() for share in all_shares for batch in share.micro_batches)
    assert total == pytest.approx(sum(s.weight * len(s.response_ids) for s in trained))
    counts = {len(share.micro_batches) for share in all_shares}
    assert counts == {max(1, math.ceil(len(trained) / (ranks * size)))}
    shapes = {tuple(batch.tokens.shape) for share in all_shares for batch in share.micro_batches}
    assert len(shapes) == 1
    assert shapes.pop()[0] <= size
    assert all(share.seq_length % multiple == 0 for share in all_shares)
