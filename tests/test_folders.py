"""Folders that are replaced as a whole: never neither the old nor the new one, and nothing else deleted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from moedraft.core import InvalidRequest
from moedraft.folders import check_replaceable, replace_folder

FILES = ("a", "b")


def fill(text: str, names: tuple[str, ...] = FILES) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        for name in names:
            (folder / name).write_text(text)

    return write


def content(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir()}


def test_a_folder_is_made_and_replaced(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    replace_folder(folder, FILES, fill("one"))
    assert content(folder) == {"a": "one", "b": "one"}
    replace_folder(folder, FILES, fill("two", ("a",)))
    assert content(folder) == {"a": "two"}
    assert [path.name for path in folder.parent.iterdir()] == ["folder"]


def test_the_old_one_is_aside_until_the_new_one_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "folder"
    replace_folder(folder, FILES, fill("one"))
    rename = Path.rename
    seen = []

    def watched(path: Path, to: Path) -> Path:
        if path.name == "new":
            seen.append([content(old) for old in tmp_path.glob(".folder-*/old")])
        return rename(path, to)

    monkeypatch.setattr(Path, "rename", watched)
    replace_folder(folder, FILES, fill("two"))
    assert seen == [[{"a": "one", "b": "one"}]]

    def failing(path: Path, to: Path) -> Path:
        if path.name == "new":
            raise OSError("no")
        return rename(path, to)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(OSError, match="no"):
        replace_folder(folder, FILES, fill("three"))
    assert content(folder) == {"a": "two", "b": "two"}
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_what_fails_in_writing_leaves_all_as_it_was(tmp_path: Path) -> None:
    def write(folder: Path) -> None:
        (folder / "a").write_text("half")
        raise ValueError("full")

    replace_folder(tmp_path / "folder", FILES, fill("one"))
    with pytest.raises(ValueError, match="full"):
        replace_folder(tmp_path / "folder", FILES, write)
    assert content(tmp_path / "folder") == {"a": "one", "b": "one"}
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_what_came_into_the_folder_meanwhile_is_kept(tmp_path: Path) -> None:
    replace_folder(tmp_path / "folder", FILES, fill("one"))

    def write(folder: Path) -> None:
        fill("two")(folder)
        (tmp_path / "folder" / "letter").write_text("mine")

    with pytest.raises(InvalidRequest, match="holds other things, letter for one"):
        replace_folder(tmp_path / "folder", FILES, write)
    assert content(tmp_path / "folder") == {"a": "one", "b": "one", "letter": "mine"}
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_what_is_not_ours_is_refused(tmp_path: Path) -> None:
    (tmp_path / "folder" / "a").mkdir(parents=True)
    with pytest.raises(InvalidRequest, match="holds other things, a for one"):
        check_replaceable(tmp_path / "folder", FILES)
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidRequest, match="file is a file"):
        check_replaceable(tmp_path / "file", FILES)
    with pytest.raises(InvalidRequest, match="file is no folder"):
        check_replaceable(tmp_path / "file" / "folder", FILES)
    check_replaceable(tmp_path / "new" / "folder", FILES)
    (tmp_path / "empty").mkdir()
    check_replaceable(tmp_path / "empty", FILES)
