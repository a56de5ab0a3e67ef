"""Dynamic sampling: kept groups fill the batch in prompt order, with a cap on the rounds."""

from collections.abc import Sequence

import pytest

from megatron_rl.config import Config
from megatron_rl.data.stream import PromptStream
from megatron_rl.errors import UserError
from megatron_rl.rollout.collector import Collector
from megatron_rl.rollout.engine import Sampling
from megatron_rl.rollout.figures import sampling_metrics
from megatron_rl.rollout.sampler import TRAINING_STREAM, Draw
from megatron_rl.types import Group, Prompt
from tests.tiny import graded_group, run_config


class Scripted:
    """A sampler whose groups of four have the given numbers of right answers, one after another."""

    def __init__(self, right: list[int]) -> None:
        self.right, self.rounds, self.places = right, list[int](), list[tuple[int, ...]]()
        self.sampling: Sampling | None = None

    def sample(self, draws: Sequence[Draw], *, responses: int, max_tokens: int, sampling: Sampling) -> list[Group]:
        assert (responses, max_tokens) == (4, 9)
        first = len(self.places)
        self.sampling = sampling
        self.rounds.append(len(draws))
        self.places += [draw.place for draw in draws]
        return [
            graded_group(first + i, [1.0] * self.right[first + i] + [0.0] * (4 - self.right[first + i]), [2, 3, 4, 5])
            for i in range(len(draws))
        ]


def collector(
    right: list[int],
    *,
    dynamic: bool = True,
    group_filter: str = "mixed",
    warnings: list[str] | None = None,
    **rollout: object,
) -> tuple[Collector, Scripted]:
    config: Config = run_config(
        algorithm={"dynamic_sampling": dynamic, "group_filter": group_filter},
        rollout={"prompts_per_step": 3, "responses_per_prompt": 4, "max_response_tokens": 9, **rollout},
    )
    prompts = [Prompt(index=number, text="", ids=(1,), answer="") for number in range(5)]
    sampler = Scripted(right)
    warn = ([] if warnings is None else warnings).append
    return Collector(sampler, PromptStream(prompts, seed=0), config, warn), sampler  # type: ignore[arg-type]


def kept(groups: Sequence[Group]) -> list[int]:
    return [group.prompt.index for group in groups]


def test_groups_are_kept_in_prompt_order_until_the_batch_is_full() -> None:
    # Right of four: 0, 2, 4 | 1, 4, 3 | ...: groups 1, 3 and 5 are kept, and two rounds are enough.
    one, sampler = collector([0, 2, 4, 1, 4, 3, 2])
    rollout = one.collect(step=6)
    assert kept(rollout.groups) == [1, 3, 5]
    assert kept(rollout.sampled) == [0, 1, 2, 3, 4, 5]
    assert sampler.rounds == [3, 3]
    values = rollout.metrics.values()
    assert (values["rollout/rounds"], values["rollout/groups_kept"], values["rollout/groups_surplus"]) == (2, 3, 0)
    assert values["rollout/accuracy"] == pytest.approx(14 / 24)


def test_kept_groups_beyond_the_batch_are_counted() -> None:
    # One of three is kept, so three more are drawn; all three are kept, one too many.
    rollout = collector([0, 2, 4, 1, 2, 3])[0].collect(step=1)
    assert kept(rollout.groups) == [1, 3, 4]
    assert rollout.metrics.values()["rollout/groups_surplus"] == 1


def test_few_are_drawn_when_few_are_missing() -> None:
    one, sampler = collector([1, 2, 4, 4, 3, 2])
    assert kept(one.collect(step=1).groups) == [0, 1, 4]
    assert sampler.rounds == [3, 2]  # one is missing and two of three were kept: 1.5, rounded up


def test_the_rounds_are_capped_and_the_part_that_was_found_is_trained_on() -> None:
    warnings: list[str] = []
    one, sampler = collector([0, 4, 0, 4, 2, 4, 0, 0, 0, 4, 4, 4], max_rounds=3, warnings=warnings)
    rollout = one.collect(step=8)
    assert kept(rollout.groups) == [4]
    assert sampler.rounds == [3, 3, 3]
    (warning,) = warnings
    assert "step 8: 1 of 3 groups" in warning
    assert "3 rounds" in warning


