"""The comparison of engine and trainer on the probe, its alarms, and the weight versions of responses."""

import math
from collections.abc import Sequence
from typing import NoReturn

import pytest
from torch.distributed import HashStore

from megatron_rl.errors import UserError
from megatron_rl.rollout import parity as module
from megatron_rl.rollout.engine import Answer, EngineLost, Request, Sampling
from megatron_rl.rollout.groups import EngineGroup
from megatron_rl.rollout.parity import Alarms, Distance, Parity, Reading, choose_probe, distance, make_parity, read
from megatron_rl.rollout.sampler import SamplingEndedError
from megatron_rl.rollout.waiting import EngineWait
from megatron_rl.types import FinishReason, Prompt, Response
from tests.tiny import run_config

LN2 = math.log(2)


def prompt(*ids: int) -> Prompt:
    return Prompt(index=1, text="", ids=ids, answer="")


def reading(mean: float, *, engine: int = 0, previous: float = math.inf, moved: float = 0.0) -> Reading:
    current = Distance(max=2 * mean, mean=mean, mean_exp=1 + mean)
    return Reading(engine=engine, current=current, previous=previous, moved=moved)


# ---- the probe


def test_the_probe_is_the_first_prompts_that_can_be_scored() -> None:
    prompts = [prompt(1), prompt(1, 2), prompt(1, 31), prompt(*range(30)), prompt(3, 4), prompt(5, 6), prompt(7, 8)]
    assert choose_probe(prompts, vocabulary=31) == ((1, 2), tuple(range(30)), (3, 4), (5, 6))


def test_a_long_prompt_is_cut() -> None:
    assert choose_probe([prompt(*[5] * 300)], vocabulary=31) == ((5,) * 128,)


def test_prompts_of_one_token_make_a_probe_too() -> None:
    assert choose_probe([prompt(3), prompt(40), prompt(4)], vocabulary=31) == ((3, 4, 3, 4),)
    assert choose_probe([prompt(3)], vocabulary=31) == ((3, 3),)
    assert choose_probe([prompt(40)], vocabulary=31) == ((0, 0),)


# ---- the comparison


def test_figures_are_over_all_tokens_of_the_probe() -> None:
    found = distance([(-1.0, -2.0), (-3.0,)], [(-1.0, -2.0 - LN2), (-3.0 + 2 * LN2,)])
    assert found.max == pytest.approx(2 * LN2)
    assert found.mean == pytest.approx(LN2)  # (0 + 1 + 2) / 3
    assert found.mean_exp == pytest.approx(7 / 3)  # (1 + 2 + 4) / 3


@pytest.mark.parametrize("score", [math.nan, math.inf, -math.inf, -1e5])
def test_a_score_that_is_not_finite_is_infinitely_far(score: float) -> None:
    found = distance([(-1.0, -2.0)], [(-1.0, score)])
    assert found.mean_exp == math.inf
    assert (found.mean == math.inf) == (not math.isfinite(score))


def test_scores_of_other_sequences_are_not_compared() -> None:
    with pytest.raises(RuntimeError, match=r"\[2\] and of \[1\] tokens"):
        distance([(-1.0, -2.0)], [(-1.0,)])


def test_a_reading_has_the_distance_to_the_update_before() -> None:
    before = ([(-1.0, -2.0)], [(-1.25, -2.0)])
    found = read(3, [(-1.5, -3.0)], [(-1.0, -2.5)], before)
    assert found.engine == 3
    assert found.current.mean == 0.5
    assert found.previous == 0.25
    assert found.moved == 0.75
    assert not found.stuck


def test_an_engine_is_stuck_when_it_says_the_same_and_the_trainer_does_not() -> None:
    said = [(-1.25, -2.0)]
    assert read(0, [(-1.0, -2.0 - 1e-9)], said, ([(-1.0 + 1e-9, -2.0)], said)).stuck
    assert not read(0, [(-1.0, -2.1)], said, ([(-1.0, -2.0)], said)).stuck  # half of the trainer's tokens: rounding
    assert not read(0, [(-1.0, -2.0)], said, ([(-1.0, -2.0)], said)).stuck  # synced again without an update


# ---- alarms


