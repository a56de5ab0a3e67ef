"""Storages that are emptied and filled again: bit by bit, views and all, and room that is allocated once."""

import pytest
import torch

from megatron_rl.training.host_arena import HostArena, empty, storages

ODD = torch.arange(7, dtype=torch.bfloat16)


def tensors() -> list[torch.Tensor]:
    """Distinct sizes and dtypes, among them NaN, a scalar and an empty one."""
    draw = torch.Generator().manual_seed(0)
    wide = torch.randn(3, 1000, generator=draw)
    wide[1, 5] = float("nan")
    return [wide, ODD.clone(), torch.tensor(3.5), torch.arange(11), torch.empty(0)]


def bits(tensor: torch.Tensor) -> bytes:
    own = tensor.detach().clone()  # numpy pins down the storage that it looks at
    return own.view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def test_what_was_taken_comes_back_bit_by_bit_in_the_same_tensors() -> None:
    held, arena = tensors(), HostArena()
    view, before = held[0][1, 3:8], [bits(one.reshape(-1)) for one in held]
    freed = arena.take(held)
    assert freed == sum(one.numel() * one.element_size() for one in tensors())
    assert all(one.untyped_storage().nbytes() == 0 for one in held)
    assert view.untyped_storage().nbytes() == 0
    assert arena.bytes_kept == freed
    assert arena.give_back(held) == freed
    assert [bits(one.reshape(-1)) for one in held] == before
    assert bits(view.contiguous()) == bits(held[0][1, 3:8].contiguous())
    held[0][1, 3] = 9.0
    assert view[0] == 9.0
    assert arena.bytes_kept == 0


def test_taking_and_giving_back_again_does_nothing() -> None:
    held, arena = tensors(), HostArena()
    assert arena.give_back(held) == 0
    first = arena.take(held)
    assert arena.take(held) == 0
    assert arena.give_back(held) == first
    assert arena.give_back(held) == 0
    assert held[1].tolist() == ODD.tolist()


def test_what_is_taken_later_does_not_overwrite_what_is_here() -> None:
    held, arena = tensors(), HostArena()
    arena.reserve(held)
    for one in held:
        arena.take([one])
    arena.give_back(held[1:])
    arena.take(reversed(held))
    arena.give_back(held)
    assert [bits(one.reshape(-1)) for one in held] == [bits(one.reshape(-1)) for one in tensors()]


def test_room_is_made_once() -> None:
    held, arena = tensors(), HostArena()
    arena.reserve(held)
    room = arena._room.data_ptr()
    for _ in range(2):
        arena.take(held[2:])
        arena.take(held)
        assert arena._room.data_ptr() == room
        arena.give_back(held)


def test_room_that_turns_out_too_small_grows_with_what_is_in_it() -> None:
    held, arena = tensors(), HostArena()
    arena.take(held[1:])
    arena.take(held)
    arena.give_back(held)
    assert [bits(one.reshape(-1)) for one in held] == [bits(one.reshape(-1)) for one in tensors()]


def test_tensors_that_share_a_storage_count_once() -> None:
    held = torch.arange(10)
    assert len(storages([held, held[2:5], held.view(2, 5)])) == 1
    assert HostArena().take([held, held[2:5]]) == 80


@pytest.mark.parametrize("count", [1, 3])
def test_emptied_storages_say_how_much_they_held(count: int) -> None:
    held = [torch.zeros(5) for _ in range(count)]
    assert empty(storages(held)) == 20 * count
    assert empty(storages(held)) == 0
