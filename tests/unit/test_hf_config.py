"""config.json to a model's spec: every field used, or known not to matter, or refused by name."""

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from megatron_rl.errors import UserError
from megatron_rl.resharding.names import Shape
from megatron_rl.training.hf_config import read_model_spec
from tests.tiny import LLAMA, LLAMA3_ROPE, QWEN3, SHAPE, TIED, hf_config

# What transformers 4 wrote: the fields of Qwen2.5-7B, with numbers that are all distinct.
OLD: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "hidden_act": "silu",
    "hidden_size": 60,
    "initializer_range": 0.02,
    "intermediate_size": 24,
    "max_position_embeddings": 131072,
    "max_window_layers": 28,
    "model_type": "qwen2",
    "num_attention_heads": 10,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.40.1",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 37,
}
_OF_QWEN2 = ("max_window_layers", "sliding_window", "use_sliding_window")

# What Qwen3-8B and Llama-3.1-8B have beside, with their names.
OLD_QWEN3: dict[str, Any] = OLD | {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "head_dim": 8,
    "model_type": "qwen3",
    "rope_scaling": None,
    "sliding_window": None,
}
LLAMA3 = {key: value for key, value in LLAMA3_ROPE.items() if key != "rope_theta"}
OLD_LLAMA: dict[str, Any] = {key: value for key, value in OLD.items() if key not in _OF_QWEN2} | {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "eos_token_id": [128001, 128008, 128009],
    "mlp_bias": False,
    "model_type": "llama",
    "pretraining_tp": 1,
    "rope_scaling": LLAMA3,
}


def write(directory: Path, fields: dict[str, Any], generation: dict[str, Any] | None = None) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(fields))
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    return directory


def refusal(directory: Path, fields: dict[str, Any]) -> str:
    with pytest.raises(UserError) as caught:
        read_model_spec(write(directory, fields))
    message = str(caught.value)
    assert message.startswith(f"{directory}/config.json: ")
    assert "\n" not in message
    return message


@pytest.mark.parametrize("shape", [SHAPE, TIED, QWEN3, LLAMA])
def test_a_config_as_transformers_5_writes_it(shape: Shape, tmp_path: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 7e5}
    hf_config(shape, rms_norm_eps=3e-5, rope_parameters=rope).save_pretrained(tmp_path)
    spec = read_model_spec(tmp_path)
    assert spec.shape == shape
    assert (spec.norm_eps, spec.rope_theta, spec.rope_factor, spec.max_positions) == (3e-5, 7e5, None, 64)


def test_llama_3_slows_its_rotations_however_that_is_written(tmp_path: Path) -> None:
    hf_config(LLAMA, rope_parameters=LLAMA3_ROPE, max_position_embeddings=9000).save_pretrained(tmp_path / "new")
    old = write(tmp_path / "old", OLD_LLAMA | {"rope_theta": 1e8})
    for spec in map(read_model_spec, (tmp_path / "new", old)):
        assert (spec.rope_theta, spec.rope_factor) == (1e8, 8.0)


def test_a_config_as_transformers_4_wrote_it(tmp_path: Path) -> None:
    spec = read_model_spec(write(tmp_path, OLD))
    assert spec.shape == replace(SHAPE, hidden=60)
    assert (spec.norm_eps, spec.rope_theta, spec.eos_token_ids) == (1e-5, 1e6, frozenset({151645}))
    assert spec.max_positions == 131072


def test_qwen3_as_transformers_4_wrote_it(tmp_path: Path) -> None:
    spec = read_model_spec(write(tmp_path, OLD_QWEN3))
    assert spec.shape == replace(SHAPE, family="qwen3", hidden=60, head_dim=8)
    assert (spec.rope_theta, spec.rope_factor) == (1e6, None)


@pytest.mark.parametrize(
    ("scaling", "factor"), [(LLAMA3 | {"factor": 32}, 32.0), ({"type": "default"}, None), (None, None)]
)
def test_llama_as_transformers_4_wrote_it(scaling: dict[str, Any] | None, factor: float | None, tmp_path: Path) -> None:
    spec = read_model_spec(write(tmp_path, OLD_LLAMA | {"rope_scaling": scaling}))
    assert spec.shape == replace(LLAMA, hidden=60)
    assert (spec.rope_theta, spec.rope_factor) == (1e6, factor)
    assert spec.eos_token_ids == {128001, 128008, 128009}


@pytest.mark.parametrize(
    "published",
    [
        {"use_mrope": False},  # Qwen2.5-0.5B, 1.5B, 7B, Qwen2.5-Math, DeepSeek-R1-Distill-Qwen
        {"rope_scaling": None},
        {"rope_scaling": {}},
        {"sliding_window": None},
        {"layer_types": ["full_attention"] * 3},
        {"dtype": "bfloat16"},
        {"pad_token_id": 36},
        {"pad_token_id": -1},
        {"pad_token_id": None, "_name_or_path": "somewhere"},
    ],
)
def test_fields_that_change_nothing_are_taken(published: dict[str, Any], tmp_path: Path) -> None:
    assert read_model_spec(write(tmp_path, OLD | published)).shape.hidden == 60


