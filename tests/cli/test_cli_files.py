"""Example and prompt files: what is taken, and what is refused with the line it stands on."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from moedraft.cli.files import (
    STDIN,
    PromptRow,
    check_text,
    check_writable,
    read_examples,
    read_prompts,
)
from moedraft.core import InvalidRequest

GOOD = '{"prompt": "a"}\n'


def file(tmp_path: Path, content: str | bytes) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def test_examples_may_carry_more_than_the_prompt(tmp_path: Path) -> None:
    path = file(tmp_path, '\ufeff{"prompt": "größer", "license": "CC0"}\n\n  \r\n{"prompt": "b\\nc"}\r\n')
    assert read_examples(path) == ["größer", "b\nc"]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "not valid JSON"),
        ("[" * 100_000, "too deeply nested"),
        ('{"prompt": ' + "9" * 5_000 + "}", "a number is too long"),
        ('"text"', "expected an object"),
        ("{}", "'prompt' is missing"),
        ('{"prompt": 3}', "must be a string, not 3"),
        ('{"prompt": "  "}', "'prompt' is empty"),
        ('{"prompt": "\\ud800"}', "not valid UTF-8"),
        (b'{"prompt": "\xff"}', "not UTF-8"),
    ],
)
def test_bad_rows_are_refused_with_their_line(tmp_path: Path, line: str | bytes, complaint: str) -> None:
    content = GOOD.encode() + b"\n" + (line if isinstance(line, bytes) else line.encode())
    for read in (read_examples, read_prompts):
        with pytest.raises(InvalidRequest, match="line 3: ") as caught:
            read(file(tmp_path, content))
        assert complaint in str(caught.value)


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ('{"prompt": "a", "temperature": 1}', "unknown key 'temperature'"),
        ('{"prompt": "a", "domain": 4}', "'domain' must be a string"),
        ('{"prompt": "a", "max_tokens": "4"}', 'max_tokens must be an integer >= 1, not "4"'),
        ('{"prompt": "a", "max_tokens": true}', "not true"),
        ('{"prompt": "a", "max_tokens": 0}', "not 0"),
    ],
)
def test_bad_prompt_rows_are_refused(tmp_path: Path, row: str, complaint: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_prompts(file(tmp_path, GOOD + row))
    assert "line 2: " in str(caught.value)
    assert complaint in str(caught.value)


def test_prompt_rows_may_name_domain_and_length(tmp_path: Path) -> None:
    path = file(
        tmp_path, '{"prompt": "a", "domain": "sql", "max_tokens": 3}\n{"prompt": "b", "domain": null}'
    )
    where = f"{path}, line"
    assert read_prompts(path) == [
        PromptRow("a", "sql", 3, f"{where} 1"),
        PromptRow("b", None, None, f"{where} 2"),
    ]


def test_standard_input_is_named_in_complaints(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(GOOD.encode() + b"{")))
    with pytest.raises(InvalidRequest, match="standard input, line 2"):
        read_prompts(STDIN)


def test_a_file_without_an_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moedraft.cli.files.MOST", 2**20)
    with pytest.raises(InvalidRequest, match=r"/dev/zero holds more than 1 MB\."):
        read_prompts(Path("/dev/zero"))
    row = json.dumps({"prompt": "a" * (2**20 - 14)})
    assert len(row) == 2**20
    assert len(read_prompts(file(tmp_path, row))) == 1


def test_empty_and_missing_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="holds no prompts"):
        read_prompts(file(tmp_path, "\n\n"))
    with pytest.raises(FileNotFoundError):
        read_prompts(tmp_path / "none.jsonl")


def test_complaints_of_a_lone_prompt_name_no_place() -> None:
    assert str(PromptRow("a").complaint("no.")) == "no."
    assert str(PromptRow("a", where="prompt 2").complaint("no.")) == "prompt 2: no."
    assert check_text("fine", "it") == "fine"


def test_a_file_that_can_be_written_is_left_as_it_is(tmp_path: Path) -> None:
    """Whether it is there or not."""
    check_writable(tmp_path / "new")
    assert not list(tmp_path.iterdir())
    (tmp_path / "old").write_text("kept")
    check_writable(tmp_path / "old")
    assert (tmp_path / "old").read_text() == "kept"
    for path in (tmp_path, tmp_path / "nowhere" / "file"):
        with pytest.raises(OSError, match=path.name):
            check_writable(path)