def test_the_level_ends_the_run_on_the_first_update_and_later() -> None:
    alarms = Alarms(0.05)
    expected = r"^parity: step 1: log-probs of engine 1 and of the trainer differ by 0\.051 nats .*is 0\.05\)"
    with pytest.raises(UserError, match=expected) as caught:
        alarms.check(1, [reading(0.01), reading(0.051, engine=1)])
    assert "\n" not in str(caught.value)
    alarms = Alarms(0.05)
    assert alarms.check(1, [reading(0.049)]) is None
    with pytest.raises(UserError, match=r"step 2: .*differ by inf nats"):
        alarms.check(2, [reading(math.inf)])


def test_stale_weights_end_the_run_below_the_level() -> None:
    alarms = Alarms(0.05)
    alarms.check(1, [reading(1e-3)])
    with pytest.raises(UserError, match="step 2: engine 1 has the weights of the update before"):
        alarms.check(2, [reading(1e-3), reading(4e-3, engine=1, previous=1e-3, moved=4e-3)])


@pytest.mark.parametrize(
    "right",
    [
        reading(1e-3, previous=6e-4, moved=4e-3),  # nearer, but not clearly
        reading(1e-3, previous=4e-4, moved=9e-4),  # the updates are nearer to one another than engine and trainer are
        reading(1e-3, previous=4e-3, moved=4e-3),
    ],
)
def test_what_could_be_rounding_is_not_called_stale(right: Reading) -> None:
    alarms = Alarms(0.05)
    alarms.check(1, [reading(1e-3)])
    assert alarms.check(2, [right]) is None


def test_a_trend_is_warned_of_once_for_each_tripling() -> None:
    alarms = Alarms(1.9)
    means = [0.02] * 10 + [0.02 * 1.05**n for n in range(1, 91)]  # up to 1.6
    said = [alarms.check(step, [reading(mean / 2, engine=1), reading(mean)]) for step, mean in enumerate(means, 1)]
    found = {step: text for step, text in enumerate(said, 1) if text}
    recent = {step: sum(means[step - 10 : step]) / 10 for step in range(10, 101)}
    crossed = [next(step for step in recent if recent[step] > 0.02 * 3**n) for n in (1, 2, 3)]
    assert list(found) == crossed
    assert "0.02 over the first 10; the run ends above 1.9" in found[crossed[0]]


def test_a_jump_over_several_triplings_is_one_warning() -> None:
    alarms = Alarms(1.9)
    means = [0.02] * 10 + [1.8]  # a mean of 0.198 over the last ten: nine times and more
    said = [alarms.check(step, [reading(mean)]) for step, mean in enumerate(means, 1)]
    assert [text is not None for text in said] == [False] * 10 + [True]
    assert alarms.check(12, [reading(0.02)]) is None


def test_rounding_has_no_trend() -> None:
    alarms = Alarms(1e-3)
    means = [1e-8] * 10 + [2.9e-5] * 30  # below three times a hundredth of the limit
    assert [alarms.check(step, [reading(mean)]) for step, mean in enumerate(means, 1)] == [None] * 40


def test_the_limit_is_by_dtype_unless_it_is_set() -> None:
    def limit(**sections: object) -> float:
        wait = EngineWait(HashStore(), EngineGroup(rank=0, size=1, world=1), timeout_s=9)
        config = run_config(**sections)
        return make_parity(config, [prompt(1, 2)], 31, None, wait, print).alarms.limit  # type: ignore[arg-type]

    assert limit(trainer={"dtype": "float32"}) == 1e-3
    assert limit(trainer={"dtype": "bfloat16"}) == 0.05
    assert limit(rollout={"parity_limit": 0.2}) == 0.2


# ---- with an engine


REQUEST = Request(prompt_ids=(5,), seeds=(0,), max_tokens=3)