@pytest.mark.parametrize("old", [OLD, OLD_QWEN3, OLD_LLAMA])
def test_defaults_are_those_of_transformers(old: dict[str, Any], tmp_path: Path) -> None:
    optional = {"rms_norm_eps", "rope_theta", "tie_word_embeddings", "hidden_act", "attention_dropout", "rope_scaling"}
    optional |= {"attention_bias", "mlp_bias", "pretraining_tp", "use_sliding_window"}
    fields = {key: value for key, value in old.items() if key not in optional}
    spec = read_model_spec(write(tmp_path, fields))
    theirs = AutoConfig.for_model(**fields)
    assert (spec.norm_eps, spec.rope_theta) == (theirs.rms_norm_eps, theirs.rope_parameters["rope_theta"])
    assert spec.shape.tied is theirs.tie_word_embeddings is False
    assert not getattr(theirs, "attention_bias", False)
    assert not getattr(theirs, "mlp_bias", False)
    assert not getattr(theirs, "use_sliding_window", False)
    assert getattr(theirs, "pretraining_tp", 1) == 1


def test_a_config_may_leave_open_how_long_a_sequence_can_be(tmp_path: Path) -> None:
    fields = {key: value for key, value in OLD.items() if key != "max_position_embeddings"}
    assert read_model_spec(write(tmp_path, fields)).max_positions is None


def test_a_head_size_of_its_own_is_used(tmp_path: Path) -> None:
    assert read_model_spec(write(tmp_path, OLD | {"head_dim": 8})).shape.head_dim == 8
    assert read_model_spec(write(tmp_path, OLD)).shape.head_dim == 6


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rope_scaling", {"type": "yarn", "factor": 4.0}),
        ("rope_parameters", {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}),
        ("rope_parameters", {"rope_type": None, "rope_theta": 1e6}),
        ("rope_parameters", {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5}),
        ("use_sliding_window", True),
        ("hidden_act", "gelu"),
        ("attention_dropout", 0.1),
        ("layer_types", ["full_attention", "sliding_attention", "full_attention"]),
        ("layer_types", ["full_attention"] * 2),
        ("use_mrope", True),
        ("quantization_config", {"quant_method": "awq"}),
        ("some_new_field", 3),
        ("model_type", "qwen3_moe"),
        ("attention_bias", False),
        ("num_key_value_heads", 3),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(field: str, value: Any, tmp_path: Path) -> None:
    assert field in refusal(tmp_path, OLD | {field: value})


@pytest.mark.parametrize(
    ("old", "field", "value"),
    [
        (OLD_QWEN3, "attention_bias", True),
        (OLD_QWEN3, "use_sliding_window", True),
        (OLD_QWEN3, "layer_types", ["sliding_attention"] * 3),
        (OLD_QWEN3, "mlp_bias", False),
        (OLD_LLAMA, "attention_bias", True),
        (OLD_LLAMA, "mlp_bias", True),
        (OLD_LLAMA, "pretraining_tp", 2),
        (OLD_LLAMA, "sliding_window", 4096),
        (OLD_LLAMA, "hidden_act", "gelu"),
        (OLD_LLAMA, "rope_parameters", LLAMA3_ROPE),  # beside rope_scaling
    ],
)
def test_what_a_family_does_not_have_is_refused_by_name(
    old: dict[str, Any], field: str, value: Any, tmp_path: Path
) -> None:
    assert field in refusal(tmp_path, old | {field: value})


@pytest.mark.parametrize(
    ("scaling", "said"),
    [
        ({"type": "linear", "factor": 2.0}, "type 'linear' is not implemented; only 'default' and 'llama3' are"),
        (LLAMA3 | {"rope_type": "dynamic"}, "rope_type 'dynamic' is not implemented"),
        (LLAMA3 | {"type": "llama3"}, "'type' is not known"),
        (LLAMA3 | {"factor": 0}, "factor 0 is not a positive number"),
        (LLAMA3 | {"low_freq_factor": 2.0}, "low_freq_factor 2.0 is not implemented; only 1.0 is"),
        (LLAMA3 | {"high_freq_factor": 8.0}, "high_freq_factor 8.0 is not implemented; only 4.0 is"),
        (LLAMA3 | {"original_max_position_embeddings": 4096}, "4096 is not implemented; only 8192 is"),
        (LLAMA3 | {"attention_factor": 1.0}, "'attention_factor' is not known"),
        (LLAMA3 | {"rope_theta": -1.0}, "rope_theta -1.0 is not a positive number"),
        *(({key: LLAMA3[key] for key in LLAMA3.keys() - {gone}}, f"{gone} is missing") for gone in [*LLAMA3][1:]),
    ],
)
def test_rotations_that_megatron_cannot_make_are_refused_by_name(
    scaling: dict[str, Any], said: str, tmp_path: Path
) -> None:
    message = refusal(tmp_path, OLD_LLAMA | {"rope_scaling": scaling})
    assert message.startswith(f"{tmp_path}/config.json: rope_scaling: ")
    assert said in message


