"""Hugging Face directories: slices bit by bit, files of bounded size, an exact index, and one line for any damage."""

import json
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen2ForCausalLM

from megatron_rl.errors import UserError
from megatron_rl.resharding import hf_files
from megatron_rl.resharding.hf_files import HfReader
from megatron_rl.resharding.names import hf_shapes
from tests.tiny import SHAPE, TIED

Model = tuple[Path, Qwen2ForCausalLM]
INDEX = "model.safetensors.index.json"


def tensors_of(model: Qwen2ForCausalLM) -> dict[str, Tensor]:
    return {name: parameter.data for name, parameter in model.named_parameters()}


def write_hf(target: Path, source: Path, tensors: Iterable[tuple[str, Tensor]], max_bytes: int = 5 * 10**9) -> None:
    """Of tensors that are all there at once."""
    held = [(name, tensor.clone()) for name, tensor in tensors]
    planned = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in held}
    hf_files.write_hf(target, source, iter(held), planned, max_bytes=max_bytes)


@pytest.fixture
def sharded(tmp_path: Path, untied_model: Model) -> Path:
    """The untied model in files of at most 20,000 bytes."""
    source, model = untied_model
    write_hf(tmp_path / "sharded", source, tensors_of(model).items(), max_bytes=20_000)
    return tmp_path / "sharded"


def tensors_on_disk(directory: Path) -> dict[str, tuple[str, Tensor]]:
    found: dict[str, tuple[str, Tensor]] = {}
    for file in directory.glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (not a mapping)
                assert name not in found
                found[name] = file.name, opened.get_tensor(name)
    return found


def refusal(directory: Path) -> str:
    with pytest.raises(UserError) as caught:
        HfReader(directory, SHAPE)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ---- writing


def test_files_are_bounded_and_the_index_is_exact(sharded: Path) -> None:
    files = sorted(file.name for file in sharded.glob("*.safetensors"))
    assert len(files) > 3
    assert files == [f"model-{number:05d}-of-{len(files):05d}.safetensors" for number in range(1, len(files) + 1)]
    found = tensors_on_disk(sharded)
    index = json.loads((sharded / INDEX).read_text())
    assert index["weight_map"] == {name: file for name, (file, _) in found.items()}
    assert set(index["weight_map"]) == set(hf_shapes(SHAPE))
    assert index["metadata"]["total_size"] == sum(tensor.numel() * 4 for _, tensor in found.values())
    for file in files:
        size = sum(tensor.numel() * 4 for home, tensor in found.values() if home == file)
        assert size <= 20_000


def test_a_tensor_larger_than_a_file_has_one_of_its_own(tmp_path: Path, untied_model: Model) -> None:
    source, model = untied_model
    write_hf(tmp_path / "out", source, tensors_of(model).items(), max_bytes=1)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == len(hf_shapes(SHAPE))


def test_what_is_written_is_what_transformers_loads(sharded: Path, untied_model: Model) -> None:
    expected = tensors_of(untied_model[1])
    loaded = AutoModelForCausalLM.from_pretrained(sharded)
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, expected.pop(name)), name
    assert not expected


def test_a_small_model_is_one_file_without_an_index(tmp_path: Path, tied_model: Model) -> None:
    source, model = tied_model
    write_hf(tmp_path / "out", source, tensors_of(model).items())
    assert [file.name for file in (tmp_path / "out").glob("*safetensors*")] == ["model.safetensors"]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    for name, tensor in tensors_of(model).items():
        assert torch.equal(loaded.state_dict()[name], tensor)
    assert loaded.lm_head.weight.data_ptr() == loaded.model.embed_tokens.weight.data_ptr()


def test_everything_beside_the_weights_is_carried_over(sharded: Path, untied_model: Model) -> None:
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (sharded / name).read_bytes() == (untied_model[0] / name).read_bytes()
    assert not (sharded / "model.safetensors").exists()


def test_an_older_directory_is_replaced_as_a_whole(sharded: Path, untied_model: Model) -> None:
    source, model = untied_model
    (sharded / "stale.txt").touch()
    write_hf(sharded, source, ((name, tensor + 1) for name, tensor in tensors_of(model).items()))
    assert not (sharded / "stale.txt").exists()
    assert not (sharded / INDEX).exists()
    expected = model.model.norm.weight + 1
    assert torch.equal(tensors_on_disk(sharded)["model.norm.weight"][1], expected)


def test_tensors_that_their_owner_goes_on_to_change_are_written_as_they_came(
    tmp_path: Path, untied_model: Model
) -> None:
    buffer = torch.empty(40)

    def reused() -> Iterator[tuple[str, Tensor]]:
        for number in range(3):
            buffer.fill_(number)
            yield f"t{number}", buffer

    write_hf(tmp_path / "out", untied_model[0], reused())
    assert {name: tensor[0].item() for name, (_, tensor) in tensors_on_disk(tmp_path / "out").items()} == {
        "t0": 0.0,
        "t1": 1.0,
        "t2": 2.0,
    }


