"""What a collector writes into a checkpoint is what the next step begins with, wherever the run has come to."""

import json
import math
from collections.abc import Callable

import pytest

from megatron_rl.rollout.collector import Rollout
from megatron_rl.rollout.sampler import SamplingEndedError
from tests.unit.test_collector import Rig, indices, rig


def gone_on(one: Rig, made: Callable[[], Rig]) -> Rig:
    """Another one, from the checkpoint that `one` would write now."""
    other = made()
    other.collector.restore(json.loads(json.dumps(one.collector.state())), one.collector.everything_left)
    return other


def figures(rollout: Rollout | None) -> tuple[list[int], dict[str, float]]:
    """Which groups it has, and all that does not count work."""
    assert rollout
    values = rollout.metrics.values()
    return indices(rollout.groups), {key: value for key, value in values.items() if not key.startswith("work/")}


def gives_up() -> bool:
    raise SamplingEndedError("engine 1 was lost too often")


@pytest.mark.parametrize("early", [False, True])
def test_a_step_that_lost_its_engines_is_begun_as_it_was_begun(early: bool) -> None:
    def made() -> Rig:
        return rig(lambda n: 2 if n % 3 or n > 5 else 0, max_staleness=1)

    one, calm = made(), made()
    one.steps(2)
    calm.steps(2)
    assert one.collector.everything_left.draws
    one.sampler.go_on = gives_up  # type: ignore[method-assign]
    with pytest.raises(SamplingEndedError):
        (one.collector.collect_ahead if early else one.collector.collect)(3)
    assert figures(gone_on(one, made).collector.collect(3)) == figures(calm.collector.collect(3))


@pytest.mark.parametrize("early", [False, True])
def test_a_step_whose_grader_failed_is_begun_as_it_was_begun(early: bool) -> None:
    broken = False

    def made() -> Rig:
        return rig([], max_staleness=1, score=lambda prompt, n: math.nan if broken else float(n < prompt.index % 4))

    one, calm = made(), made()
    one.steps(2)
    calm.steps(2)
    broken = True
    with pytest.raises(SamplingEndedError, match=r"^rewards\.max_ungraded: step 3: "):
        (one.collector.collect_ahead if early else one.collector.collect)(3)
    broken = False
    assert figures(gone_on(one, made).collector.collect(3)) == figures(calm.collector.collect(3))


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("right", [lambda n: 2 * (n % 40 == 4), lambda n: 2 * (n % 5 == 1)])
def test_a_step_that_was_collected_early_is_the_same_again(right: Callable[[int], int], staleness: int) -> None:
    """Also one that stayed short after all its rounds, and one that took several."""

    def made() -> Rig:
        return rig(right, max_rounds=3, max_staleness=staleness)

    one = made()
    one.collector.collect(1)
    one.collector.collect_ahead(2)
    other = gone_on(one, made)
    for step in (2, 3):
        assert figures(other.collector.collect(step)) == figures(one.collector.collect(step))
        assert other.stream.position == one.stream.position
        one.collector.collect_ahead(step + 1)
        other.collector.collect_ahead(step + 1)
