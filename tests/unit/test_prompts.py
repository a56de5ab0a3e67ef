"""Prompts from JSONL: tokenised once, the limit kept, every mistake named by file and line."""

import itertools
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from megatron_rl.config import DataConfig
from megatron_rl.data.prompts import PromptSet, load_prompts, load_tokenizer
from megatron_rl.demo.task import BOS_ID, VOCABULARY, build_tokenizer
from megatron_rl.errors import UserError

TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m['role'][0:0] }}<{{ m['content'] }}>{% endfor %}=" + (
    "{% if add_generation_prompt %}#{% endif %}"
)
"""Writes the beginning of sequence itself, as the templates of many models do."""


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer()


@pytest.fixture(scope="module")
def chat_tokenizer() -> PreTrainedTokenizerFast:
    with_template = build_tokenizer()
    with_template.chat_template = TEMPLATE
    return with_template


def ids_of(text: str) -> tuple[int, ...]:
    return tuple(VOCABULARY.index(character) for character in text)


def jsonl(directory: Path, *rows: object) -> Path:
    path = directory / "rows.jsonl"
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def nested_row(levels: int) -> str:
    """A row, itself a level, with `levels` more of them in its metadata."""
    return '{"prompt": "1=", "answer": "1", "source": ' + "[" * levels + "]" * levels + "}"


def load(path: Path, tokenizer: PreTrainedTokenizerFast, **options: Any) -> PromptSet:
    return load_prompts(path, tokenizer, DataConfig(train=path, **options))


