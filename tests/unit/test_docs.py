"""The pages for users: examples run, recipes load, links lead somewhere, and every metric is explained."""

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from megatron_rl.config_files import load_config

ROOT = Path(__file__).parents[2]
PAGES = sorted(path for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")) if path.exists())
FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>\w*)[^\n]*\n(?P<text>.*?)^(?P=indent)``` *$", re.MULTILINE | re.DOTALL
)

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    text: str
    line: int
    """Line of the page on which the text begins, counted from 0."""

    @property
    def file_name(self) -> str | None:
        """The name in a first line such as `# my_rewards.py`."""
        named = re.match(r"# ([\w.]+\.(?:py|yaml))\b", self.text)
        return named[1] if named else None


def blocks(page: Path, language: str) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(textwrap.dedent(found["text"]), text.count("\n", 0, found.start("text")))
        for found in FENCE.finditer(text)
        if found["language"] == language
    ]


def run_python(page: Path) -> None:
    """Execute the Python blocks of a page, one after another, in one namespace and in the current directory."""
    namespace = {"__name__": f"page_{page.stem}"}
    for block in blocks(page, "python"):
        exec(compile("\n" * block.line + block.text, page, "exec"), namespace)  # so that errors name the page's lines


@each_page
def test_python_examples_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_python(page)


@each_page
def test_recipes_load(page: Path, tmp_path: Path) -> None:
    for recipe in (ROOT / "launch/recipes").glob("*.yaml"):
        shutil.copy(recipe, tmp_path)
    for number, block in enumerate(blocks(page, "yaml")):
        if "model" in yaml.safe_load(block.text):
            written = tmp_path / (block.file_name or f"block_{number}.yaml")
            written.write_text(block.text, encoding="utf-8")
            assert load_config(written).model.path


@each_page
def test_links_lead_somewhere(page: Path) -> None:
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        linked = page.parent / path if path else page
        assert linked.exists(), f"{page.name} links to {target}"
        if anchor:
            assert anchor in anchors(linked), f"{page.name} links to {target}"


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@each_page
def test_files_that_are_named_exist(page: Path) -> None:
    for name in re.findall(r"`([\w./]+/[\w.]+\.(?:py|md|yaml|toml))\b", page.read_text(encoding="utf-8")):
        assert any((place / name).exists() for place in (ROOT, ROOT / "megatron_rl")), f"{page.name} names {name}"


def test_every_metric_is_explained() -> None:
    explained = (ROOT / "docs/running.md").read_text(encoding="utf-8")
    names = metric_names()
    assert len(names) > 20
    for name in sorted(names):
        assert f"`{name}" in explained, f"docs/running.md does not explain {name}"


def metric_names() -> set[str]:
    """Metrics that the program's source writes: `"group/name"`, or `f"{prefix}/name"` of sampled groups."""
    sources = [file.read_text(encoding="utf-8") for file in (ROOT / "megatron_rl").rglob("*.py")]
    whole = r'"((?:rollout|batch|policy|mismatch|parity|loss|train|seconds)/[a-z_]+|eval/accuracy)"'
    names = {name for source in sources for name in re.findall(whole, source)}
    return names | {f"rollout/{name}" for source in sources for name in re.findall(r'f"\{prefix\}/([a-z_]+)', source)}


def test_the_example_of_ones_own_everything_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = ROOT / "docs/your_own.md"
    monkeypatch.chdir(tmp_path)
    run_python(page)  # makes the model and the data
    for block in blocks(page, "python") + blocks(page, "yaml"):
        if block.file_name:
            (tmp_path / block.file_name).write_text(block.text, encoding="utf-8")
    command = [sys.executable, "-m", "megatron_rl", "train", "my_recipe.yaml"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
    assert ended.returncode == 0, ended.stderr[-3000:]
    rows = [json.loads(line) for line in (tmp_path / "runs/mine/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2, 2]
    assert all("loss/clip_fraction" in row for row in rows[1:3])
    assert (tmp_path / "runs/mine/hf/model.safetensors").exists()


@pytest.mark.parametrize("grader", ["number_of_words", "words", "patient", "shortest"])
def test_the_example_graders_run_in_processes(grader: str, tmp_path: Path) -> None:
    page = ROOT / "docs/graders.md"
    written = [block.text for block in blocks(page, "python") if block.file_name == "my_graders.py"]
    (tmp_path / "my_graders.py").write_text("\n".join(written), encoding="utf-8")
    (script,) = blocks(page, "py")
    assert script.file_name == "try_it.py"
    (tmp_path / "try_it.py").write_text(script.text.replace("my_graders:words", f"my_graders:{grader}"))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "try_it.py"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert re.findall(r"Grade\(score=([\d.]+)", ended.stdout) == ["1.0", "0.0"], ended.stdout
