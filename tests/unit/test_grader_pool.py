"""Graders in processes: what one that misbehaves costs, and whom."""

import math
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from megatron_rl.config import RewardConfig
from megatron_rl.rewards.grade import Grade
from megatron_rl.rewards.pool import GraderPool
from megatron_rl.types import Prompt
from tests.unit import bad_graders

PROMPT = Prompt(index=1, text="2+2=", ids=(1, 2), answer="4", metadata={"level": 3})
Graded = dict[object, list[Grade]]


def config(grader: Callable[..., object] | str = bad_graders.misbehave, **options: object) -> RewardConfig:
    name = grader if isinstance(grader, str) else f"{bad_graders.__name__}:{grader.__name__}"
    return RewardConfig.model_validate({"grader": name, "timeout_s": 2, "workers": 2, **options})


def graded(pool: GraderPool, groups: dict[object, Sequence[str]], within_s: float = 60) -> Graded:
    """The grades of groups of finished answers to one prompt."""
    for key, texts in groups.items():
        pool.submit(key, PROMPT, [(text, True) for text in texts])
    return until_done(pool, len(groups), within_s)


def until_done(pool: GraderPool, groups: int, within_s: float = 60) -> Graded:
    done: Graded = {}
    deadline = time.monotonic() + within_s
    while len(done) < groups:
        assert time.monotonic() < deadline
        pool.wait(0.1)
        done |= dict(pool.poll())
    return done


def one(pool: GraderPool, *texts: str) -> list[Grade]:
    return graded(pool, {"group": texts})["group"]