def refusal(path: Path, tokenizer: PreTrainedTokenizerFast, **options: Any) -> str:
    with pytest.raises(UserError) as caught:
        load(path, tokenizer, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_rows_become_prompts(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    path = jsonl(
        tmp_path,
        {"prompt": "12=", "answer": "3", "level": 2, "source": {"name": "s"}},
        "",
        {"answer": 4, "prompt": "13="},
    )
    found = load(path, tokenizer)
    first, second = found.prompts
    assert (first.index, first.text, first.answer) == (1, "<bos>12=", "3")
    assert first.metadata == {"level": 2, "source": {"name": "s"}}
    assert first.ids == (BOS_ID, *ids_of("12="))
    assert (second.index, second.answer, second.metadata) == (3, "4", {})  # lines are counted from 1, empty ones too
    assert found.skipped == 0


def test_the_last_line_needs_no_newline_and_text_is_utf8(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes('{"prompt": "1=", "answer": "é\u2028"}\r\n{"prompt": "2=", "answer": "2"}'.encode())
    assert [prompt.answer for prompt in load(path, tokenizer).prompts] == ["é\u2028", "2"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"prompt": "1=", "answer": "1"', "not JSON"),
        ("12= 3", "not JSON"),
        ('["12=", "3"]', "a line is a JSON object"),
        ('"12="', "a line is a JSON object"),
        ("null", "a line is a JSON object"),
        ('{"answer": "1"}', "`prompt` is missing"),
        ('{"prompt": "1="}', "`answer` is missing"),
        ('{"prompt": "1=", "answer": ["1"]}', "`answer` is a string or a number"),
        ('{"prompt": "1=", "answer": null}', "`answer` is a string or a number"),
        ('{"prompt": [{"role": "user", "content": "1="}], "answer": "1"}', "set data.chat_template=true"),
        ('{"prompt": 12, "answer": "1"}', "`prompt` is"),
        ('{"prompt": null, "answer": "1"}', "`prompt` is"),
        ('{"prompt": "1=", "answer": true}', "`answer` is a string or a number"),
        ('{"prompt": "1=", "answer": {}}', "`answer` is a string or a number"),
        ('{"prompt": "1=", "answer": NaN}', "`answer` is nan"),
        ('{"prompt": "1=", "answer": -Infinity}', "`answer` is -inf"),
        ('{"prompt": "1=", "answer": 1e999}', "`answer` is inf"),
        ('{"prompt": "1=", "answer": %s}' % ("1" * 5000), "not JSON"),
        ('{"prompt": "1=", "answer": "1", "level": %s}' % ("1" * 5000), "not JSON"),
        ('{"prompt": "\\ud800", "answer": "1"}', r"a lone surrogate, '\ud800'"),
        ('{"prompt": "1=", "answer": "1 \\udfff"}', r"a lone surrogate, '\udfff'"),
        ('{"prompt": "1=", "answer": "1", "source": [{"name": "\\ud800"}]}', "a lone surrogate"),
        ('{"prompt": "1=", "answer": "1", "\\ud800": 1}', "a lone surrogate"),
        (nested_row(100_000), "not JSON (maximum recursion depth"),
        (nested_row(600), "nested deeper than 100 levels"),  # Python reads it, but couldn't pickle it
        (nested_row(100), "nested deeper than 100 levels"),
    ],
)
def test_a_malformed_line_is_named_by_file_and_number(
    line: str, said: str, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    path = jsonl(tmp_path, {"prompt": "1=", "answer": "1"}, "", line, {"prompt": "2=", "answer": "2"})
    message = refusal(path, tokenizer)
    assert message.startswith(f"{path}:3: ")
    assert said in message


def test_big_numbers_and_pairs_of_surrogates_and_some_nesting_are_taken(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    path = jsonl(
        tmp_path,
        {"prompt": "1=", "answer": 10**4000},
        '{"prompt": "1=", "answer": "\\ud83d\\ude00", "score": NaN}',
        nested_row(99),
    )
    found = load(path, tokenizer)
    assert [prompt.answer for prompt in found.prompts] == [str(10**4000), "😀", "1"]
    assert pickle.loads(pickle.dumps(found.prompts[2])) == found.prompts[2]


def test_a_tokenizer_that_fails_on_a_prompt_names_the_line(tmp_path: Path) -> None:
    rust = Tokenizer(WordLevel({"1": 0}, unk_token="<unk>"))  # <unk> is not among its tokens
    path = jsonl(tmp_path, {"prompt": "1", "answer": "1"}, {"prompt": "2", "answer": "1"})
    message = refusal(path, PreTrainedTokenizerFast(tokenizer_object=rust))
    assert message.startswith(f"{path}:2: the tokenizer failed (Exception: WordLevel error")


def test_a_line_that_is_not_utf8_is_named(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"prompt": "1=", "answer": "1"}\n{"prompt": "\xff=", "answer": "1"}\n')
    assert refusal(path, tokenizer).startswith(f"{path}:2: not JSON")


@pytest.mark.parametrize("content", ["", "\n\n  \n"])
def test_an_empty_file_is_refused(content: str, tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(content)
    assert refusal(path, tokenizer) == f"{path}: no prompts: the file is empty"


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    assert refusal(tmp_path / "none.jsonl", tokenizer) == f"{tmp_path}/none.jsonl: No such file or directory"
    assert refusal(tmp_path, tokenizer).startswith(f"{tmp_path}: ")


# ---- the limit


@pytest.fixture
def uneven(tmp_path: Path) -> Path:
    """Prompts of 3, 6, 4 and 5 tokens, the beginning of sequence included."""
    return jsonl(tmp_path, *({"prompt": text, "answer": "0"} for text in ("1=", "1234=", "12=", "123=")))


def test_prompts_over_the_limit_are_skipped_and_counted(uneven: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    found = load(uneven, tokenizer, max_prompt_tokens=4)
    assert [prompt.index for prompt in found.prompts] == [1, 3]
    assert [len(prompt.ids) for prompt in found.prompts] == [3, 4]
    assert found.skipped == 2


def test_prompts_over_the_limit_are_refused_where_that_is_asked(
    uneven: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    message = refusal(uneven, tokenizer, max_prompt_tokens=4, overlong_prompts="refuse")
    assert message.startswith(f"{uneven}:2: prompt over data.max_prompt_tokens (4), one of 2")
    assert load(uneven, tokenizer, max_prompt_tokens=6, overlong_prompts="refuse").skipped == 0


def test_a_limit_that_leaves_nothing_is_refused(uneven: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    assert refusal(uneven, tokenizer, max_prompt_tokens=2).endswith("no prompts: all 4 are over data.max_prompt_tokens")


# ---- the fingerprint


ROWS = [{"prompt": "12=", "answer": "3"}, {"prompt": "1234=", "answer": "0"}]


def fingerprint(directory: Path, tokenizer: PreTrainedTokenizerFast, *rows: object, **options: Any) -> str:
    directory.mkdir()
    return load(jsonl(directory, *rows), tokenizer, **options).fingerprint


@pytest.mark.parametrize(
    ("rows", "options"),
    [
        ([{"answer": "3", "prompt": "12=", "source": "elsewhere"}, "", {"prompt": "1234=", "answer": 0}], {}),
        (ROWS, {"max_prompt_tokens": 6}),
        ([*ROWS, {"prompt": "12345=", "answer": "5"}], {"max_prompt_tokens": 6}),
    ],
)
def test_the_same_usable_prompts_have_the_same_fingerprint(
    rows: list[object], options: dict[str, Any], tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    assert fingerprint(tmp_path / "one", tokenizer, *ROWS) == fingerprint(
        tmp_path / "other", tokenizer, *rows, **options
    )


@pytest.mark.parametrize(
    ("rows", "options"),
    [
        (ROWS, {"max_prompt_tokens": 5}),
        (ROWS[::-1], {}),
        (ROWS[:1], {}),
        ([{"prompt": "12=", "answer": "4"}, ROWS[1]], {}),
        ([{"prompt": "13=", "answer": "3"}, ROWS[1]], {}),
    ],
)
def test_other_usable_prompts_have_another_fingerprint(
    rows: list[object], options: dict[str, Any], tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    assert fingerprint(tmp_path / "one", tokenizer, *ROWS) != fingerprint(
        tmp_path / "other", tokenizer, *rows, **options
    )


# ---- beginning of sequence, chat templates


def test_the_beginning_of_sequence_is_there_once(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, chat_tokenizer: PreTrainedTokenizerFast
) -> None:
    path = jsonl(tmp_path, {"prompt": "12=", "answer": "3"})
    raw = load(path, tokenizer).prompts[0]
    chat = load(path, chat_tokenizer, chat_template=True).prompts[0]
    assert raw.ids == (BOS_ID, *ids_of("12="))
    assert chat.ids == (BOS_ID, *ids_of("<12=>=#"))
    assert chat.text == "<bos><12=>=#"


def test_messages_are_rendered_by_the_chat_template(tmp_path: Path, chat_tokenizer: PreTrainedTokenizerFast) -> None:
    messages = [{"role": "system", "content": "1"}, {"role": "user", "content": "23"}]
    path = jsonl(tmp_path, {"prompt": messages, "answer": "3"})
    assert load(path, chat_tokenizer, chat_template=True).prompts[0].ids == (BOS_ID, *ids_of("<1><23>=#"))


def test_a_chat_template_that_is_not_there_is_named(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    path = jsonl(tmp_path, {"prompt": "12=", "answer": "3"})
    assert refusal(path, tokenizer, chat_template=True).startswith(f"{path}:1: the chat template failed")


@pytest.mark.parametrize(
    ("template", "prompt"),
    [
        ("{{ raise_exception('roles must alternate') }}", "12="),
        ("{{ messages[0].content.parts.first }}", "12="),
        ("{{ 1 // 0 }}", "12="),
        ("{{ [].pop() }}", "12="),
        ("{{ 2.0 ** 9999 }}", "12="),
        ("{% if", "12="),
        (3, "12="),
        ("{{ messages[0].role + 1 }}", "12="),
    ],
)
def test_a_chat_template_that_fails_names_the_line(template: Any, prompt: object, tmp_path: Path) -> None:
    failing = build_tokenizer()
    failing.chat_template = template
    path = jsonl(tmp_path, {"prompt": prompt, "answer": "3"})
    assert refusal(path, failing, chat_template=True).startswith(f"{path}:1: the chat template failed (")


@pytest.mark.parametrize(
    "prompt",
    [
        12,
        None,
        True,
        [],
        {},
        {"role": "user", "content": "1"},
        [3],
        [None],
        ["1"],
        [{}],
        [[]],
        [[{"role": "user", "content": "1"}]],  # transformers takes this for a batch
        [{"role": "user"}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": 3}],
        [{"role": 3, "content": "1"}],
        [{"content": "1"}],
        [{"role": "user", "content": "1"}, 3],
    ],
)
def test_what_is_no_list_of_chat_messages_is_refused(
    prompt: object, tmp_path: Path, chat_tokenizer: PreTrainedTokenizerFast
) -> None:
    path = jsonl(tmp_path, {"prompt": prompt, "answer": "3"})
    message = refusal(path, chat_tokenizer, chat_template=True)
    assert message.startswith(f"{path}:1: `prompt` is a string or a list of chat messages")


def test_a_message_may_call_tools_and_have_parts(tmp_path: Path, chat_tokenizer: PreTrainedTokenizerFast) -> None:
    calls = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    path = jsonl(tmp_path, {"prompt": [{"role": "user", "content": ["1"]}, calls], "answer": "3"})
    assert load(path, chat_tokenizer, chat_template=True).prompts[0].ids == (BOS_ID, *ids_of("<1><>=#"))


@pytest.mark.parametrize("prompt", ["\ud800", [{"role": "user", "content": "\ud800"}]])
def test_a_lone_surrogate_in_a_chat_is_named(
    prompt: object, tmp_path: Path, chat_tokenizer: PreTrainedTokenizerFast
) -> None:
    path = jsonl(tmp_path, {"prompt": prompt, "answer": "3"})
    assert refusal(path, chat_tokenizer, chat_template=True).startswith(f"{path}:1: a lone surrogate")


def test_a_prompt_without_tokens_is_named(tmp_path: Path) -> None:
    bare = build_tokenizer()
    bare.chat_template = "{{ '' }}"
    path = jsonl(tmp_path, {"prompt": "12=", "answer": "3"})
    assert refusal(path, bare, chat_template=True) == f"{path}:1: the prompt has no tokens"


# ---- tokenizers


def test_the_tokenizer_of_a_model_directory(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.save_pretrained(tmp_path)
    assert tuple(load_tokenizer(tmp_path)("12=").input_ids) == (BOS_ID, *ids_of("12="))


def test_a_directory_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        load_tokenizer(tmp_path)
    assert str(caught.value) == f"{tmp_path}: no usable tokenizer (no tokenizer.json)"


NO_OBJECT = ["", "{", "[]", "3", "null", "[" * 100000]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *itertools.product(("tokenizer.json", "tokenizer_config.json"), NO_OBJECT),
        ("tokenizer.json", "{}"),
        ("tokenizer.json", '{"model": 3}'),
        ("tokenizer.json", '{"added_tokens": [], "model": {}}'),  # a bare Exception, from Rust
        ("tokenizer.json", '{"added_tokens": [3]}'),
        ("tokenizer_config.json", '{"tokenizer_class": 3}'),
        ("tokenizer_config.json", '{"tokenizer_class": []}'),
        ("tokenizer_config.json", '{"eos_token": []}'),
        ("tokenizer_config.json", '{"added_tokens_decoder": []}'),
        ("tokenizer_config.json", '{"model_max_length": "long"}'),
        ("special_tokens_map.json", "[]"),
        ("added_tokens.json", "[]"),
        ("config.json", '{"model_type": "qwen2", "initializer_range": "small"}'),  # transformers reads it again
    ],
)
def test_a_damaged_tokenizer_is_refused(name: str, content: str, tmp_path: Path) -> None:
    build_tokenizer().save_pretrained(tmp_path)
    (tmp_path / name).write_text(content)
    refused_tokenizer(tmp_path)


@pytest.mark.parametrize("kept", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_truncated_tokenizer_is_refused(name: str, kept: float, tmp_path: Path) -> None:
    build_tokenizer().save_pretrained(tmp_path)
    whole = (tmp_path / name).read_text()
    (tmp_path / name).write_text(whole[: int(kept * len(whole))])
    refused_tokenizer(tmp_path)


def refused_tokenizer(directory: Path) -> None:
    with pytest.raises(UserError) as caught:
        load_tokenizer(directory)
    message = str(caught.value)
    assert message.startswith(f"{directory}: no usable tokenizer (")
    assert "\n" not in message
