#!/usr/bin/env python3
"""Print the size and the structure of the code in figures, so that two states of it can be compared.

    python scripts/house.py                          # a text to read
    python scripts/house.py --json                   # the same figures for programs
    python scripts/house.py --root OTHER --out FILE  # another checkout; the JSON is written to FILE

A room is a folder of Python files, named by its path inside its package and cut after two levels
(`serve/dashboard`). Files directly in `moedraft/` form the room `moedraft`. Empty files do not count.
"""

from __future__ import annotations

import argparse
import ast
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

LONG = 40  # a function with more lines than this is listed
DEPTH = 2  # how many folder levels a room's name has
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class File:
    """One source file that is not empty."""

    path: str  # relative to the root
    module: str  # the name that it is imported by
    room: str
    is_package: bool  # whether it is an __init__.py
    source: str

    @property
    def lines(self) -> int:
        return len(self.source.splitlines())


@dataclass
class Room:
    """What one folder holds; test folders have the same figures."""

    files: int = 0
    lines: int = 0
    longest: int = 0  # lines of the longest file
    longest_file: str = ""
    functions: int = 0
    function_lines: int = 0
    long_functions: list[str] = field(default_factory=list)  # "file:name lines", more than LONG lines


def room_of(folder: Path, default: str) -> str:
    """The room of a file in `folder`, a path relative to its package."""
    return "/".join(folder.parts[:DEPTH]) or default


def read(root: Path, folder: str, package: str) -> list[File]:
    """All Python files below root/folder, which is imported as `package`."""
    found = []
    for path in sorted((root / folder).rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        if not source.strip():
            continue
        inside = path.relative_to(root / folder)
        is_package = inside.name == "__init__.py"
        parts = inside.parent.parts if is_package else inside.with_suffix("").parts
        found.append(
            File(
                path=str(path.relative_to(root)),
                module=".".join([package, *parts]),
                room=room_of(inside.parent, folder),
                is_package=is_package,
                source=source,
            )
        )
    return found


def functions(file: File) -> Iterator[tuple[str, int]]:
    """Name and number of lines, decorators not counted, of every function and method."""
    for node in ast.walk(ast.parse(file.source)):
        if isinstance(node, Function):
            yield node.name, (node.end_lineno or node.lineno) - node.lineno + 1


def summed(files: list[File]) -> dict[str, Room]:
    """The figures of every room, by its name."""
    rooms: dict[str, Room] = {}
    for file in files:
        room = rooms.setdefault(file.room, Room())
        room.files += 1
        room.lines += file.lines
        if file.lines > room.longest:
            room.longest, room.longest_file = file.lines, file.path
        for name, lines in functions(file):
            room.functions += 1
            room.function_lines += lines
            if lines > LONG:
                room.long_functions.append(f"{file.path}:{name} {lines}")
    return dict(sorted(rooms.items()))


def imported(file: File) -> Iterator[str]:
    """The absolute names that a file imports; for `from a import b` this is `a.b`."""
    for node in ast.walk(ast.parse(file.source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = file.module.split(".")
                package = parts[: len(parts) - node.level + file.is_package]
                base = ".".join([*package, *([node.module] if node.module else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


def between_rooms(files: list[File]) -> dict[str, dict[str, int]]:
    """How many pairs of files import from one room into another: importing room → imported room → pairs."""
    known = {file.module: file for file in files}
    pairs = set()
    for file in files:
        for name in imported(file):
            target = known.get(name) or known.get(name.rpartition(".")[0])
            if target is not None and target.room != file.room:
                pairs.add((file.module, target.module))
    counts = Counter((known[a].room, known[b].room) for a, b in pairs)
    matrix: dict[str, dict[str, int]] = {}
    for (source, target_room), count in sorted(counts.items()):
        matrix.setdefault(source, {})[target_room] = count
    return matrix


def totals(rooms: dict[str, Room]) -> dict[str, float]:
    """All rooms together; the mean is in lines."""
    count = sum(room.functions for room in rooms.values())
    return {
        "files": sum(room.files for room in rooms.values()),
        "lines": sum(room.lines for room in rooms.values()),
        "functions": count,
        "mean_function": round(sum(room.function_lines for room in rooms.values()) / max(count, 1), 1),
        "long_functions": sum(len(room.long_functions) for room in rooms.values()),
        "longest_file": max((room.longest for room in rooms.values()), default=0),
    }


def house(root: Path) -> dict[str, Any]:
    """Every figure, ready to be written as JSON."""
    code = read(root, "moedraft", "moedraft") + read(root, "kernels", "moedraft.kernels")
    rooms, tests = summed(code), summed(read(root, "tests", "tests"))
    scripts = summed(read(root, "scripts", "scripts"))
    return {
        "code": {"totals": totals(rooms), "rooms": {name: asdict(room) for name, room in rooms.items()}},
        "scripts": {"totals": totals(scripts)},
        "tests": {"totals": totals(tests), "rooms": {name: asdict(room) for name, room in tests.items()}},
        "imports": between_rooms(code),
    }


def room_table(part: dict[str, Any]) -> list[str]:
    """One line a room, and one for all of them."""
    lines = [f"{'room':<22}{'files':>6}{'lines':>8}{'longest':>9}{'functions':>11}{f'over {LONG}':>9}"]
    for name, room in part["rooms"].items():
        lines.append(
            f"{name:<22}{room['files']:>6}{room['lines']:>8}{room['longest']:>9}"
            f"{room['functions']:>11}{len(room['long_functions']):>9}"
        )
    every = part["totals"]
    lines.append(
        f"{'all':<22}{every['files']:>6}{every['lines']:>8}{every['longest_file']:>9}"
        f"{every['functions']:>11}{every['long_functions']:>9}   mean function {every['mean_function']} lines"
    )
    return lines


def matrix_table(matrix: dict[str, dict[str, int]]) -> list[str]:
    """A row imports from a column; columns are numbered as the rows are."""
    names = sorted(set(matrix) | {name for row in matrix.values() for name in row})
    lines = [f"{'':<26}" + "".join(f"{number:>4}" for number in range(1, len(names) + 1))]
    for number, name in enumerate(names, 1):
        row = matrix.get(name, {})
        cells = "".join(f"{row.get(other, '') if other != name else '-':>4}" for other in names)
        lines.append(f"{number:>2}  {name:<22}{cells}")
    return [*lines, f"{sum(sum(row.values()) for row in matrix.values())} pairs of files in all"]


def text(found: dict[str, Any]) -> str:
    """All figures as plain tables."""
    rooms = [room for part in ("code", "tests") for room in found[part]["rooms"].values()]
    long = [name for room in rooms for name in room["long_functions"]]
    parts = [
        ["Code (moedraft/ and kernels/)", *room_table(found["code"])],
        ["Tests", *room_table(found["tests"])],
        ["Files of the row's room that import from the column's room", *matrix_table(found["imports"])],
        [f"Functions over {LONG} lines", *(long or ["none"])],
    ]
    return "\n\n".join("\n".join(part) for part in parts)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parents[1])
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.add_argument("--out", type=Path, help="write the JSON to this file as well")
    options = parser.parse_args()
    found = house(options.root)
    as_json = json.dumps(found, indent=2)
    if options.out is not None:
        options.out.write_text(as_json + "\n", encoding="utf-8")
    print(as_json if options.json else text(found))


if __name__ == "__main__":
    main()
