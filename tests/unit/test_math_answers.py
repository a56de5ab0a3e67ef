r"""The grader `math`: the last \boxed{} alone, by math-verify, with nothing but the pool's deadline to stop it."""

import json
import time
from pathlib import Path

import pytest

from megatron_rl.config import RewardConfig
from megatron_rl.rewards.math_answers import last_box, same_as_last_box
from megatron_rl.rewards.pool import GraderPool
from megatron_rl.types import Prompt
from tests.unit.test_grader_pool import until_done

CASES = json.loads((Path(__file__).parents[1] / "cases/math_verify_cases.json").read_text(encoding="utf-8"))
"""Name, answer, response, what math-verify 0.9.0 said of the whole response, and in how many milliseconds."""

BY_THE_LAST_BOX = {
    "two boxed, last right": 1.0,  # math-verify reads both as a set
    "two boxed same expr list": 0.0,
    "units plain": 0.0,  # no box, in this one and in those below
    "trailing text": 0.0,
    "Answer: line": 0.0,
    "Answer: $34$": 0.0,
    "Answer with step number after": 0.0,
}
"""Where the box decides otherwise."""

FAULTS = {
    "unicode sqrt": "the same as √2, and it says wrong",
    "fullwidth digits": "the same as 7, and it says wrong",
    "guess 'x=5' chain": "1 = 2 = 5 is no 5, and it says right",
}
"""Of the library, that we do not mend."""


def prompt(answer: str) -> Prompt:
    return Prompt(index=3, text="", ids=(1,), answer=answer)


def test_every_exception_is_of_a_case() -> None:
    assert {*BY_THE_LAST_BOX, *FAULTS} <= {name for name, *_ in CASES}


@pytest.mark.parametrize(
    ("name", "answer", "text", "verdict"),
    [pytest.param(*case[:4], id=case[0]) for case in CASES if case[0] not in FAULTS],
)
def test_cases(name: str, answer: str, text: str, verdict: str) -> None:
    score = BY_THE_LAST_BOX.get(name, float(verdict == "True"))
    assert same_as_last_box(prompt(answer), text, True) == score
    assert same_as_last_box(prompt(answer.strip("$")), text, True) == score  # as most data has it
    assert same_as_last_box(prompt(answer), text, False) == score  # cut off after its box


@pytest.mark.parametrize(
    ("text", "box"),
    [
        (r"\boxed{4} then \boxed{5}", "5"),
        (r"so \boxed{\frac{\sqrt{3}}{2}} done", r"\frac{\sqrt{3}}{2}"),
        (r"\boxed {4}", "4"),
        (r"\boxed{\left\{ x \right.}", r"\left\{ x \right."),
        (r"\boxed{\boxed{5}}", "5"),
        (r"\boxed{}", ""),
        (r"\boxed{4} then \boxed{5", None),  # the last one is cut off, and the first was not the last word
        (r"\boxed{5\}", None),
        (r"\boxed 5", None),
        ("5", None),
        ("\\boxed{5\\", None),
        ("", None),
    ],
)
def test_the_last_box(text: str, box: str | None) -> None:
    assert last_box(text) == box


def test_an_answer_in_a_box_of_its_own_is_read() -> None:
    assert same_as_last_box(prompt(r"so it is \boxed{\frac12}"), r"\boxed{0.5}", True) == 1.0


def test_a_row_whose_answer_means_nothing_is_not_wrong_but_said() -> None:
    with pytest.raises(ValueError, match=r"can't read the answer '' of row 3"):
        same_as_last_box(prompt(""), r"\boxed{5}", True)


def test_a_power_tower_costs_its_deadline_and_nothing_else() -> None:
    with GraderPool(RewardConfig(grader="math", timeout_s=3, workers=2)) as pool:
        pool.submit("warm", prompt("4"), [(r"\boxed{4}", True)] * 2)
        until_done(pool, 1)
        started = time.monotonic()
        tower = (r"\boxed{9^{9^{9}}}", True)
        pool.submit("group", prompt("4"), [(r"\boxed{4}", True), tower, (r"\boxed{5}", True), (r"\boxed{2+2}", True)])
        (grades,) = until_done(pool, 1).values()
        seconds = time.monotonic() - started
    assert [grade.error for grade in grades] == ["", "took longer than 3 s and was killed", "", ""]
    assert [grades[place].score for place in (0, 2, 3)] == [1.0, 0.0, 1.0]
    assert seconds < 6
