"""The running-sum task: its data, its demonstrations, its tokenizer, and the base model's directory."""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_rl.demo import base_model
from megatron_rl.demo.task import (
    BOS_ID,
    MAX_DIGITS,
    MAX_RESPONSE_TOKENS,
    MIN_DIGITS,
    VOCABULARY,
    DemonstrationStyle,
    Problem,
    build_tokenizer,
    demonstrate,
    heldout_problems,
    training_problems,
    write_jsonl,
)

FAULTLESS = DemonstrationStyle()


@pytest.mark.parametrize("text", ["6620=", "66622404#4", "#7<eos>", "0123456789=#:.+-<>|?", "<bos>1=", ""])
def test_tokenizer_round_trip(text: str) -> None:
    tokenizer = build_tokenizer()
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_encoding_puts_exactly_one_bos_first() -> None:
    tokenizer = build_tokenizer()
    assert tokenizer("6620=")["input_ids"] == [BOS_ID, *(VOCABULARY.index(character) for character in "6620=")]
    assert tokenizer.decode(tokenizer.encode("6620="), skip_special_tokens=True) == "6620="


def test_vocabulary_ends_where_the_model_does() -> None:
    assert len(build_tokenizer()) == len(VOCABULARY) == 23


def test_prompts_are_padded_on_the_left() -> None:
    batch = build_tokenizer()(["1234=", "123456="], padding=True)
    assert batch["attention_mask"] == [[0, 0, 1, 1, 1, 1, 1, 1], [1] * 8]


def test_heldout_is_disjoint_from_training_and_both_are_distinct() -> None:
    heldout = heldout_problems(500, seed=1)
    training = training_problems(5000, seed=1, heldout=heldout)
    assert len(set(heldout)) == 500
    assert len(set(training)) == 5000
    assert not set(heldout) & set(training)


def test_a_seed_decides_the_problems() -> None:
    assert heldout_problems(50, seed=3) == heldout_problems(50, seed=3) != heldout_problems(50, seed=4)
    assert training_problems(50, 3, ()) == training_problems(50, 3, ()) != training_problems(50, 4, ())


def test_a_small_heldout_set_begins_a_large_one() -> None:
    assert heldout_problems(200)[:50] == heldout_problems(50)


def test_more_problems_than_can_be_drawn_quickly_are_refused() -> None:
    with pytest.raises(ValueError, match="n=600000"):
        heldout_problems(600_000)


def test_answers_are_the_last_digit_of_the_sum() -> None:
    problems = heldout_problems(300)
    for problem in problems:
        digits, end = problem.prompt[:-1], problem.prompt[-1]
        assert end == "="
        assert MIN_DIGITS <= len(digits) <= MAX_DIGITS
        assert problem.answer == str(sum(ord(digit) - ord("0") for digit in digits))[-1]
    assert {len(problem.prompt) for problem in problems} == {5, 6, 7}


def test_faultless_demonstrations_are_right_and_fit() -> None:
    assert demonstrate(Problem("6620=", "4"), FAULTLESS, random.Random(0)) == "66622404#4"
    rng = random.Random(0)
    for problem in heldout_problems(300):
        scratch, _, answer = demonstrate(problem, FAULTLESS, rng).partition("#")
        assert answer == problem.answer
        assert scratch[::2] == problem.prompt[:-1]
        assert len(scratch) + len("#4") + 1 <= MAX_RESPONSE_TOKENS


def test_direct_guesses_and_early_stops_answer_at_random() -> None:
    problem = Problem("123456=", "1")
    for style in (DemonstrationStyle(direct_guess=1.0), DemonstrationStyle(early_stop=1.0)):
        rng = random.Random(0)
        assert {demonstrate(problem, style, rng) for _ in range(300)} == {f"#{digit}" for digit in range(10)}


def test_noise_makes_some_demonstrations_wrong() -> None:
    rng = random.Random(0)
    problem, style = Problem("123456=", "1"), DemonstrationStyle(noise=0.05)
    right = sum(demonstrate(problem, style, rng).endswith("#1") for _ in range(1000))
    assert 700 < right < 850  # 0.95 ** 6 = 0.735, and a few wrong sums come right again


def test_a_style_refuses_what_is_no_probability() -> None:
    with pytest.raises(ValueError, match=r"noise .* got 1\.5"):
        DemonstrationStyle(noise=1.5)


def test_jsonl_rows(tmp_path: Path) -> None:
    path = tmp_path / "data" / "train.jsonl"
    write_jsonl(path, [Problem("6620=", "4"), Problem("1234=", "0")])
    assert path.read_text() == '{"prompt": "6620=", "answer": "4"}\n{"prompt": "1234=", "answer": "0"}\n'
    assert list(path.parent.iterdir()) == [path]


def test_a_failed_write_leaves_the_old_rows_alone(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    write_jsonl(path, [Problem("6620=", "4")])
    with pytest.raises(ZeroDivisionError):
        write_jsonl(path, (Problem("1234=", str(1 // left)) for left in (1, 0)))
    assert json.loads(path.read_text())["prompt"] == "6620="
    assert list(tmp_path.iterdir()) == [path]


@pytest.fixture
def _one_step_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = base_model.RECIPE
    short = replace(recipe, batch_size=4, skill=replace(recipe.skill, steps=1), habit=replace(recipe.habit, steps=1))
    monkeypatch.setattr(base_model, "RECIPE", short)


@pytest.mark.usefixtures("_one_step_stages")
def test_base_model_loads_by_its_directory_and_is_made_once(tmp_path: Path) -> None:
    directory = tmp_path / "base"
    said: list[str] = []
    random_state = torch.get_rng_state()
    base_model.make_base_model(directory, seed=0, say=said.append)
    assert torch.equal(torch.get_rng_state(), random_state)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(directory), AutoTokenizer.from_pretrained(directory)
    assert model.num_parameters() == 544_768
    assert model.dtype == torch.float32
    for config in (model.config, model.generation_config, tokenizer):
        assert (config.pad_token_id, config.bos_token_id, config.eos_token_id) == (0, 1, 2)
    assert tokenizer.get_vocab() == build_tokenizer().get_vocab()
    assert tokenizer.encode("6620=") == build_tokenizer().encode("6620=")

    weights = directory / "model.safetensors"
    written = weights.stat().st_mtime_ns
    base_model.make_base_model(directory, seed=0, say=said.append)
    assert "already made" in said[-1]
    assert weights.stat().st_mtime_ns == written
    assert list(tmp_path.iterdir()) == [directory]


@pytest.mark.usefixtures("_one_step_stages")
def test_base_model_follows_its_seed_and_replaces_another_one(tmp_path: Path) -> None:
    weights = []
    for seed in (0, 1, 0):
        base_model.make_base_model(tmp_path / "base", seed=seed, say=lambda line: None)
        weights.append((tmp_path / "base" / "model.safetensors").read_bytes())
    assert weights[0] == weights[2] != weights[1]
    assert list(tmp_path.iterdir()) == [tmp_path / "base"]


def test_base_model_replaces_nothing_of_others(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(FileExistsError, match="not replacing it"):
        base_model.make_base_model(tmp_path, seed=0)
    assert (tmp_path / "thesis.tex").exists()
