"""The SGLang engine's restarts, with a few lines of server in SGLang's place (`few_lines_of_server.py`)."""

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest
import torch.distributed as dist

from megatron_rl.errors import UserError
from megatron_rl.rollout import sglang as module
from megatron_rl.rollout.engine import EngineLost, Sampling
from megatron_rl.rollout.groups import EngineGroup
from megatron_rl.rollout.sglang import SglangEngine
from megatron_rl.training.hf_config import read_model_spec
from tests.engines.processes import left_behind, writing_to
from tests.tiny import SHAPE, run_config
from tests.unit.few_lines_of_server import LONG, SHORT, Model, answers, asked, engine, kill, lost, starts, wake

__all__ = ["engine"]  # the fixture

ASLEEP = ["pause_generation", "flush_cache", "release_memory_occupation"]
AWAKE = [
    "resume_memory_occupation",
    "begin_weight_update",
    "update_weights_from_tensor",
    "end_weight_update",
    "resume_memory_occupation",
    "continue_generation",
]


def test_an_engine_that_lives_is_never_started_again(engine: SglangEngine) -> None:
    assert answers(engine)
    engine.sleep()
    engine.sleep()
    wake(engine)
    assert answers(engine)
    assert asked(engine) == (ASLEEP + AWAKE) * 2
    assert starts(engine) == 1


def test_after_an_abort_it_takes_requests_at_once(engine: SglangEngine) -> None:
    engine.submit(3, LONG, Sampling())
    engine.submit(4, LONG, Sampling())
    assert engine.poll(0.2) == []
    ended = engine.abort()
    assert [(key, sample, one.finish_reason, one.ids) for key, sample, one in sorted(ended, key=lambda e: e[0])] == [
        (3, 0, "abort", (7, 8)),
        (4, 0, "abort", (7, 8)),
    ]
    assert answers(engine)
    assert "pause_generation" not in asked(engine)[len(ASLEEP + AWAKE) :]


def test_a_dead_server_is_told_replaced_and_has_weights_after_the_next_update(engine: SglangEngine) -> None:
    engine.submit(0, LONG, Sampling())
    kill(engine)
    assert "ended with exit code -9; the end of" in lost(engine)
    assert not engine.health()
    with pytest.raises(EngineLost):
        engine.submit(1, SHORT, Sampling())
    assert [response.ids for _, _, response in engine.abort()] == [()]
    engine.restart()
    with pytest.raises(RuntimeError, match="weights are undefined"):
        engine.submit(1, SHORT, Sampling())
    assert engine.poll(9.0) == []
    assert engine.abort() == []
    engine.resume()
    assert not engine.health()
    engine.sleep()
    wake(engine)
    assert answers(engine)
    assert asked(engine) == ASLEEP + AWAKE
    assert starts(engine) == 2  # in one log


def test_a_restart_waits_for_nothing_and_sleep_does(engine: SglangEngine, tmp_path: Path) -> None:
    (tmp_path / "slow").touch()
    begun = time.monotonic()
    engine.restart()
    assert time.monotonic() - begun < 1
    engine.sleep()
    assert time.monotonic() - begun > 1.5
    wake(engine)
    assert answers(engine)


@pytest.mark.parametrize("stopped", [False, True])
def test_a_hung_server_is_told_and_replaced(engine: SglangEngine, tmp_path: Path, stopped: bool) -> None:
    """It answers that it is ill, or nothing at all as all its processes are stopped."""
    engine.submit(0, LONG, Sampling())
    assert engine.poll(0.2) == []
    old = writing_to(engine.directory / "server.log")
    if stopped:
        for process in old:
            os.kill(process, signal.SIGSTOP)
    else:
        (tmp_path / "ill").touch()
    reason = lost(engine)
    assert "engine 0: its SGLang server gave no sign of life for" in reason
    assert "\n" not in reason
    (tmp_path / "ill").unlink(missing_ok=True)
    begun = time.monotonic()
    engine.restart()
    assert time.monotonic() - begun < 2
    assert not set(old) & set(writing_to(engine.directory / "server.log"))
    engine.sleep()
    wake(engine)
    assert answers(engine)


@pytest.mark.parametrize("engine", [{"sglang": {"request_timeout_s": 1}}], indirect=True)
def test_one_that_is_well_and_yet_never_replies_is_told_and_replaced(engine: SglangEngine) -> None:
    engine.submit(0, LONG, Sampling())
    assert "took longer than 1 s (rollout.sglang.request_timeout_s)" in lost(engine)
    engine.restart()
    engine.sleep()
    wake(engine)
    assert answers(engine)


