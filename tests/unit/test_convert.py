"""Conversion both ways, bit by bit; whatever is wrong is one line, and nothing is left of it."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from checkpoints_tools.command import convert
from checkpoints_tools.hf_to_megatron import hf_to_megatron
from checkpoints_tools.inspect import describe
from checkpoints_tools.megatron_to_hf import megatron_to_hf
from checkpoints_tools.verify import differences, logits_gap
from megatron_rl.errors import UserError
from megatron_rl.resharding.hf_files import HfReader, plan_of, write_hf
from megatron_rl.resharding.megatron_files import MegatronReader
from megatron_rl.resharding.names import Shape, hf_shapes
from megatron_rl.training.hf_config import read_model_spec
from tests.tiny import LLAMA, QWEN3, SHAPE, TIED, write_model

INDEX = "model.safetensors.index.json"
SHAPES = {"untied": SHAPE, "tied": TIED, "qwen3": QWEN3, "llama": LLAMA, "llama_tied": replace(LLAMA, tied=True)}


def in_files(source: Path, target: Path, shape: Shape, max_bytes: int) -> Path:
    """The same directory, its weights in files of a size."""
    with HfReader(source, shape) as reader:
        tensors = ((name, reader.read(name, (slice(None),))) for name in hf_shapes(shape))
        write_hf(target, source, tensors, plan_of(shape, torch.float32), max_bytes=max_bytes)
    return target


@pytest.fixture
def source(tmp_path: Path) -> Path:
    write_model(tmp_path / "hf", SHAPE, eos_token_id=[5, 7])
    (tmp_path / "hf/LICENSE").write_text("as you like")
    (tmp_path / "hf/chat_template.jinja").write_text("{{ messages }}")
    return tmp_path / "hf"


@pytest.mark.parametrize("files", [5 * 10**9, 9_000])
@pytest.mark.parametrize("kind", SHAPES)
def test_there_and_back_is_the_same_bit_by_bit(kind: str, files: int, tmp_path: Path) -> None:
    shape = SHAPES[kind]
    write_model(tmp_path / "one", shape)
    source = in_files(tmp_path / "one", tmp_path / "hf", shape, files)
    hf_to_megatron(source, tmp_path / "megatron")
    megatron_to_hf(tmp_path / "megatron", tmp_path / "back", max_bytes=files)
    assert {file.name: file.read_bytes() for file in source.iterdir()} == {
        file.name: file.read_bytes() for file in (tmp_path / "back").iterdir()
    }
    assert (len(list(source.glob("*.safetensors"))) > 3) == (files < 10_000)
    for other in ("one", "megatron", "back"):
        assert list(differences(source, tmp_path / other)) == []
    assert logits_gap(source, tmp_path / "megatron") == 0.0
    original, loaded = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("one", "back"))
    ids = torch.arange(3, 15)[None]
    assert torch.equal(original(ids).logits, loaded(ids).logits)


def test_what_lies_beside_the_weights_comes_along_and_all_ids_that_end_stay(source: Path, tmp_path: Path) -> None:
    hf_to_megatron(source, tmp_path / "megatron")
    megatron_to_hf(tmp_path / "megatron", tmp_path / "back")
    for name in ("LICENSE", "chat_template.jinja", "generation_config.json", "config.json", "tokenizer.json"):
        assert (tmp_path / "back" / name).read_bytes() == (source / name).read_bytes()
    assert read_model_spec(tmp_path / "back").eos_token_ids == {
        5,
        7,
        2,
    }  # of config.json, and of generation_config.json


def test_another_dtype_only_when_asked_for(source: Path, tmp_path: Path) -> None:
    hf_to_megatron(source, tmp_path / "bf16", torch.bfloat16)
    megatron_to_hf(tmp_path / "bf16", tmp_path / "back")
    original, found = load_file(source / "model.safetensors"), load_file(tmp_path / "back/model.safetensors")
    assert all(torch.equal(found[name], tensor.bfloat16()) for name, tensor in original.items())
    assert json.loads((tmp_path / "back/config.json").read_text())["dtype"] == "bfloat16"
    megatron_to_hf(tmp_path / "bf16", tmp_path / "fp32", torch.float32)
    wide = load_file(tmp_path / "fp32/model.safetensors")
    assert all(torch.equal(wide[name], tensor.float()) for name, tensor in found.items())


def test_inspect_says_what_is_there(source: Path, tmp_path: Path) -> None:
    hf_to_megatron(source, tmp_path / "megatron")
    for directory, kind in ((source, "Hugging Face directory"), (tmp_path / "megatron", "Megatron checkpoint")):
        text = "\n".join(describe(directory))
        assert kind in text
        parameters = sum(tensor.numel() for tensor in load_file(source / "model.safetensors").values())
        assert f"{parameters:,} parameters in {len(hf_shapes(SHAPE))} tensors" in text
        assert "token ids 2, 5, 7" in text


def test_verify_names_what_differs(source: Path, tmp_path: Path) -> None:
    hf_to_megatron(source, tmp_path / "megatron")
    tensors = load_file(source / "model.safetensors")
    tensors["model.norm.weight"][3] += 1e-6
    tensors["lm_head.weight"][0, :2] += 1
    save_file(tensors, source / "model.safetensors")
    assert list(differences(source, tmp_path / "megatron")) == [
        "model.norm.weight: 1 of 40 elements differ",
        "lm_head.weight: 2 of 1480 elements differ",
    ]
    said = CliRunner().invoke(convert, ["verify", str(source), str(tmp_path / "megatron")])
    assert said.exit_code == 1


# ---- bad input


def spoil_index(directory: Path, name: str, file: str) -> None:
    index = json.loads((directory / INDEX).read_text())
    index["weight_map"][name] = file
    (directory / INDEX).write_text(json.dumps(index))


def truncate(directory: Path) -> str:
    file = sorted(directory.glob("*.safetensors"))[1]
    os.truncate(file, file.stat().st_size - 10)
    return file.name


def lose_a_file(directory: Path) -> str:
    file = sorted(directory.glob("*.safetensors"))[1]
    file.unlink()
    return file.name


def add_a_ghost(directory: Path) -> str:
    spoil_index(directory, "model.layers.0.ghost.weight", sorted(directory.glob("*.safetensors"))[0].name)
    return "tensor model.layers.0.ghost.weight is said to be in model-00001"


def change(directory: Path, act: Callable[[dict[str, torch.Tensor]], str]) -> str:
    file = sorted(directory.glob("*.safetensors"))[1]
    tensors = load_file(file)
    said = act(tensors)
    save_file(tensors, file)
    (directory / INDEX).write_text(
        json.dumps({"weight_map": {n: f.name for f in directory.glob("*.safetensors") for n in load_file(f)}})
    )
    return said


def drop(tensors: dict[str, torch.Tensor]) -> str:
    name = min(tensors)
    del tensors[name]
    return f"tensor {name} is missing"


def add(tensors: dict[str, torch.Tensor]) -> str:
    tensors["model.extra"] = torch.zeros(2)
    return "tensor model.extra is none of a model of this config.json"


def halve(tensors: dict[str, torch.Tensor]) -> str:
    name = min(tensors)
    tensors[name] = tensors[name].half()
    return f"{name} is torch.float16; choose one with --dtype"


def to_bytes(tensors: dict[str, torch.Tensor]) -> str:
    name = min(tensors)
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    return f"tensor {name} is torch.float8_e4m3fn"


def unknown_architecture(directory: Path) -> str:
    fields = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**fields, "model_type": "mamba"}))
    return "model_type 'mamba' is not supported"


BAD: dict[str, Callable[[Path], str]] = {
    "a truncated file": truncate,
    "a missing file": lose_a_file,
    "a ghost in the index": add_a_ghost,
    "a missing tensor": lambda directory: change(directory, drop),
    "a tensor too many": lambda directory: change(directory, add),
    "two dtypes": lambda directory: change(directory, halve),
    "eight bits": lambda directory: change(directory, to_bytes),
    "an unknown architecture": unknown_architecture,
}


@pytest.mark.parametrize("what", BAD)
def test_bad_input_is_one_line_that_names_it_and_nothing_is_left(what: str, source: Path, tmp_path: Path) -> None:
    directory = in_files(source, tmp_path / "files", SHAPE, 20_000)
    said = BAD[what](directory)
    with pytest.raises(UserError) as caught:
        hf_to_megatron(directory, tmp_path / "out")
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.glob("*out*"))


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "config.json"])
def test_a_damaged_megatron_directory_is_named(name: str, source: Path, tmp_path: Path) -> None:
    hf_to_megatron(source, tmp_path / "megatron")
    os.truncate(tmp_path / "megatron" / name, 100)
    with pytest.raises(UserError, match=name.replace(".", r"\.")):
        megatron_to_hf(tmp_path / "megatron", tmp_path / "out")
    (tmp_path / "megatron" / name).unlink()
    with pytest.raises(UserError, match=name.replace(".", r"\.")):
        megatron_to_hf(tmp_path / "megatron", tmp_path / "out")
    assert not list(tmp_path.glob("*out*"))


def test_a_megatron_directory_of_another_model_is_named(source: Path, tmp_path: Path) -> None:
    hf_to_megatron(source, tmp_path / "megatron")
    with pytest.raises(UserError, match=r"tensor decoder.layers.mlp.linear_fc1.weight has shape .*\(3, 48, 40\)"):
        MegatronReader(tmp_path / "megatron", replace(SHAPE, intermediate=26))


def test_a_directory_that_is_there_is_not_touched(source: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/mine.txt").touch()
    with pytest.raises(UserError, match="is there already"):
        hf_to_megatron(source, tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine.txt"]


def test_read_only_sources_are_no_hindrance(source: Path, tmp_path: Path) -> None:
    for file in source.iterdir():
        file.chmod(0o444)
    hf_to_megatron(source, tmp_path / "megatron", torch.bfloat16)
    assert all(os.stat(file).st_mode & 0o200 for file in (tmp_path / "megatron").iterdir())


def test_a_place_that_cannot_be_written_is_named(source: Path) -> None:
    with pytest.raises(UserError, match=r"^/proc/out could not be written: /proc/\.out\.converting"):
        hf_to_megatron(source, Path("/proc/out"))


LIMITED = """import resource, runpy, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000))
import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
runpy.run_module(sys.argv.pop(1), run_name="__main__")"""


@pytest.mark.parametrize("way", ["hf_to_megatron", "megatron_to_hf"])
def test_a_full_disk_is_one_line_and_leaves_nothing(way: str, source: Path, tmp_path: Path) -> None:
    if way == "megatron_to_hf":
        hf_to_megatron(source, tmp_path / "megatron")
        source = tmp_path / "megatron"
    command = [sys.executable, "-c", LIMITED, f"checkpoints_tools.{way}", str(source), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2, done.stderr
    assert [line for line in done.stderr.splitlines() if "error" in line] == [
        f"error: {tmp_path}/out could not be written: File too large"
    ]
    assert not list(tmp_path.glob("*out*"))


SLOW = """import sys, time
from checkpoints_tools import hf_to_megatron
read = hf_to_megatron._Ahead._read
def slowly(self, chunk):
    time.sleep(0.2)
    return read(self, chunk)
