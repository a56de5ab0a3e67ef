"""The command line: a mistake is one line and exit code 2, before anything is started or written."""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from megatron_rl import cli, local_launch
from megatron_rl.config_docs import describe_options
from megatron_rl.config_files import load_config
from megatron_rl.demo.task import build_tokenizer
from megatron_rl.training import setup
from tests.tiny import SHAPE, hf_config, write_model

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def mistake(self) -> str:
        """The one line of a mistake of the user."""
        assert self.code == 2, self
        assert self.err.startswith("error: ")
        assert self.err.count("\n") == 1
        assert self.out == ""
        return self.err.strip()


Command = Callable[..., Ended]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Command:
    """`megatron-rl ARGUMENTS` in this process, run from an empty folder; it must not come to start anything."""

    def started(*args: object, **kwargs: object) -> None:
        raise AssertionError("something was started")

    monkeypatch.setattr(setup, "start", started)
    monkeypatch.setattr(local_launch, "launch_local", started)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for variable in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(variable, raising=False)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")

    def run(*arguments: object) -> Ended:
        monkeypatch.setattr(sys, "argv", ["megatron-rl", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as caught:
            cli.main()
        captured = capsys.readouterr()
        return Ended(int(caught.value.code or 0), captured.out, captured.err)

    return run


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """A recipe whose model (without weights) and data are there: tests break one thing each."""
    hf_config().save_pretrained(tmp_path / "model")
    build_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "train.jsonl").write_text('{"prompt": "12=", "answer": "3"}\n{"prompt": "4567=", "answer": "2"}\n')
    path = tmp_path / "recipe.yaml"
    path.write_text(
        f"run_dir: {tmp_path}/run\nsteps: 2\n"
        f"model: {{path: {tmp_path}/model}}\ndata: {{train: {tmp_path}/train.jsonl}}\n"
        "algorithm: {preset: grpo}\nrollout: {prompts_per_step: 2, responses_per_prompt: 4, max_response_tokens: 5}\n"
        "trainer: {dtype: float32}\n"
    )
    return path


def test_show_prints_the_resolved_config_which_loads_back(command: Command, recipe: Path, tmp_path: Path) -> None:
    ended = command(
        "train", recipe, "trainer.lr=0.25", "--show", "algorithm.preset=dapo", "algorithm.soft_overlong=null"
    )
    assert (ended.code, ended.err) == (0, "")
    assert ended.out.startswith("# dapo: Yu et al. (2025), eq. 8, 11 and 13")
    (tmp_path / "shown.yaml").write_text(ended.out)
    overrides = ["trainer.lr=0.25", "algorithm.preset=dapo", "algorithm.soft_overlong=null"]
    assert load_config(tmp_path / "shown.yaml") == load_config(recipe, overrides)
    assert not (tmp_path / "run").exists()


def test_help_of_train_names_the_arguments_and_the_options_of_a_recipe(command: Command) -> None:
    ended = command("train", "--help")
    assert ended.code == 0
    words = " ".join(ended.out.replace("│", " ").split())
    for text in ("--show", "--processes", "rollout.temperature", "Divides the logits, in engine and trainer alike."):
        assert text in words, text


def test_docs_are_the_table_of_options(command: Command) -> None:
    assert command("docs").out == describe_options()


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("rolout.temperature=1", "unknown option rolout; did you mean rollout?"),
        ("trainer.lr=fast", "trainer.lr"),
        ("rollout.responses_per_prompt=1", "a group of one has no advantage"),
        ("just_words", "write key.sub=value"),
        ("model.path=nowhere", "model.path: nowhere is not a directory"),
        ("trainer.tensor_parallel_size=3", "3 does not divide num_attention_heads (10)"),
        ("trainer.tensor_parallel_size=5", "5 does not divide num_key_value_heads (2)"),
        ("trainer.pipeline_parallel_size=2", "2 does not divide num_hidden_layers (3)"),
        ("trainer.tensor_parallel_size=2", "TP 2 × PP 1 does not divide the number of processes (1)"),
        ("data.train=nowhere.jsonl", "nowhere.jsonl: No such file or directory"),
        ("data.eval=nowhere.jsonl", "nowhere.jsonl: No such file or directory"),
        ("rewards.grader=after_markr", "rewards.grader: 'after_markr' is neither a known name nor"),
        ("rewards.grader=no_such_module:f", "rewards.grader: no_such_module:f: No module named"),
        (
            "algorithm.loss=ppo_clop",
            "algorithm.loss: 'ppo_clop' is not one of ppo_clip, gspo, cispo, reinforce, or package.module:function",
        ),
        ("rewards.grader=.mine:f", "rewards.grader: .mine:f: "),
        ("algorithm.advantage=no_such_module:f", "algorithm.advantage: no_such_module:f: No module named"),
        ("algorithm.normalisation=math:floor", "algorithm.normalisation: math:floor: TypeError"),
        ("algorithm.soft_overlong.floor=0", "algorithm.soft_overlong.floor: "),
        ("algorithm.correction.floor=0.5", "algorithm.correction.floor is for mode=mask"),
        ("algorithm.group_filter=math:fsum", "algorithm.group_filter: math:fsum returned 1.0, not True or False"),
        ("run_dir=/dev/null", "run_dir: /dev/null is not a directory"),
        ("seed=4294967296", "seed: "),
        ("algorithm.loss_kwargs.clip_low=null", "algorithm.loss_kwargs.clip_low: "),
        ("algorithm.loss=no_such_module:f", "algorithm.loss: no_such_module:f: No module named"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    override: str, said: str, command: Command, recipe: Path, tmp_path: Path
) -> None:
    assert said in command("train", recipe, override).mistake
    assert not (tmp_path / "run").exists()


def test_a_missing_recipe_is_named(command: Command) -> None:
    assert command("train", "nowhere.yaml").mistake == "error: nowhere.yaml: no such recipe"


def test_a_malformed_line_of_the_data_is_named_by_file_and_number(
    command: Command, recipe: Path, tmp_path: Path
) -> None:
    with (tmp_path / "train.jsonl").open("a") as file:
        file.write('{"prompt": "1=", "answer": \n')
    assert f"{tmp_path}/train.jsonl:3: not JSON" in command("train", recipe).mistake


def test_an_empty_data_set_is_refused(command: Command, recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text("")
    assert "no prompts: the file is empty" in command("train", recipe).mistake


def test_a_prompt_over_the_limit_is_refused_where_that_is_asked(command: Command, recipe: Path, tmp_path: Path) -> None:
    overrides = ("data.max_prompt_tokens=5", "data.overlong_prompts=refuse")
    assert (
        f"{tmp_path}/train.jsonl:2: prompt over data.max_prompt_tokens (5)"
        in command("train", recipe, *overrides).mistake
    )


def test_missing_weights_are_refused(command: Command, recipe: Path, tmp_path: Path) -> None:
    mistake = command("train", recipe).mistake
    assert f"{tmp_path}/model: neither model.safetensors nor model.safetensors.index.json is there" in mistake


def test_a_model_directory_without_a_tokenizer_is_refused(command: Command, recipe: Path, tmp_path: Path) -> None:
    for file in (tmp_path / "model").glob("tokenizer*"):
        file.unlink()
    assert f"{tmp_path}/model: no usable tokenizer" in command("train", recipe).mistake


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("trainer.tensor_parallel_size=2", "TP 2 × PP 1 does not divide the number of processes (3)"),
        ("rollout.temprature=1", "did you mean rollout.temperature?"),
        ("model.path=nowhere", "nowhere is not a directory"),
    ],
)
def test_local_processes_are_not_started_for_a_mistake(
    override: str, said: str, command: Command, recipe: Path
) -> None:
    assert said in command("train", recipe, override, "--processes", 3).mistake