def test_qwen3_says_how_large_its_heads_are(tmp_path: Path) -> None:
    fields = {key: value for key, value in OLD_QWEN3.items() if key != "head_dim"}
    assert "head_dim is missing" in refusal(tmp_path, fields)


def test_the_refusal_of_a_value_says_which_one_is_there(tmp_path: Path) -> None:
    assert "hidden_act 'gelu' is not implemented; only 'silu' is" in refusal(tmp_path, OLD | {"hidden_act": "gelu"})
    said = refusal(tmp_path, OLD | {"model_type": "qwen3_moe"})
    assert "model_type 'qwen3_moe' is not supported; qwen2, qwen3, llama are" in said


NUMBERS = ("896", 8.5, True, [8], {"value": 8}, 0, -8)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *itertools.product(("num_attention_heads", "head_dim", "max_position_embeddings"), NUMBERS),
        *itertools.product(("hidden_size", "num_hidden_layers", "intermediate_size"), ("896", 8.5, True, 0, 2**31)),
        *itertools.product(("num_key_value_heads", "vocab_size"), ("2", 2.0, True, 0, -1, float("nan"), 10**400)),
        *itertools.product(("rms_norm_eps", "rope_theta"), ("1", True, [1], 0, 0.0, -1e-6, float("nan"))),
        *itertools.product(("rms_norm_eps", "rope_theta"), (float("inf"), 10**400)),
        *itertools.product(("tie_word_embeddings",), ("false", "true", 0, 1, 0.0, [], {})),
        *itertools.product(("use_sliding_window", "use_mrope"), ("false", [], {})),
        *itertools.product(("rope_parameters",), ("default", [["rope_theta", 1e6]], 3, True, [], "", False)),
        *itertools.product(("hidden_size", "head_dim", "rms_norm_eps", "rope_theta", "tie_word_embeddings"), (None,)),
        *itertools.product(("model_type", "num_key_value_heads", "hidden_act", "rope_parameters"), (None,)),
        *itertools.product(("pad_token_id",), ("0", 37, -38, True, [0], 0.0)),
        *itertools.product(("layer_types",), ("full_attention", {"full_attention": 3}, [[]], [{}], 3, False, 0, "")),
        *itertools.product(("model_type", "hidden_act", "attention_dropout"), ([], {}, True)),
        *itertools.product(("rope_scaling",), ([], "llama3", True, 8.0)),
        *itertools.product(("eos_token_id",), ("5", [[5]], [None], ["5"], True, [True], -1, [5, -1], 5.0, {}, 2**31)),
    ],
)
def test_a_value_of_a_wrong_kind_is_refused_by_name(field: str, value: Any, tmp_path: Path) -> None:
    assert f"/config.json: {field} " in refusal(tmp_path, OLD | {field: value})


@pytest.mark.parametrize("theta", ["1e6", True, [1e6], 0, -1.0, float("nan"), None])
def test_a_value_of_a_wrong_kind_inside_an_object_is_refused_by_name(theta: Any, tmp_path: Path) -> None:
    said = refusal(tmp_path, OLD | {"rope_parameters": {"rope_type": "default", "rope_theta": theta}})
    assert f"/config.json: rope_parameters: rope_theta {theta!r} is not a positive number" in said


def test_the_refusal_of_a_kind_says_which_it_must_be(tmp_path: Path) -> None:
    assert "hidden_size '896' is not a positive 32-bit integer" in refusal(tmp_path, OLD | {"hidden_size": "896"})
    assert "tie_word_embeddings 'false' is not true or false" in refusal(
        tmp_path, OLD | {"tie_word_embeddings": "false"}
    )
    assert "eos_token_id [[5]] is not a token id or a list" in refusal(tmp_path, OLD | {"eos_token_id": [[5]]})


def test_whole_numbers_do_where_any_number_does(tmp_path: Path) -> None:
    theta = read_model_spec(write(tmp_path, OLD | {"rope_theta": 10000})).rope_theta
    assert theta == 1e4
    assert isinstance(theta, float)