def processes_of(parent: int) -> set[int]:
    """Children of a process but for the standard library's resource tracker, which ends with it."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            text, command = stat.read_text(), (stat.parent / "cmdline").read_text()
        except OSError:  # it has ended since
            continue
        if int(text.rpartition(")")[2].split()[1]) == parent and "resource_tracker" not in command:
            found.add(int(stat.parent.name))
    return found


def is_there(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def gone(processes: set[int], within_s: float = 5) -> bool:
    deadline = time.monotonic() + within_s
    while any(map(is_there, processes)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(map(is_there, processes))


@pytest.fixture
def pool() -> Iterator[GraderPool]:
    with GraderPool(config()) as pool:
        yield pool


def test_a_hang_a_crash_and_a_nan_in_fifty_cost_themselves_only(pool: GraderPool) -> None:
    texts = ["4", "5"] * 25
    texts[10], texts[20], texts[30] = "hang", "crash", "nan"
    started = time.monotonic()
    groups = graded(pool, dict.fromkeys(range(4), texts))
    seconds = time.monotonic() - started
    right = [1.0 if text == "4" else 0.0 for text in texts]
    for grades in groups.values():
        failed = {number: grade.error for number, grade in enumerate(grades) if grade.error}
        assert failed == {
            10: "took longer than 2 s and was killed",
            20: "its process ended with exit code 7",
            30: "it returned NaN",
        }
        assert all(math.isnan(grades[number].score) for number in failed)
        assert [g.score for n, g in enumerate(grades) if n not in failed] == [
            score for n, score in enumerate(right) if n not in failed
        ]
    assert 4 <= seconds < 12  # four deadlines of two seconds, on two processes


def test_what_a_grader_may_return_and_what_else_it_does(pool: GraderPool) -> None:
    right, odd, three, raised, left, unpickled, unscored, fell = one(
        pool, "4", "dict", "three", "raise", "leave", "odd", "unscored", "segfault"
    )
    assert right == Grade(score=1.0)
    assert odd.score == 0.5
    assert odd.details == {  # what JSON has no word for is text
        "steps": [1, 2],
        "who": "{'a': inf}",
        "kind": "<class 'tests.unit.bad_graders.OddError'>",
    }
    assert [grade.error for grade in (three, raised, left, unpickled, unscored, fell)] == [
        "it returned 3; a score is from 0 (wrong) to 1 (right)",
        r"ValueError('no such\nanswer')",
        "SystemExit(4)",
        "OddError('a')",
        "it returned {'steps': 3}, a dict without 'score'",
        "its process was ended by SIGSEGV",
    ]


def test_every_failure_has_a_reason_of_one_short_line(pool: GraderPool) -> None:
    grades = one(pool, "nothing", "word", "huge", "long", "unspeakable", "real-time signal")
    assert [grade.error for grade in grades] == [
        "it returned None; a score is from 0 (wrong) to 1 (right)",
        "it returned '0.5'; a score is from 0 (wrong) to 1 (right)",
        "it returned <int>; a score is from 0 (wrong) to 1 (right)",  # Python does not write it out either
        "ValueError('" + "x" * 285 + "...",
        "<UnspeakableError>",
        f"its process was ended by signal {signal.SIGRTMIN + 5}",
    ]


def test_processes_are_light(pool: GraderPool) -> None:
    (grade,) = one(pool, "modules")
    modules = grade.details["modules"]
    assert "megatron_rl.rewards.worker" in modules
    heavy = ("torch", "numpy", "transformers", "pydantic", "sympy", "httpx2", "megatron_rl.config", "pytest")
    assert [module for module in modules if module.split(".")[0] in heavy or module in heavy] == []
    assert not grade.details["main"]  # the program's main module is not run again


@pytest.mark.parametrize(
    ("grader", "bad", "error"),
    [
        (bad_graders.in_a_batch, "hang", "took longer than 2 s and was killed"),
        (bad_graders.in_a_batch, "crash", "its process ended with exit code 7"),
        (bad_graders.in_a_batch, "raise", r"ValueError('no such\nanswer')"),
        (bad_graders.awaited, "hang", "took longer than 2 s and was killed"),  # it does not let others run
        (bad_graders.awaited, "crash", "its process ended with exit code 7"),
    ],
)
def test_only_the_guilty_of_a_group_is_ungraded(grader: Callable[..., object], bad: str, error: str) -> None:
    with GraderPool(config(grader)) as pool:
        grades = one(pool, "4", bad, "5", "4")
    assert [grade.error for grade in grades] == ["", error, "", ""]
    assert [grade.score for grade in grades if not grade.error] == [1.0, 0.0, 1.0]


def test_a_batch_is_graded_at_once_and_a_score_too_few_is_no_score() -> None:
    with GraderPool(config(bad_graders.in_a_batch)) as pool:
        grades = one(pool, "4", "5", "three")
        assert [grade.details.get("together") for grade in grades] == [3, 3, None]
        short = one(pool, "4", "short", "hm")
    assert [grade.score for grade in short] == [1.0, 1.0, 0.0]  # one by one there was one for one


def test_async_graders_wait_together_and_each_has_its_own_deadline() -> None:
    with GraderPool(config(bad_graders.awaited, workers=1)) as pool:
        before = one(pool, "pid")
        started = time.monotonic()
        assert [grade.score for grade in one(pool, *["4"] * 50)] == [1.0] * 50
        assert time.monotonic() - started < 5  # of 0.3 s each
        grades = one(pool, "4", "await forever", "leave", "5")
        assert [grade.error for grade in grades] == ["", "took longer than 2 s", "SystemExit(4)", ""]
        assert one(pool, "pid") == before  # nothing was killed


def test_signals_to_the_whole_job_cost_no_grade() -> None:
    with GraderPool(config(bad_graders.slowly)) as pool:
        pool.submit("group", PROMPT, [("4", True)] * 6)
        pool.wait(30)
        before = processes_of(os.getpid())
        for process in before:
            os.kill(process, signal.SIGTERM)
            os.kill(process, signal.SIGINT)
        grades = until_done(pool, 1)["group"]
    assert [grade.score for grade in grades] == [1.0] * 6
    assert {grade.details["pid"] for grade in grades} <= before


@pytest.mark.parametrize(("times", "error"), [(1, ""), (2, ""), (3, "its process was ended by SIGTERM")])
def test_an_answer_whose_process_was_asked_to_end_is_tried_again(tmp_path: Path, times: int, error: str) -> None:
    with GraderPool(config(bad_graders.ended_from_outside)) as pool:
        (grade,) = one(pool, f"{times} {tmp_path / 'count'}")
    assert grade.error == error


def test_idle_processes_that_are_killed_are_replaced(pool: GraderPool) -> None:
    one(pool, "4")
    for _ in range(2):
        for process in processes_of(os.getpid()):
            os.kill(process, signal.SIGKILL)
        time.sleep(0.3)
        assert [grade.score for grade in one(pool, "4", "5")] == [1.0, 0.0]


def test_processes_that_take_nothing_are_replaced(monkeypatch: pytest.MonkeyPatch, pool: GraderPool) -> None:
    one(pool, "4")
    before = processes_of(os.getpid())
    monkeypatch.setattr("megatron_rl.rewards.pool.STALLED_S", -1)  # of a deadline of two seconds
    time.sleep(1.5)
    one(pool, "4")
    assert processes_of(os.getpid()) == before  # nothing stalls where there was nothing to do
    for process in processes_of(os.getpid()):
        os.kill(process, signal.SIGSTOP)
    assert [grade.score for grade in one(pool, "4", "5")] == [1.0, 0.0]


@pytest.mark.parametrize(
    ("what", "error"),
    [
        ("raise SystemExit('no GPU')", "its process could not load it: SystemExit('no GPU')"),
        ("os._exit(3)", "its processes end or hang before they grade anything"),
    ],
)
def test_a_grader_that_only_its_process_cannot_load_ungrades_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, error: str
) -> None:
    module = f"loads_here_only_{len(what)}"
    (tmp_path / f"{module}.py").write_text(
        f"import os, multiprocessing\nif multiprocessing.parent_process(): {what}\ndef grade(*answer): return 1\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with GraderPool(config(f"{module}:grade")) as pool:
        for _ in range(2):
            assert [grade.error for grade in one(pool, "4", "5")] == [error] * 2


def test_closing_waits_for_no_hung_process_and_leaves_none(tmp_path: Path) -> None:
    pool = GraderPool(config(timeout_s=60))
    pool.start()
    long = "x" * 50_000  # more than a pipe holds
    pool.submit("group", PROMPT, [("hang", True), ("sleep", True), *[(long, True)] * 200])
    time.sleep(1)
    processes = processes_of(os.getpid())
    assert len(processes) == 2
    started = time.monotonic()
    pool.close()
    pool.close()
    assert time.monotonic() - started < 2
    assert not any(map(is_there, processes))
    assert pool.poll() == []


def test_what_a_killed_grader_started_is_killed_with_it(tmp_path: Path) -> None:
    file = tmp_path / "child"
    with GraderPool(config(bad_graders.with_a_child, timeout_s=1)) as pool:
        (grade,) = one(pool, str(file))
    assert grade.error == "took longer than 1 s and was killed"
    assert gone({int(file.read_text())})


def test_nothing_outlives_a_trainer_that_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "trainer.py"  # without a guard: its processes do not run it again
    script.write_text(
        textwrap.dedent("""
        import time
        from megatron_rl.rewards.pool import GraderPool
        from tests.unit.test_grader_pool import PROMPT, config, one

        pool = GraderPool(config(timeout_s=2, workers=3))
        pool.start()
        one(pool, "hang", "4")  # one process is a replacement, made by another thread
        pool.submit("more", PROMPT, [("hang", True), ("sleep", True)])
        time.sleep(1)
        print("hung", flush=True)
        time.sleep(3600)
        """)
    )
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True, env=environment) as trainer:
        assert trainer.stdout
        assert trainer.stdout.readline() == "hung\n"
        processes = processes_of(trainer.pid)
        assert len(processes) == 3
        trainer.kill()
    assert gone(processes)


def test_two_thousand_answers_cost_the_main_thread_little(pool: GraderPool) -> None:
    one(pool, "4")
    before, started = time.thread_time(), time.monotonic()
    whole = time.process_time()
    groups = graded(pool, {number: ["4", "5"] * 8 for number in range(125)})
    mine, wall, cpu = time.thread_time() - before, time.monotonic() - started, time.process_time() - whole
    each = 1e6 / 2000
    print(
        f"an answer: {mine * each:.0f} us of the main thread, {cpu * each:.0f} of its process, {wall * each:.0f} passed"
    )
    assert all([grade.score for grade in grades] == [1.0, 0.0] * 8 for grades in groups.values())
    assert mine < 2.0


def test_groups_are_told_apart_by_their_keys(pool: GraderPool) -> None:
    pool.submit(("a", 1), PROMPT, [])
    assert pool.poll() == [(("a", 1), [])]
    pool.submit("b", PROMPT, [("4", False)])
    with pytest.raises(ValueError, match="'b' is being graded already"):
        pool.submit("b", PROMPT, [])
    assert until_done(pool, 1) == {"b": [Grade(score=1.0)]}
    assert one(pool, "5") == [Grade(score=0.0)]
    assert one(pool, "4") == [Grade(score=1.0)]  # the same key again


def test_rows_name_their_grader_by_their_source() -> None:
    here = bad_graders.__name__
    with GraderPool(
        config("after_marker", graders={"sums": f"{here}:misbehave", "sets": f"{here}:in_a_batch"})
    ) as pool:
        for source in ("sums", "sets", "else", ["sums"], None):
            metadata = {} if source is None else {"data_source": source}
            prompt = Prompt(index=1, text="", ids=(1,), answer="4", metadata=metadata)
            pool.submit(str(source), prompt, [("4", True), ("#4", True)])
        grades = until_done(pool, 5)
    assert [grade.score for grade in grades["sums"]] == [1.0, 0.0]
    assert [grade.details for grade in grades["sums"]] == [{}, {}]
    assert [grade.details for grade in grades["sets"]] == [{"together": 2}] * 2
    for marked in ("else", "['sums']", "None"):
        assert [grade.score for grade in grades[marked]] == [0.0, 1.0]
