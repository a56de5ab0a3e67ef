"""Groups to sequences with advantages and weights, and sequences to padded micro-batches of data-parallel ranks."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.training.batch import Share, make_batch, share_of_rank
from megatron_rl.types import MicroBatch, TrainedResponse
from tests.tiny import graded_group, run_config

NAN = math.nan
# One of four is right; lengths 2, 4, 1, 3. Then two of three, lengths 1, 5, 2. Then one of two, lengths 3, 6.
GROUPS = [
    graded_group(0, [1, 0, 0, 0], [2, 4, 1, 3], prompt_ids=(1, 5)),
    graded_group(1, [1, 0, 1], [1, 5, 2], prompt_ids=(1, 6, 7, 8)),
    graded_group(2, [0, 1], [3, 6], prompt_ids=(1,)),
]
ALL = [1.5, -0.5, -0.5, -0.5, 1 / math.sqrt(3), -2 / math.sqrt(3), 1 / math.sqrt(3), -math.sqrt(0.5), math.sqrt(0.5)]


def algorithm(**switches: Any) -> dict[str, Any]:
    return {"advantage": "grpo", "normalisation": "token_mean_group", "std_eps": 0.0, **switches}


def advantages(sequences: tuple[TrainedResponse, ...]) -> list[float]:
    return [sequence.advantage for sequence in sequences]


def weights(sequences: tuple[TrainedResponse, ...]) -> list[float]:
    return [sequence.weight for sequence in sequences]


def test_a_batch_keeps_the_order_the_ids_and_the_logprobs() -> None:
    (update,) = make_batch(GROUPS, run_config(algorithm=algorithm())).updates
    assert [len(sequence.response_ids) for sequence in update] == [2, 4, 1, 3, 1, 5, 2, 3, 6]
    assert [sequence.prompt_ids for sequence in update] == [(1, 5)] * 4 + [(1, 6, 7, 8)] * 3 + [(1,)] * 2
    answers = [graded.response for group in GROUPS for graded in group.responses]
    assert [sequence.response_ids for sequence in update] == [answer.ids for answer in answers]
    assert [sequence.rollout_logprobs for sequence in update] == [answer.logprobs for answer in answers]
    assert advantages(update) == pytest.approx(ALL, abs=1e-12)


@pytest.mark.parametrize(
    ("normalisation", "expected"),
    [
        ("token_mean_group", [1 / 30] * 4 + [1 / 24] * 3 + [1 / 27] * 2),
        ("token_mean_batch", [1 / 27] * 9),
        ("sequence_mean", [1 / (9 * n) for n in (2, 4, 1, 3, 1, 5, 2, 3, 6)]),
        ("constant", [1 / (9 * 11)] * 9),
    ],
)
def test_the_weights_of_each_normalisation(normalisation: str, expected: list[float]) -> None:
    config = run_config(algorithm=algorithm(normalisation=normalisation), rollout={"max_response_tokens": 11})
    (update,) = make_batch(GROUPS, config).updates
    assert weights(update) == pytest.approx(expected, rel=1e-12)


def test_optimizer_steps_hold_whole_groups_and_are_weighted_one_by_one() -> None:
    two = make_batch(GROUPS, run_config(algorithm=algorithm(updates_per_rollout=2))).updates
    assert [len(update) for update in two] == [4, 5]
    assert [advantages(update) for update in two] == [pytest.approx(ALL[:4]), pytest.approx(ALL[4:])]
    assert weights(two[0]) == pytest.approx([1 / 10] * 4)
    assert weights(two[1]) == pytest.approx([1 / 16] * 3 + [1 / 18] * 2)
    three = make_batch(GROUPS, run_config(algorithm=algorithm(updates_per_rollout=3))).updates
    assert [len(update) for update in three] == [4, 3, 2]


def test_fewer_groups_than_optimizer_steps_make_one_step_each() -> None:
    config = run_config(algorithm=algorithm(updates_per_rollout=5))
    assert [len(update) for update in make_batch(GROUPS, config).updates] == [4, 3, 2]
    assert [len(update) for update in make_batch(GROUPS[:1], config).updates] == [4]


def test_rewards_are_wrong_and_right_and_what_lies_between() -> None:
    group = graded_group(0, [1, 0, 0.25], [2, 3, 4])
    config = run_config(algorithm=algorithm(advantage="dr_grpo"), rewards={"wrong": -1, "right": 3})
    (update,) = make_batch([group], config).updates
    # Rewards 3, −1, 0: mean 2/3.
    assert advantages(update) == pytest.approx([7 / 3, -5 / 3, -2 / 3])


def test_a_soft_punishment_is_added_to_the_reward_after_grading() -> None:
    # A budget of 20 and a buffer of 8: 16 tokens cost 1/2, 20 cost 1.
    group = graded_group(0, [1, 1, 0, 0], [12, 16, 20, 3], truncated=(2,))
    config = run_config(
        algorithm=algorithm(advantage="dr_grpo", soft_overlong={"buffer": 8}),
        rollout={"max_response_tokens": 20},
        rewards={"wrong": -1.0},
    )
    batch = make_batch([group], config)
    # Rewards 1, 1/2, −2, −1: mean −3/8.
    assert advantages(batch.updates[0]) == pytest.approx([1.375, 0.875, -1.625, -0.625])
    assert batch.metrics["batch/reward"] == (pytest.approx(-1.5), 4.0)


def test_truncated_responses_stay_in_the_statistics_and_are_not_trained_on() -> None:
    group = graded_group(0, [1, 0, 0, 0], [2, 4, 1, 3], truncated=(1,))
    (update,) = make_batch([group], run_config(algorithm=algorithm(mask_truncated=True))).updates
    assert advantages(update) == pytest.approx([1.5, -0.5, -0.5, -0.5])  # of all four
    assert weights(update) == pytest.approx([1 / 6, 0, 1 / 6, 1 / 6])
    (update,) = make_batch([group], run_config(algorithm=algorithm(mask_truncated=False))).updates
    assert weights(update) == pytest.approx([1 / 10] * 4)


def test_ungraded_responses_leave_the_statistics_and_are_not_trained_on() -> None:
    group = graded_group(0, [1, NAN, 0, 0, 0], [2, 7, 4, 1, 3])
    batch = make_batch([group], run_config(algorithm=algorithm()))
    assert advantages(batch.updates[0]) == pytest.approx([1.5, 0, -0.5, -0.5, -0.5])
    assert weights(batch.updates[0]) == pytest.approx([1 / 10, 0, 1 / 10, 1 / 10, 1 / 10])
    assert batch.metrics["batch/reward"] == (1.0, 4.0)
    assert batch.metrics["batch/tokens"] == (10.0, 1.0)


@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo"])  # the collector lets no such group through
def test_a_group_with_one_graded_response_does_not_end_the_run(estimator: str) -> None:
    lone = graded_group(3, [NAN, 1, NAN], [2, 4, 1])
    (update,) = make_batch([GROUPS[0], lone], run_config(algorithm=algorithm(advantage=estimator))).updates
    assert advantages(update)[4:] == [0.0, 0.0, 0.0]


def test_figures_about_the_batch() -> None:
    metrics = make_batch(GROUPS, run_config(algorithm=algorithm(advantage="dr_grpo"))).metrics
    assert metrics["batch/groups"] == (3.0, 1.0)
    assert metrics["batch/responses"] == (9.0, 1.0)
    assert metrics["batch/tokens"] == (27.0, 1.0)
    assert metrics["batch/reward"] == (4.0, 9.0)
    # |A|: 0.75 + 3 · 0.25, then 1/3 + 2/3 + 1/3, then 1/2 + 1/2.
    assert metrics["batch/advantage_abs"] == (pytest.approx(1.5 + 4 / 3 + 1), 9.0)


# ---- micro-batches


def sequence(number: int, prompt: int, length: int, weight: float = 1.0) -> TrainedResponse:
    """Distinct, positive ids; the log-probs say which response and position they belong to."""
    first = 1000 * (number + 1)
    return TrainedResponse(
        prompt_ids=tuple(range(first, first + prompt)),
        response_ids=tuple(range(first + 500, first + 500 + length)),
        rollout_logprobs=tuple(-(number + 1) - position / 64 for position in range(length)),
        advantage=(-1) ** number * (number + 1) / 8,
        weight=weight * (number + 1) / 16,
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
    assert (batch.tokens.dtype, batch.labels.dtype, batch.mask.dtype) == (torch.int64, torch.int64, torch.bool)
    assert {batch.weights.dtype, batch.advantages.dtype, batch.rollout_logprobs.dtype} == {torch.float32}
    assert batch.tokens.is_contiguous()
    assert batch.labels.is_contiguous()


def test_the_end_of_sequence_is_trained_when_sampled_and_never_invented() -> None:
    eos = 2
    cut = TrainedResponse(prompt_ids=(1, 9), response_ids=(5, 6), rollout_logprobs=(-1.0, -2.0), advantage=1, weight=1)
    stopped = TrainedResponse(
        prompt_ids=(1, 9), response_ids=(5, 6, eos), rollout_logprobs=(-1.0, -2.0, -3.0), advantage=1, weight=1
    )
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