def failing(model: Qwen2ForCausalLM) -> Iterator[tuple[str, Tensor]]:
    yield from list(tensors_of(model).items())[:7]
    raise ConnectionError("a rank went away")


def test_a_write_that_fails_leaves_nothing_under_the_final_name(tmp_path: Path, untied_model: Model) -> None:
    source, model = untied_model
    with pytest.raises(ConnectionError):
        write_hf(tmp_path / "out", source, failing(model), max_bytes=5_000)
    assert not (tmp_path / "out").exists()
    write_hf(tmp_path / "out", source, tensors_of(model).items())  # and is no hindrance to the next one
    assert sorted(file.name for file in tmp_path.iterdir()) == ["out"]
    assert set(tensors_on_disk(tmp_path / "out")) == set(hf_shapes(SHAPE))


def test_a_write_that_fails_leaves_the_older_directory_alone(sharded: Path, untied_model: Model) -> None:
    source, model = untied_model
    before = {file.name: file.read_bytes() for file in sharded.iterdir()}
    with pytest.raises(ConnectionError):
        write_hf(sharded, source, failing(model), max_bytes=5_000)
    assert {file.name: file.read_bytes() for file in sharded.iterdir()} == before


# ---- reading


def test_slices_are_read_bit_for_bit(sharded: Path, untied_model: Model) -> None:
    with HfReader(sharded, SHAPE) as reader:
        for name, tensor in tensors_of(untied_model[1]).items():
            rows = slice(1, len(tensor) - 1)
            index = (rows,) if tensor.dim() == 1 else (rows, slice(2, tensor.shape[1] - 3))
            assert torch.equal(reader.read(name, index), tensor[index]), name
            assert torch.equal(reader.read(name, (slice(None),)), tensor), name


def test_a_single_file_is_read_too(untied_model: Model) -> None:
    directory, model = untied_model
    with HfReader(directory, SHAPE) as reader:
        assert torch.equal(reader.read("lm_head.weight", (slice(30, 37),)), model.lm_head.weight[30:])


def test_a_tied_model_needs_no_output_projection(tied_model: Model) -> None:
    with HfReader(tied_model[0], TIED):
        pass
    assert refusal(tied_model[0]).endswith("tensor lm_head.weight is missing")


def test_a_missing_tensor_is_named(tmp_path: Path, untied_model: Model) -> None:
    source, model = untied_model
    without = {
        name: tensor for name, tensor in tensors_of(model).items() if name != "model.layers.1.mlp.up_proj.weight"
    }
    write_hf(tmp_path / "out", source, without.items())
    assert refusal(tmp_path / "out") == f"{tmp_path}/out: tensor model.layers.1.mlp.up_proj.weight is missing"


def test_a_tensor_of_another_shape_is_named_with_both_shapes(tmp_path: Path, untied_model: Model) -> None:
    source, model = untied_model
    tensors = tensors_of(model)
    tensors["model.layers.2.self_attn.o_proj.weight"] = torch.zeros(60, 40)  # transposed
    write_hf(tmp_path / "out", source, tensors.items())
    message = refusal(tmp_path / "out")
    assert "model.layers.2.self_attn.o_proj.weight has shape (60, 40)" in message
    assert "(40, 60)" in message


def test_a_file_of_the_index_that_is_not_there_is_named(sharded: Path) -> None:
    gone = sorted(sharded.glob("*.safetensors"))[2]
    gone.unlink()
    assert gone.name in refusal(sharded)


@pytest.mark.parametrize("keep", [0, 5, 700, -1])
def test_a_damaged_file_is_named(keep: int, sharded: Path) -> None:
    file = sorted(sharded.glob("*.safetensors"))[1]
    file.write_bytes(file.read_bytes()[:keep])
    assert file.name in refusal(sharded)


@pytest.mark.parametrize("content", ["", "{", "{}", "[]", "3", '{"weight_map": []}', '{"weight_map": {"a": 3}}'])
def test_a_broken_index_is_named(content: str, sharded: Path) -> None:
    (sharded / INDEX).write_text(content)
    assert INDEX in refusal(sharded)


def test_an_index_that_is_not_text_is_named(sharded: Path) -> None:
    (sharded / INDEX).write_bytes(b"\xff\xfe")
    assert INDEX in refusal(sharded)


def test_a_directory_without_weights_is_refused(tmp_path: Path, untied_model: Model) -> None:
    shutil.copy(untied_model[0] / "config.json", tmp_path)
    assert refusal(tmp_path) == f"{tmp_path}: neither model.safetensors nor {INDEX} is there"
