#!/usr/bin/env python3
"""Write docs/dependencies.md: what moedraft stands on, in the versions installed here, with licences.

    python scripts/licences.py

Reads what packages say of themselves. Fetches nothing, and knows of no holes; `scripts/audit` asks for them.
"""

from __future__ import annotations

from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PAGE = Path(__file__).resolve().parents[1] / "docs" / "dependencies.md"
EXTRAS = ("serve", "triton")
HEAD = (
    "# Dependencies\n\n"
    "What moedraft needs to run (`moedraft[serve,triton]`), directly and through others, in the versions "
    "that its tests last ran with, and under which licences. Written by `scripts/licences.py` from what each "
    "package says of itself; the ranges that are allowed are in `pyproject.toml`.\n\n"
    "No list of known holes is kept here: it would be old on the day it is written. It has to be fetched, so "
    "this needs the network:\n\n"
    "    ./scripts/audit\n\n"
    "asks pip-audit about every package in `.venv` by name and version. Where the list cannot be fetched, "
    "pip-audit by itself leaves packages out and then says that no holes are known; the command counts what "
    "was left out, and ends with 2 where that is more than half. On the machine on which this table was "
    "written the list could not be fetched, so no version below was checked for known holes.\n\n"
    "The lowest allowed versions of NiceGUI (3.12) and Starlette (1.3.1) are those that mend the holes "
    "published up to May and August 2026: cross-site scripting and path traversal in the former, a `Range` "
    "header that costs quadratic time in the latter.\n\n"
    "| package | version | licence | needed by |\n|---|---|---|---|\n"
)


def main() -> None:
    rows = [
        f"| {name} | {found.version} | {licence(found)} | {', '.join(sorted(users))} |"
        for name, (found, users) in sorted(closure().items())
    ]
    PAGE.write_text(HEAD + "\n".join(rows) + "\n", encoding="utf-8")


def closure() -> dict[str, tuple[Distribution, set[str]]]:
    """By name: each package that is installed because of moedraft, and who asks for it."""
    found: dict[str, tuple[Distribution, set[str]]] = {}
    open_ones: list[tuple[str, tuple[str, ...]]] = [("moedraft", EXTRAS)]
    seen = set(open_ones)
    while open_ones:
        name, extras = open_ones.pop()
        for wanted in requirements(name, extras):
            other = canonicalize_name(wanted.name)
            try:
                found.setdefault(other, (distribution(other), set()))[1].add(name)
            except PackageNotFoundError:  # only elsewhere, for example on another system
                continue
            following = (other, tuple(sorted(wanted.extras)))
            if following not in seen:
                seen.add(following)
                open_ones.append(following)
    found.pop("moedraft", None)
    return found


def requirements(name: str, extras: tuple[str, ...]) -> list[Requirement]:
    wanted = [Requirement(text) for text in distribution(name).requires or ()]
    given = [{"extra": extra} for extra in ("", *extras)]
    return [one for one in wanted if one.marker is None or any(map(one.marker.evaluate, given))]


def licence(found: Distribution) -> str:
    """In as few words as the package has for it."""
    about: Any = found.metadata
    classes = [text.split(" :: ") for text in about.get_all("Classifier", [])]
    names = [one[-1] for one in classes if one[0] == "License" and one[-1] != "OSI Approved"]
    lines = (about.get("License") or "").strip().splitlines()
    plain = lines[0] if len(lines) == 1 and len(lines[0]) < 60 else ""
    return about.get("License-Expression") or plain or ", ".join(names) or "see the package"


if __name__ == "__main__":
    main()