class Scripted:
    """An engine that gives the scores it was told, and responses of one version."""

    def __init__(self, version: int = 1) -> None:
        self.scores: list[tuple[float, ...]] = [(-1.0, -2.0)]
        self.asked = 0
        self.versions: tuple[int, ...] = (version,)
        self.finish_reason: FinishReason = "stop"

    def health(self) -> bool:
        return True

    def score(self, sequences: Sequence[tuple[int, ...]]) -> list[tuple[float, ...]]:
        self.asked += 1
        return self.scores

    def submit(self, key: int, request: Request, sampling: Sampling) -> None:
        pass

    def poll(self, wait_s: float) -> list[Answer]:
        n = len(self.versions)
        response = Response(
            ids=(5,) * n, logprobs=(-1.0,) * n, finish_reason=self.finish_reason, weight_versions=self.versions
        )
        return [(0, 0, response)]


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank gathers from itself."""

    class Alone:
        @staticmethod
        def all_gather_object(shares: list[object], mine: object, group: None) -> None:
            shares[0] = mine

    monkeypatch.setattr(module, "dist", Alone)


def parity_of(engine: Scripted) -> Parity:
    wait = EngineWait(HashStore(), EngineGroup(rank=0, size=1, world=1), timeout_s=9)
    return Parity([(1, 2, 3)], engine, wait, Alarms(0.05), print)  # type: ignore[arg-type]


@pytest.mark.usefixtures("alone")
def test_an_update_is_checked_once_however_many_rollouts_follow_it() -> None:
    engine = Scripted()
    parity = parity_of(engine)
    parity.expect([(-1.0, -2.02)], version=0)
    found = parity.check(0).values()
    assert found == pytest.approx(
        {"parity/max": 0.02, "parity/mean": 0.01, "parity/mean_exp": (1 + math.exp(0.02)) / 2}
    )
    assert parity.check(1).values() == {}
    assert engine.asked == 1


@pytest.mark.usefixtures("alone")
def test_an_engine_that_ignores_an_update_is_stuck() -> None:
    engine = Scripted()
    parity = parity_of(engine)
    parity.expect([(-1.0, -2.0)], version=0)
    parity.check(1)
    parity.expect([(-1.0, -2.0)], version=0)  # after a checkpoint: no update
    parity.check(2)
    parity.expect([(-1.0001, -2.0001)], version=1)
    with pytest.raises(UserError, match="step 3: engine 0 has the weights of the update before"):
        parity.check(3)


def response_of(versions: tuple[int, ...], reason: FinishReason = "stop") -> Response:
    count = len(versions)
    return Response(ids=(5,) * count, logprobs=(-1.0,) * count, finish_reason=reason, weight_versions=versions)


@pytest.mark.parametrize("versions", [(1,), (1, 1, 1), ()])
def test_responses_of_the_pushed_weights_pass(versions: tuple[int, ...]) -> None:
    parity = parity_of(Scripted())
    parity.expect([(-1.0, -2.0)], version=1)
    parity.check_response(response_of(versions), aborted_ok=False)


@pytest.mark.parametrize("versions", [(0,), (1, 2), (0, 0), (0, 1, 1)])
def test_responses_of_other_weights_are_refused(versions: tuple[int, ...]) -> None:
    parity = parity_of(Scripted())
    parity.expect([(-1.0, -2.0)], version=1)
    expected = f"engine 0 sampled with weights of version {max({*versions} - {1})}; version 1 was pushed"
    with pytest.raises(RuntimeError, match=expected):
        parity.check_response(response_of(versions, "abort"), aborted_ok=True)


def test_a_part_of_an_answer_passes_where_it_was_asked_for() -> None:
    parity = parity_of(Scripted())
    parity.expect([(-1.0, -2.0)], version=1)
    parity.check_response(response_of((1,), "abort"), aborted_ok=True)
    with pytest.raises(RuntimeError, match="engine 0 aborted a response after 1 tokens"):
        parity.check_response(response_of((1,), "abort"), aborted_ok=False)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("known", [False, True])
def test_an_engine_that_is_lost_before_or_while_it_scores_is_started_again_and_left_out(known: bool) -> None:
    class Lost(Scripted):
        restarted = 0

        def health(self) -> bool:
            return not known

        def score(self, sequences: object) -> NoReturn:
            assert not known
            raise EngineLost("it was killed")

        def restart(self) -> None:
            if self.restarted:
                raise UserError("not a second time")
            self.restarted += 1

        def stop(self) -> None:
            pass

    engine = Lost()
    parity = parity_of(engine)
    parity.expect([(-1.0, -2.0)], version=1)
    assert parity.check(1).values() == {}
    assert engine.restarted == 1
    parity.expect([(-1.0, -2.0)], version=2)
    with pytest.raises(SamplingEndedError, match="not a second time"):  # on every rank, so that the run can be saved
        parity.check(2)