def test_of_the_ranks_of_a_node_only_the_first_speaks(
    command: Command, recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "9")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert command("train", recipe, "model.path=nowhere") == Ended(2, "", "")
    monkeypatch.setenv("LOCAL_RANK", "0")  # of the second node, which may lack what the first one has
    assert "nowhere is not a directory" in command("train", recipe, "model.path=nowhere").mistake


def test_a_prompt_and_a_budget_that_are_more_than_the_positions_of_the_model_are_refused(
    command: Command, recipe: Path, tmp_path: Path
) -> None:
    write_model(tmp_path / "model")  # 64 positions; the longer prompt has 6 tokens
    with pytest.raises(AssertionError, match="something was started"):
        command("train", recipe, "rollout.max_response_tokens=58")
    mistake = command("train", recipe, "rollout.max_response_tokens=59").mistake
    assert "rollout.max_response_tokens: 59 after a prompt of 6 tokens is more than the 64 positions" in mistake
    assert "max_position_embeddings" in mistake
    (tmp_path / "eval.jsonl").write_text('{"prompt": "45678=", "answer": "0"}\n')
    overrides = ("rollout.max_response_tokens=58", f"data.eval={tmp_path}/eval.jsonl")
    assert "after a prompt of 7 tokens" in command("train", recipe, *overrides).mistake
    assert not (tmp_path / "run").exists()


def test_a_tokenizer_of_another_model_is_noticed_by_its_ids(command: Command, recipe: Path, tmp_path: Path) -> None:
    write_model(tmp_path / "model", replace(SHAPE, vocab=8))
    mistake = command("train", recipe).mistake
    assert f"{tmp_path}/train.jsonl:1: token id 13 is beyond the model's vocab_size (8)" in mistake


@pytest.mark.parametrize(
    "arguments", [(), ("train",), ("trane",), ("train", "r.yaml", "--nowhere"), ("demo", "--seed=-1")]
)
def test_a_wrong_use_of_the_commands_is_exit_code_2(arguments: tuple[str, ...], command: Command) -> None:
    ended = command(*arguments)
    assert ended.code == 2
    assert "Traceback" not in ended.err + ended.out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--layout", "tp3"), "--layout: 'tp3' is not one of tp2, pp2, cp2, dp2"),
        ((), "no such recipe; run the demo from"),
    ],
)
def test_the_demo_names_its_mistakes(arguments: tuple[str, ...], said: str, command: Command) -> None:
    assert said in command("demo", *arguments).mistake


def test_a_real_process_says_one_line_and_nothing_else(recipe: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "megatron_rl", "train", recipe, "data.train=nowhere.jsonl"],
        cwd=recipe.parent,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert Ended(ended.returncode, ended.stdout, ended.stderr).mistake.endswith(
        "nowhere.jsonl: No such file or directory"
    )