def test_an_abort_that_has_no_effect_gives_up_and_sleep_replaces_the_server(
    engine: SglangEngine, tmp_path: Path
) -> None:
    engine.submit(0, LONG, Sampling())
    assert engine.poll(0.2) == []
    (tmp_path / "deaf").touch()
    assert [(key, response.ids) for key, _, response in engine.abort()] == [(0, ())]
    assert "nothing came for 1 s after an abort" in lost(engine)
    (tmp_path / "deaf").unlink()
    engine.sleep()
    assert starts(engine) == 2
    wake(engine)
    assert answers(engine)


def test_one_that_died_unnoticed_is_replaced_when_it_is_to_sleep(engine: SglangEngine) -> None:
    kill(engine)
    engine.sleep()
    assert asked(engine) == ASLEEP
    wake(engine)
    assert answers(engine)


def test_one_that_died_asleep_is_replaced_when_it_is_to_wake(engine: SglangEngine) -> None:
    engine.sleep()
    kill(engine)
    wake(engine)
    assert asked(engine) == ASLEEP + AWAKE
    assert answers(engine)


def test_one_that_hangs_unnoticed_is_replaced_when_it_is_to_sleep(engine: SglangEngine) -> None:
    for process in writing_to(engine.directory / "server.log"):
        os.kill(process, signal.SIGSTOP)
    engine.sleep()
    wake(engine)
    assert answers(engine)
    assert starts(engine) == 2


def test_restarts_are_counted_and_one_too_many_ends_the_run(engine: SglangEngine) -> None:
    for _ in range(2):
        engine.restart()
        engine.sleep()
        wake(engine)
    engine.submit(0, LONG, Sampling())
    kill(engine)
    lost(engine)
    expected = (
        r"engine 0 was lost and may not be started again \(rollout.engine_restarts is 2\); nothing is lost, the last "
        r"checkpoint stays; why it was lost: engine 0: the SGLang server ended with exit code -9"
    )
    with pytest.raises(UserError, match=expected):
        engine.restart()


@pytest.mark.parametrize(
    "call", ["begin_weight_update", "update_weights_from_tensor", "end_weight_update", "continue_generation"]
)
def test_one_that_dies_while_it_gets_weights_is_replaced_afterwards(
    engine: SglangEngine, tmp_path: Path, call: str
) -> None:
    engine.sleep()
    (tmp_path / f"die at {call}").touch()
    wake(engine)
    assert not engine.health()
    assert (engine.losses, starts(engine)) == (1, 1)
    for _ in range(2):  # the second time it is under way
        engine.restart()
    engine.sleep()
    wake(engine)
    assert answers(engine)
    assert (engine.losses, starts(engine)) == (1, 2)


NO_RESTARTS = pytest.mark.parametrize("engine", [{"engine_restarts": 0}], indirect=True)


def check_gone(engine: SglangEngine, why: str) -> None:
    """It is lost for good, takes part in all that others wait in, and says why where losses are told."""
    for _ in range(2):
        assert not engine.health()
        with pytest.raises(EngineLost):
            engine.submit(0, SHORT, Sampling())
        with pytest.raises(UserError, match=why):
            engine.restart()
        engine.sleep()
        wake(engine)
    assert writing_to(engine.directory / "server.log") == []


MAY_NOT = r"^engine 0 was lost and may not be started again \(rollout.engine_restarts is 0\); (.|\n)*why it was lost: "


@NO_RESTARTS
@pytest.mark.parametrize("asleep", [False, True])
def test_one_that_dies_outside_sampling_may_be_lost_for_good(engine: SglangEngine, asleep: bool) -> None:
    if asleep:
        engine.sleep()
    kill(engine)
    if not asleep:
        engine.sleep()
    wake(engine)
    assert engine.losses == 1
    # Whether its end or its silence is noticed first is chance.
    check_gone(engine, MAY_NOT + "(engine 0: the SGLang server ended with exit code -9|SGLang: .* did not answer /)")


@NO_RESTARTS
@pytest.mark.parametrize("call", ["release_memory_occupation", "resume_memory_occupation", "end_weight_update"])
def test_one_that_dies_as_it_is_told_something_may_be_lost_for_good(
    engine: SglangEngine, tmp_path: Path, call: str
) -> None:
    (tmp_path / f"die at {call}").touch()
    engine.sleep()
    wake(engine)
    check_gone(engine, f"{MAY_NOT}(SGLang: .* did not answer /{call}|.* ended with exit code)")


