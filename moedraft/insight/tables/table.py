"""A table of figures: the source of a chart, of the numbers shown below it, and of its CSV file."""

from __future__ import annotations

import csv
import io
import math
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

Cell = str | int | float | None
Row = tuple[Cell, ...]
Kind = Literal["time", "text", "count", "share", "gain", "number", "seconds"]
FORMULA = ("=", "+", "-", "@", "\t", "\r")  # a spreadsheet takes text that begins so for a formula


@dataclass(frozen=True)
class Column:
    """kind: "time" is epoch seconds, "share" a part of 1, "gain" a difference of shares."""

    key: str
    label: str
    kind: Kind


@dataclass(frozen=True)
class Mark:
    """Something that happened at a point in time, such as a new version."""

    at: float  # epoch seconds
    label: str


@dataclass(frozen=True)
class Table:
    """Rows under named columns. The rows cover the time from `since` until `until`."""

    key: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    marks: tuple[Mark, ...] = ()
    since: float = 0.0
    until: float = 0.0

    def __post_init__(self) -> None:
        assert all(len(row) == len(self.columns) for row in self.rows)

    def column(self, key: str) -> list[Cell]:
        place = [column.key for column in self.columns].index(key)
        return [row[place] for row in self.rows]

    def to_csv(self) -> str:
        """The table as CSV (RFC 4180) with the keys as header, times in ISO 8601 (UTC), and gaps empty."""
        text = io.StringIO()
        writer = csv.writer(text)
        writer.writerow([_plain(column.key) for column in self.columns])
        for row in self.rows:
            writer.writerow([_written(cell, column) for cell, column in zip(row, self.columns, strict=True)])
        return text.getvalue()


def _written(cell: Cell, column: Column) -> str:
    if cell is None or (isinstance(cell, float) and not math.isfinite(cell)):
        return ""
    if column.kind == "time":
        return datetime.fromtimestamp(float(cell), UTC).isoformat(timespec="milliseconds")
    return _plain(cell) if isinstance(cell, str) else repr(cell)


def _plain(text: str) -> str:
    """The text, with an apostrophe in front if a spreadsheet would take it for a formula."""
    return f"'{text}" if text.startswith(FORMULA) else text
