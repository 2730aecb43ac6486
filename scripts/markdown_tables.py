"""Tables in the documents' format."""

from __future__ import annotations


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def without_empty(header: list[str], rows: list[list[str]]) -> tuple[list[str], list[list[str]]]:
    """The same table without the columns in which no row has a value."""
    kept = [i for i in range(len(header)) if any(row[i] for row in rows)]
    return [header[i] for i in kept], [[row[i] for i in kept] for row in rows]
