"""Graders: the rule-based one case by case, and one of the user's own."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.config import RewardConfig
from megatron_rl.errors import UserError
from megatron_rl.rewards.graders import after_marker, batch, check_graders, kind_of
from megatron_rl.types import Prompt


def prompt(answer: str = "42") -> Prompt:
    return Prompt(index=5, text="6 times 7 =", ids=(1, 2), answer=answer, metadata={"level": 3})


@pytest.mark.parametrize(
    ("text", "finished", "score"),
    [
        ("thinking #42", True, 1.0),
        ("#42", True, 1.0),
        ("# 42 \n", True, 1.0),
        ("#42", False, 0.0),  # cut off: more digits could have come
        ("#43", True, 0.0),
        ("#420", True, 0.0),
        ("#4 2", True, 0.0),
        ("42", True, 0.0),  # no marker
        ("#42#42", True, 0.0),  # two answers
        ("#41 #42", True, 0.0),
        ("42#", True, 0.0),
        ("#", True, 0.0),
        ("", True, 0.0),
    ],
)
def test_what_follows_the_only_marker_of_a_finished_response(text: str, finished: bool, score: float) -> None:
    assert after_marker(prompt(), text, finished, marker="#") == score


def test_spaces_around_the_answer_do_not_count() -> None:
    assert after_marker(prompt(" 42 "), "#42", True, marker="#") == 1.0


@pytest.mark.parametrize(("marker", "text"), [("####", "so #### 42"), ("Answer:", "so\nAnswer: 42")])
def test_the_marker_of_the_config_is_used(marker: str, text: str) -> None:
    grader = check_graders(RewardConfig(marker=marker))["after_marker"]
    assert grader(prompt(), text, True) == 1.0
    assert grader(prompt(), text.replace(marker, "#"), True) == 0.0


def level_of(prompt: Prompt, text: str, finished: bool) -> float:
    """A user's grader."""
    return (prompt.metadata["level"] + len(text) + finished) / 10


def test_a_grader_of_the_users_own_gets_prompt_text_and_finished() -> None:
    (grader,) = check_graders(RewardConfig(grader=f"{__name__}:level_of")).values()
    assert grader(prompt(), "abc", True) == 0.7
    assert grader(prompt(), "abc", False) == 0.6


@pytest.mark.parametrize(
    "name", ["after_markr", "no.such.module:f", f"{__name__}:no_such", f"{__name__}:pytest", ":f", "module:"]
)
def test_a_grader_that_is_not_there_is_refused_with_its_option(name: str) -> None:
    with pytest.raises(UserError, match=r"^rewards\.grader: ") as caught:
        check_graders(RewardConfig(grader=name))
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)


async def awaited(prompt: Prompt, text: str, finished: bool) -> float:
    return 1.0


@batch
def in_a_batch(prompts: list[Prompt], texts: list[str], finished: list[bool]) -> list[float]:
    return [1.0] * len(texts)


class Judge:
    """A grader that is an object."""

    async def __call__(self, prompt: Prompt, text: str, finished: bool) -> float:
        return 1.0

    def judge(self, prompt: Prompt, text: str, finished: bool) -> dict[str, Any]:
        return {"score": 0.5, "why": "half"}


judge = Judge()
half = judge.judge


@pytest.mark.parametrize(
    ("grader", "kind"),
    [
        (level_of, "one"),
        (partial(level_of, finished=True), "one"),
        (judge.judge, "one"),
        (awaited, "async"),
        (partial(awaited, finished=True), "async"),
        (judge, "async"),
        (in_a_batch, "batch"),
    ],
)
def test_how_a_grader_is_called(grader: Any, kind: str) -> None:
    assert kind_of(grader) == kind


def test_graders_are_checked_before_a_run_and_named_by_their_option(tmp_path: Path) -> None:
    names = {"sums": f"{__name__}:awaited", "sets": "math", "else": "https://example.org/grade"}
    assert set(check_graders(RewardConfig(graders=names))) == {"after_marker", *names.values()}
    with pytest.raises(UserError, match=r"^rewards\.graders\.sums: 'mth' is neither a known name nor package"):
        check_graders(RewardConfig(graders={"sums": "mth"}))


@pytest.mark.parametrize("url", ["http://", "https:///grade", "http://host:port/grade", "http://[1/grade"])
def test_a_url_that_leads_nowhere_is_refused(url: str) -> None:
    with pytest.raises(UserError, match=r"^rewards\.grader: ") as caught:
        check_graders(RewardConfig(grader=url))
    assert url in str(caught.value)


def test_a_module_that_fails_as_it_is_imported_is_told_with_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fails_at_import.py").write_text("\nraise RuntimeError('no licence')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match=r"fails_at_import:f: RuntimeError: no licence \(.*fails_at_import.py:2\)"):
        check_graders(RewardConfig(grader="fails_at_import:f"))