hf_to_megatron._Ahead._read = slowly
from checkpoints_tools.command import run_alone
run_alone("hf-to-megatron")"""


def test_a_killed_conversion_leaves_no_target_and_another_one_works(source: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", SLOW, str(source), str(tmp_path / "out")]
    process = subprocess.Popen(command)
    deadline = time.monotonic() + 60
    while not list((tmp_path / ".out.converting").glob("*.distcp")):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    with pytest.raises(UserError, match="another process is writing it"):
        hf_to_megatron(source, tmp_path / "out")
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert (tmp_path / ".out.converting").exists()
    assert not (tmp_path / "out").exists()
    hf_to_megatron(source, tmp_path / "out")
    assert list(differences(source, tmp_path / "out")) == []
    assert not (tmp_path / ".out.converting").exists()


def test_the_commands_are_there_under_both_names(source: Path, tmp_path: Path) -> None:
    commands = (
        ["checkpoints_tools.hf_to_megatron", str(source), str(tmp_path / "a")],
        ["checkpoints_tools.megatron_to_hf", str(tmp_path / "a"), str(tmp_path / "b")],
        ["megatron_rl", "convert", "verify", str(source), str(tmp_path / "b")],
        ["megatron_rl", "convert", "inspect", str(tmp_path / "a")],
        ["megatron_rl", "convert", "hf-to-megatron", str(source), str(tmp_path / "c"), "--dtype", "bfloat16"],
    )
    for command in commands:
        done = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
    again = subprocess.run([sys.executable, "-m", *commands[0]], capture_output=True, text=True, timeout=120)
    assert (again.returncode, again.stderr) == (
        2,
        f"error: {tmp_path}/a: is there already; remove it or choose another name\n",
    )
    shutil.rmtree(tmp_path / "c")