def test_a_tied_output_is_taken_from_the_config(tmp_path: Path) -> None:
    assert read_model_spec(write(tmp_path, OLD | {"tie_word_embeddings": True})).shape.tied is True


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"hidden_size": 64}, "hidden_size 64 is not a multiple of num_attention_heads 10"),
        ({"hidden_size": 8}, "hidden_size 8 is not a multiple of num_attention_heads 10"),
        ({"hidden_size": 8, "head_dim": 0}, "head_dim 0 "),
        ({"hidden_size": 50}, "head_dim 5 is odd"),
        ({"head_dim": 7}, "head_dim 7 is odd"),
        ({"num_key_value_heads": 20}, "num_attention_heads 10 is not a multiple of num_key_value_heads"),
    ],
)
def test_heads_that_do_not_fit_are_refused(fields: dict[str, Any], said: str, tmp_path: Path) -> None:
    assert said in refusal(tmp_path, OLD | fields)


def test_a_refusal_is_one_short_line_whatever_the_config_says(tmp_path: Path) -> None:
    nested: list[Any] = []
    for _ in range(800):
        nested = [nested]
    assert len(refusal(tmp_path, OLD | {"hidden_size": nested})) < 300
    assert len(refusal(tmp_path, OLD | {"hidden_size": "8\n" * 1000})) < 300
    assert "some\\nfield" in refusal(tmp_path, OLD | {"some\nfield": 3})


@pytest.mark.parametrize(
    "field",
    ["model_type", "hidden_size", "num_attention_heads", "num_hidden_layers", "intermediate_size", "vocab_size"],
)
def test_what_is_missing_is_named(field: str, tmp_path: Path) -> None:
    assert f"{field} is missing" in refusal(tmp_path, {key: value for key, value in OLD.items() if key != field})


@pytest.mark.parametrize(
    ("config_eos", "generation", "expected"),
    [
        (5, None, {5}),
        ([5, 7], None, {5, 7}),
        (5, {"eos_token_id": 7}, {5, 7}),
        (5, {"eos_token_id": [7, 8]}, {5, 7, 8}),
        ([5], {"eos_token_id": None}, {5}),
        (None, {"eos_token_id": [7, 8]}, {7, 8}),
        (0, {}, {0}),
        (None, None, set()),
    ],
)
def test_ends_of_sequence_come_from_both_files(
    config_eos: Any, generation: dict[str, Any] | None, expected: set[int], tmp_path: Path
) -> None:
    assert read_model_spec(write(tmp_path, OLD | {"eos_token_id": config_eos}, generation)).eos_token_ids == expected


@pytest.mark.parametrize("eos", ["5", [[5]], True, [False], -1, [5, "7"], 5.5, {"id": 5}])
def test_an_end_of_sequence_of_a_wrong_kind_is_refused_in_both_files(eos: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        read_model_spec(write(tmp_path, OLD, {"eos_token_id": eos}))
    assert (
        str(caught.value)
        == f"{tmp_path}/generation_config.json: eos_token_id {eos!r} is not a token id or a list of them"
    )
    with pytest.raises(UserError, match=r"/config\.json: eos_token_id .* is not a token id"):
        read_model_spec(write(tmp_path, OLD | {"eos_token_id": eos}, {"eos_token_id": 5}))


def test_a_file_of_any_name_is_read_as_it_stands(tmp_path: Path) -> None:
    write(tmp_path, OLD, generation={"eos_token_id": 7})
    (tmp_path / "config.json").rename(tmp_path / "of_7b.txt")
    spec = read_model_spec(tmp_path / "of_7b.txt")
    assert spec.shape == replace(SHAPE, hidden=60)
    assert spec.eos_token_ids == {151645}
    (tmp_path / "of_7b.txt").write_text("{")
    with pytest.raises(UserError, match=rf"^{tmp_path}/of_7b.txt: "):
        read_model_spec(tmp_path / "of_7b.txt")


@pytest.mark.parametrize("name", ["nowhere", "n" * 300])
def test_a_model_path_that_is_no_directory_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf"^model\.path: .*/{name} is not a directory"):
        read_model_spec(tmp_path / name)


def test_a_directory_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"config\.json: no such file"):
        read_model_spec(tmp_path)


BROKEN = [
    "",
    "{",
    "[]",
    "[1]",
    "3",
    "null",
    '"qwen2"',
    "[" * 100000,
    '{"a":' * 100000,
    f'{{"hidden_size": {"1" * 5000}}}',
]


@pytest.mark.parametrize("content", [*BROKEN, b"\xff", b"\x00"])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_file_that_is_no_json_object_is_refused(name: str, content: str | bytes, tmp_path: Path) -> None:
    write(tmp_path, OLD)
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError) as caught:
        read_model_spec(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path}/{name}: ")
    assert "\n" not in str(caught.value)


def test_a_directory_in_the_place_of_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").mkdir()
    with pytest.raises(UserError, match=r"config\.json: "):
        read_model_spec(tmp_path)
