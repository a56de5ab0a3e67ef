"""Graders: the rule-based one case by case, and one of the user's own."""

import pytest

from megatron_rl.config import RewardConfig
from megatron_rl.errors import UserError
from megatron_rl.rewards.graders import after_marker, load_grader
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
    grader = load_grader(RewardConfig(marker=marker))
    assert grader(prompt(), text, True) == 1.0
    assert grader(prompt(), text.replace(marker, "#"), True) == 0.0


def level_of(prompt: Prompt, text: str, finished: bool) -> float:
    """A user's grader."""
    return (prompt.metadata["level"] + len(text) + finished) / 10


def test_a_grader_of_the_users_own_gets_prompt_text_and_finished() -> None:
    grader = load_grader(RewardConfig(grader=f"{__name__}:level_of"))
    assert grader(prompt(), "abc", True) == 0.7
    assert grader(prompt(), "abc", False) == 0.6


@pytest.mark.parametrize(
    "name", ["after_markr", "no.such.module:f", f"{__name__}:no_such", f"{__name__}:pytest", ":f", "module:"]
)
def test_a_grader_that_is_not_there_is_refused_with_its_option(name: str) -> None:
    with pytest.raises(UserError, match=r"^rewards\.grader: ") as caught:
        load_grader(RewardConfig(grader=name))
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)
