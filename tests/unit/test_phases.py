"""The phase machine: the engine sleeps while the trainer trains, and no phase is skipped."""

import time

import pytest

from megatron_rl.phases import Phase, Phases


class Recorder:
    """An engine that only notes what is asked of it."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def __getattr__(self, name: str) -> object:
        return lambda *args, **kwargs: self.asked.append(name)


@pytest.fixture
def engine() -> Recorder:
    return Recorder()


def go(phases: Phases, *names: Phase) -> None:
    for name in names:
        with phases.enter(name):
            assert phases.phase == name


def test_a_step_goes_from_sync_over_rollout_to_train_and_back(engine: Recorder) -> None:
    go(Phases(engine, None), "sync", "rollout", "train", "sync", "rollout", "train", "sync")  # type: ignore[arg-type]
    assert engine.asked == ["wake", "resume", "sleep", "wake", "resume", "sleep", "wake"]


def test_the_trainer_sleeps_while_the_engine_samples_and_keeps_its_parameters_while_they_are_synced(
    engine: Recorder,
) -> None:
    order: list[object] = []

    class Memory:
        def sleep(self, *, keep_parameters: bool = False) -> None:
            order.append(("trainer sleeps", keep_parameters))

        def wake(self) -> None:
            order.append("trainer wakes")

    class Both(Recorder):
        def __getattr__(self, name: str) -> object:
            return lambda *args, **kwargs: order.append(f"engine {name}")

    go(Phases(Both(), Memory()), "sync", "rollout", "train", "train", "sync")  # type: ignore[arg-type]
    assert order == [
        *(("trainer sleeps", True), "engine wake", ("trainer sleeps", False), "engine resume"),
        *("engine sleep", "trainer wakes") * 2,
        *(("trainer sleeps", True), "engine wake"),
    ]


def test_a_checkpoint_may_follow_the_start_a_rollout_or_training(engine: Recorder) -> None:
    go(Phases(engine, None), "train", "train", "sync", "rollout", "train")  # type: ignore[arg-type]
    assert engine.asked == ["sleep", "sleep", "wake", "resume", "sleep"]


def test_rollout_may_follow_rollout(engine: Recorder) -> None:
    go(Phases(engine, None), "sync", "rollout", "rollout", "rollout", "train")  # type: ignore[arg-type]
    assert engine.asked == ["wake", "resume", "resume", "resume", "sleep"]


@pytest.mark.parametrize(
    "path",
    [
        ["rollout"],
        ["sync", "train"],
        ["sync", "sync"],
        ["sync", "rollout", "sync"],
        ["sync", "rollout", "train", "rollout"],
    ],
)
def test_an_illegal_transition_raises_and_asks_nothing_of_the_engine(path: list[Phase], engine: Recorder) -> None:
    *legal, last = path
    phases = Phases(engine, None)  # type: ignore[arg-type]
    go(phases, *legal)
    asked, before = list(engine.asked), phases.phase
    with pytest.raises(RuntimeError, match=f"phase {last} can't follow {before}"), phases.enter(last):
        pytest.fail("entered")
    assert engine.asked == asked
    assert phases.phase == before


def test_seconds_are_counted_by_phase_and_taken_once(engine: Recorder) -> None:
    phases = Phases(engine, None)  # type: ignore[arg-type]
    go(phases, "sync")
    for _ in range(2):
        with phases.enter("rollout"):
            time.sleep(0.02)
    seconds = phases.take_seconds()
    assert set(seconds) == {"sync", "rollout"}
    assert seconds["rollout"] >= 0.04
    assert seconds["sync"] < seconds["rollout"]
    assert phases.take_seconds() == {}
