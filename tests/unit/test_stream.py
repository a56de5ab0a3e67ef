"""The order of prompts: each epoch a permutation, and one number to go on from."""

import pytest

from megatron_rl.data.stream import PromptStream
from megatron_rl.types import Prompt

PROMPTS = tuple(Prompt(index=index, text=str(index), ids=(index,), answer="") for index in range(1, 8))


def stream(seed: int = 3, position: int = 0, prompts: tuple[Prompt, ...] = PROMPTS) -> PromptStream:
    made = PromptStream(prompts, seed)
    made.position = position
    return made


def indices(drawn: list[tuple[int, Prompt]]) -> list[int]:
    return [prompt.index for _, prompt in drawn]


def test_each_epoch_is_a_permutation_of_its_own() -> None:
    drawn = indices(stream().draw(5 * 7))
    epochs = [drawn[start : start + 7] for start in range(0, 35, 7)]
    for epoch in epochs:
        assert sorted(epoch) == [1, 2, 3, 4, 5, 6, 7]
    assert len({tuple(epoch) for epoch in epochs}) == 5


def test_positions_are_counted_through() -> None:
    one = stream()
    assert [position for position, _ in one.draw(3) + one.draw(6)] == list(range(9))
    assert one.position == 9


@pytest.mark.parametrize("stop", [0, 1, 6, 7, 8, 20])
def test_a_stream_goes_on_from_its_position(stop: int) -> None:
    whole = stream().draw(30)
    assert stream(position=stop).draw(30 - stop) == whole[stop:]


@pytest.mark.parametrize("size", [1, 2, 4, 5, 7, 9, 30])
def test_the_size_of_the_draws_does_not_matter(size: int) -> None:
    one, drawn = stream(), list[tuple[int, Prompt]]()
    while len(drawn) < 30:
        drawn += one.draw(size)
    assert drawn[:30] == stream().draw(30)


def test_a_draw_may_be_larger_than_the_set() -> None:
    drawn = indices(stream(prompts=PROMPTS[:3]).draw(8))
    assert sorted(drawn[:3]) == sorted(drawn[3:6]) == [1, 2, 3]
    assert len(set(drawn[6:])) == 2


def test_a_set_of_one_prompt() -> None:
    assert indices(stream(prompts=PROMPTS[:1]).draw(3)) == [1, 1, 1]


def test_the_seed_decides_the_order() -> None:
    assert stream(seed=4).draw(14) == stream(seed=4).draw(14) != stream(seed=5).draw(14)


def test_the_epoch_is_that_of_the_next_draw() -> None:
    one = stream()
    assert one.epoch == 0
    one.draw(6)
    assert one.epoch == 0
    one.draw(1)
    assert one.epoch == 1
