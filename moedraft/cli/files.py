"""Reads files of examples and prompts: JSON lines in UTF-8. Every error names the file and the line."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moedraft.core import InvalidRequest

STDIN = Path("-")
MOST = 2**28  # bytes that a file may hold
PROMPT_KEYS = {"prompt", "domain", "max_tokens"}
# keys that are allowed but not used
ABOUT_KEYS = {"id", "lang", "license", "origin", "reference", "source", "true_domain"}


@dataclass(frozen=True)
class PromptRow:
    """One prompt to answer. `where` names its file and line in errors; it is "" for a single argument."""

    prompt: str
    domain: str | None = None
    max_tokens: int | None = None
    where: str = ""

    def complaint(self, sentence: object) -> InvalidRequest:
        return InvalidRequest(f"{self.where}: {sentence}" if self.where else str(sentence))


def read_examples(path: Path) -> list[str]:
    """The prompts of a file with rows {"prompt": …}; other keys are ignored.

    Raises InvalidRequest or OSError.
    """
    examples = []
    for where, row in _objects(path):
        _check_string(row.get("prompt"), where, "prompt")
        examples.append(row["prompt"])
    return examples


def read_pairs(path: Path, *, with_answers: bool) -> list[tuple[str, str | None]]:
    """Prompt and, where wanted, its "reference" (else None) of each row. Raises InvalidRequest or OSError."""
    pairs: list[tuple[str, str | None]] = []
    for where, row in _objects(path):
        answered = with_answers and "reference" in row
        for key in ("prompt", "reference") if answered else ("prompt",):
            _check_string(row.get(key), where, key)
        pairs.append((row["prompt"], row["reference"] if answered else None))
    if not pairs:
        raise InvalidRequest(f"{_title(path)} holds no prompts.")
    if with_answers and all(reference is None for _, reference in pairs):
        raise InvalidRequest(f"{_title(path)}: no row has a 'reference'.")
    return pairs


def read_prompts(path: Path) -> list[PromptRow]:
    """The rows of a file with rows {"prompt", "domain"?, "max_tokens"?}; `-` is standard input.

    Keys that only describe a row's origin (ABOUT_KEYS) are allowed too; any other key is an error. Raises
    InvalidRequest for the first bad row, or OSError.
    """
    rows = []
    for where, row in _objects(path):
        unknown = sorted(row.keys() - PROMPT_KEYS - ABOUT_KEYS)
        if unknown:
            raise InvalidRequest(
                f"{where}: unknown key {unknown[0]!r}; a row may have prompt, domain and max_tokens."
            )
        _check_string(row.get("prompt"), where, "prompt")
        if row.get("domain") is not None:
            _check_string(row["domain"], where, "domain")
        count = row.get("max_tokens")
        if count is not None and (not isinstance(count, int) or isinstance(count, bool) or count < 1):
            raise InvalidRequest(f"{where}: max_tokens must be an integer >= 1, not {json.dumps(count)}.")
        rows.append(PromptRow(row["prompt"], row.get("domain"), count, where))
    if not rows:
        raise InvalidRequest(f"{_title(path)} holds no prompts.")
    return rows


def check_prompt(text: str, name: str = "the prompt") -> str:
    """`text` itself. Raises InvalidRequest if it is blank or not valid Unicode."""
    if not text.strip():
        raise InvalidRequest(f"{name} is empty.")
    return check_text(text, name)


def check_writable(path: Path) -> None:
    """Raise OSError where no file can be written at this path, whose content stays as it is."""
    new = not path.exists()
    path.open("ab").close()
    if new:
        path.unlink()


def check_text(text: str, name: str) -> str:
    """`text` itself. Raises InvalidRequest if it holds half a surrogate pair or bytes that were not UTF-8."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"{name} is not valid UTF-8 text.") from error
    return text


def _check_string(value: Any, where: str, key: str) -> None:
    if not isinstance(value, str):
        what = "is missing" if value is None else f"must be a string, not {json.dumps(value)[:40]}"
        raise InvalidRequest(f"{where}: {key!r} {what}.")
    check_prompt(value, f"{where}: {key!r}")


def _title(path: Path) -> str:
    return "standard input" if path == STDIN else str(path)


def _read(path: Path) -> bytes:
    """A whole file, or standard input; one without an end, such as `/dev/zero`, is refused at MOST bytes."""
    if path == STDIN and (sys.stdin is None or sys.stdin.closed):
        raise InvalidRequest("standard input is closed; give a file, or pipe the rows in.")
    if path == STDIN:
        content = sys.stdin.buffer.read(MOST + 1)
    else:
        with path.open("rb") as file:
            content = file.read(MOST + 1)
    if len(content) > MOST:
        raise InvalidRequest(f"{_title(path)} holds more than {MOST // 2**20} MB.")
    return content


def _objects(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """For each line that is not blank: its file and line number as text, and its object."""
    for number, line in enumerate(_read(path).removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1):
        where = f"{_title(path)}, line {number}"
        if not line.strip():
            continue
        try:
            row = json.loads(line.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise InvalidRequest(f"{where}: not UTF-8 ({error.reason} at byte {error.start}).") from error
        except (ValueError, RecursionError) as error:
            reason = getattr(error, "msg", "too deeply nested, or a number is too long")
            raise InvalidRequest(f"{where}: not valid JSON ({reason}).") from error
        if not isinstance(row, dict):
            raise InvalidRequest(f'{where}: expected an object such as {{"prompt": "…"}}.')
        yield where, row