@NO_RESTARTS
def test_one_that_an_abort_finds_dead_may_be_lost_for_good(engine: SglangEngine) -> None:
    engine.submit(0, LONG, Sampling())
    kill(engine)
    assert [(one.finish_reason, one.ids) for _, _, one in engine.abort()] == [("abort", ())]
    engine.sleep()
    wake(engine)
    check_gone(engine, MAY_NOT)


def test_one_that_can_not_be_started_again_is_lost_for_good(engine: SglangEngine, tmp_path: Path) -> None:
    (tmp_path / "fail").touch()
    engine.restart()
    engine.sleep()
    assert engine.losses == 3
    check_gone(engine, r"engine_restarts is 2\)(.|\n)*ended with exit code 3")


@pytest.mark.parametrize("engine", [{"sglang": {"start_timeout_s": 6}}], indirect=True)
def test_one_that_is_not_healthy_in_time_is_lost_for_good(engine: SglangEngine, tmp_path: Path) -> None:
    (tmp_path / "never").touch()
    engine.restart()
    engine.sleep()
    check_gone(engine, "^engine 0: the SGLang server was not healthy after 6 s")


class Pair:
    """Stands for torch.distributed between two threads."""

    def __init__(self) -> None:
        self.meeting = threading.Barrier(2, timeout=30)
        self.told: list[object] = [None]
        self.buckets = 0

    def barrier(self, group: object) -> None:
        self.meeting.wait()

    def gather_object(self, payload: str, payloads: list[str] | None, dst: int, group: object) -> None:
        self.meeting.wait()
        if payloads:
            self.buckets += 1

    def broadcast_object_list(self, message: list[object], src: int, group: object) -> None:
        if threading.current_thread() is threading.main_thread():
            self.told = list(message)
        self.meeting.wait()
        message[:] = self.told
        self.meeting.wait()


@pytest.mark.parametrize(("engine", "restarts"), [({"engine_restarts": n}, n) for n in (0, 2)], indirect=["engine"])
def test_a_server_that_dies_holds_up_no_other_rank(
    engine: SglangEngine, restarts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Pair()
    monkeypatch.setattr(module, "dist", pair)
    group = EngineGroup(rank=1, size=2, world=2)
    spec = read_model_spec(engine.config.model.path)
    other = SglangEngine(engine.config, spec, group, eos_token_ids=frozenset({2}), vocabulary=SHAPE.vocab)
    for one in (engine, other):
        one._buckets.size = 1000  # many
        one._ranks = cast(dist.ProcessGroup, "both")
    engine.group = EngineGroup(rank=0, size=2, world=2)

    def steps(one: SglangEngine) -> None:
        for _ in range(2):
            one.sleep()
            wake(one)

    (tmp_path / "die at update_weights_from_tensor").touch()
    thread = threading.Thread(target=steps, args=(other,))
    thread.start()
    steps(engine)
    thread.join(30)
    assert not thread.is_alive()
    assert engine.health() == bool(restarts)
    assert pair.buckets == 1 if not restarts else pair.buckets > 3
    assert (engine.losses, starts(engine)) == (1, 1 + bool(restarts))


def test_scores_of_a_dead_server_are_not_awaited(engine: SglangEngine) -> None:
    kill(engine)
    with pytest.raises(EngineLost, match="ended with exit code -9"):
        engine.score([(3, 4)])


def test_a_server_that_took_a_signal_to_stop_goes_all_the_same(engine: SglangEngine) -> None:
    """The orderly way too, in which the processes are asked first."""
    processes = writing_to(engine.directory / "server.log")
    for process in processes:
        os.kill(process, signal.SIGSTOP)
    begun = time.monotonic()
    engine.stop()
    assert time.monotonic() - begun < 5
    assert left_behind(engine.directory / "server.log", within_s=1) == []


Act = Callable[[SglangEngine], None]


@pytest.mark.parametrize("act", [SglangEngine.restart, lambda engine: engine.submit(0, SHORT, Sampling())])
def test_a_rank_that_does_not_lead_asks_nothing(untied_model: Model, act: Act) -> None:
    spec = read_model_spec(untied_model[0])
    group = EngineGroup(rank=1, size=2, world=2)
    config = run_config(rollout={"engine": "sglang"})
    engine = SglangEngine(config, spec, group, eos_token_ids=frozenset({2}), vocabulary=SHAPE.vocab)
    engine.version = 1
    with pytest.raises(RuntimeError, match="only the rank that leads"):
        act(engine)
