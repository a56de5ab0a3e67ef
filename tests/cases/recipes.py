"""The smallest recipe."""

from pathlib import Path

REQUIRED = "run_dir: runs/a\nsteps: 3\nmodel: {path: some/model}\ndata: {train: some.jsonl}\n"


def recipe(directory: Path, text: str = "", name: str = "recipe.yaml") -> Path:
    """A recipe with all that is required and `text`."""
    path = directory / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(REQUIRED + text)
    return path