def test_a_full_batch_is_no_reason_to_warn() -> None:
    warnings: list[str] = []
    collector([1, 2, 3], warnings=warnings)[0].collect(step=1)
    assert warnings == []


def test_without_dynamic_sampling_all_groups_are_kept() -> None:
    one, sampler = collector([0, 2, 4, 1], dynamic=False)
    assert kept(one.collect(step=1).groups) == [0, 1, 2]
    assert sampler.rounds == [3]


def at_most_half(accuracies: Sequence[float]) -> bool:
    """A user's filter; with scores of a whole group of four."""
    assert len(accuracies) == 4
    return sum(accuracies) <= 2


@pytest.mark.parametrize(("dynamic", "expected"), [(True, [0, 1, 3]), (False, [0, 1, 2])])
def test_a_filter_of_ones_own_decides_where_sampling_is_dynamic(dynamic: bool, expected: list[int]) -> None:
    one, _ = collector([0, 2, 4, 1, 3, 2], dynamic=dynamic, group_filter=f"{__name__}:at_most_half")
    assert kept(one.collect(step=1).groups) == expected


def test_a_draw_is_seeded_by_stream_step_and_position_and_the_stream_goes_on() -> None:
    one, sampler = collector([1] * 6, temperature=0.7)
    one.collect(step=1)
    one.collect(step=2)
    expected = [(TRAINING_STREAM, 1, position) for position in range(3)]
    assert sampler.places == expected + [(TRAINING_STREAM, 2, position) for position in range(3, 6)]
    assert sampler.sampling == Sampling(temperature=0.7)


def test_figures_of_sampled_groups() -> None:
    nan = float("nan")
    groups = [
        graded_group(0, [1, 0, nan], [2, 5, 9], truncated=(1, 2)),
        graded_group(1, [1, 1], [4, 8]),
        graded_group(2, [0, 0], [1, 3]),
    ]
    values = sampling_metrics(groups, "eval").values()
    assert values["eval/accuracy"] == 3 / 6
    assert values["eval/length"] == pytest.approx(32 / 7)
    assert values["eval/length_right"] == pytest.approx(14 / 3)
    assert values["eval/length_wrong"] == pytest.approx(9 / 3)
    assert (values["eval/truncated"], values["eval/ungraded"]) == (2 / 7, 1 / 7)
    assert (values["eval/mixed_groups"], values["eval/all_right_groups"]) == (1 / 3, 1 / 3)
    assert (values["eval/samples"], values["eval/tokens"]) == (7, 32)


class LoneGrades(Scripted):
    """The same, but in each round the first group has one graded response only."""

    def sample(self, draws: Sequence[Draw], *, responses: int, max_tokens: int, sampling: Sampling) -> list[Group]:
        groups = super().sample(draws, responses=responses, max_tokens=max_tokens, sampling=sampling)
        return [graded_group(9, [float("nan"), 1.0, float("nan")], [2, 3, 4]), *groups[1:]]


@pytest.mark.parametrize(("dynamic", "expected"), [(False, 2), (True, 3)])
def test_a_group_with_one_grade_teaches_nothing(dynamic: bool, expected: int) -> None:
    one, _ = collector([2] * 9, dynamic=dynamic)
    one.sampler = LoneGrades([2] * 9)  # type: ignore[assignment]
    rollout = one.collect(step=1)
    assert len(rollout.groups) == expected
    assert all(len(group.graded_scores) == 4 for group in rollout.groups)


def test_a_step_in_which_nothing_could_be_graded_ends_the_run() -> None:
    class Ungraded(Scripted):
        def sample(self, draws: Sequence[Draw], *, responses: int, max_tokens: int, sampling: Sampling) -> list[Group]:
            return [graded_group(number, [float("nan")] * 4, [1] * 4) for number in range(len(draws))]

    one, _ = collector([], dynamic=False)
    one.sampler = Ungraded([])  # type: ignore[assignment]
    with pytest.raises(UserError, match=r"^rewards\.grader: step 7: none of 3 groups could be graded"):
        one.collect(step=7)
