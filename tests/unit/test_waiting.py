"""Ranks wait on the store for engines; a leader that hangs is named."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from threading import Barrier

import pytest
import torch.distributed as dist

from megatron_rl.errors import UserError
from megatron_rl.rollout.groups import EngineGroup
from megatron_rl.rollout.waiting import EngineWait


def tcp_store() -> dist.Store:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))


STORES = [dist.HashStore, tcp_store]


def wait_of(store: dist.Store, rank: int, *, size: int = 1, world: int = 2, timeout_s: float = 20) -> EngineWait:
    return EngineWait(store, EngineGroup(rank=rank, size=size, world=world), timeout_s=timeout_s)


@pytest.mark.parametrize("store", STORES)
def test_all_ranks_leave_when_the_last_leader_is_done(store: Callable[[], dist.Store]) -> None:
    shared, left = store(), dict[int, float]()
    meeting = Barrier(4)

    def sample(rank: int) -> None:
        wait = wait_of(shared, rank, size=2, world=4)
        for seconds in (0.3, 0.0, 0.1):
            meeting.wait()
            begun = time.monotonic()
            with wait.until_all_are_done():
                time.sleep(seconds if rank == 2 else 0)
            left[rank] = time.monotonic() - begun
            meeting.wait()  # stands for the collective that follows
            assert seconds - 0.01 <= min(left.values()) <= max(left.values()) < seconds + 0.2

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(sample, range(4)))


@pytest.mark.parametrize("store", STORES)
def test_the_store_does_not_grow(store: Callable[[], dist.Store]) -> None:
    shared = store()
    wait = wait_of(shared, 0, world=1)
    counts = []
    for _ in range(5):
        with wait.until_all_are_done():
            pass
        counts.append(shared.num_keys())
    assert len(set(counts)) == 1


def test_a_slow_leader_that_beats_is_waited_for() -> None:
    shared = dist.HashStore()

    def sample(rank: int) -> None:
        with wait_of(shared, rank, timeout_s=0.4).until_all_are_done():
            time.sleep(1.2 * rank)

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(sample, range(2)))


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("beats", [0, 1])
def test_a_leader_without_a_beat_is_named_with_its_engine(store: Callable[[], dist.Store], beats: int) -> None:
    shared = store()
    if beats:
        shared.add("rollout/1/beat/1", 1)
    with (
        pytest.raises(UserError, match=r"rank 2, which leads engine 1, has given no sign of life for \d s"),
        wait_of(shared, 0, size=2, world=4, timeout_s=1).until_all_are_done(),
    ):
        pass


def test_a_leader_that_fails_is_not_done_and_stops_beating() -> None:
    shared = dist.HashStore()
    with pytest.raises(ZeroDivisionError), wait_of(shared, 0, timeout_s=0.4).until_all_are_done():
        raise ZeroDivisionError
    assert not shared.check(["rollout/1/done/0"])
    beats = shared.add("rollout/1/beat/0", 0)
    time.sleep(0.3)
    assert shared.add("rollout/1/beat/0", 0) == beats
