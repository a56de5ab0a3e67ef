"""Files that are whole or not there."""

import os
from pathlib import Path

import pytest

from megatron_rl.files import replace_text


def test_a_file_is_written_and_replaced_and_nothing_else_is_left(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    for text in ("a longer text\n", "short\n", ""):
        replace_text(path, text)
        assert path.read_text() == text
        assert list(tmp_path.iterdir()) == [path]


def test_a_crash_before_the_new_file_is_whole_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rows.jsonl"
    replace_text(path, "old\n")

    def crash(*paths: Path) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "replace", crash)
    with pytest.raises(OSError, match="no space"):
        replace_text(path, "new\n")
    assert path.read_text() == "old\n"
    monkeypatch.undo()
    replace_text(path, "new\n")
    assert list(tmp_path.iterdir()) == [path]
    assert path.read_text() == "new\n"
