"""Builds HTML in which all text is escaped, and writes figures so that people can read them.

Only `Markup` counts as HTML. Everything else is text and is escaped, because names of domains come from
users.
"""

from __future__ import annotations

import html
import math
import time
from collections.abc import Iterable
from datetime import UTC, datetime

from moedraft.insight.change import Change
from moedraft.insight.tables.table import Cell, Column, Table

NONE = "–"
VOID = ("br", "hr", "img", "input", "meta", "link")
MANY_ROWS = 200  # the pages show at most so many rows of a table; the CSV file has all of them


class Markup(str):
    """HTML that `tag` has built and that needs no escaping."""

    __slots__ = ()


def tag(name: str, *children: str, **attributes: object) -> Markup:
    """An element: <name attribute="…">children</name>.

    `data_value` becomes data-value and `class_` becomes class; attributes that are None are left out.
    """
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    inside = join(children)
    return Markup(f"<{name}{written}>" if name in VOID else f"<{name}{written}>{inside}</{name}>")


def join(children: Iterable[str]) -> Markup:
    return Markup("".join(one if isinstance(one, Markup) else html.escape(one) for one in children))


# -- figures -------------------------------------------------------------------------------------


def share(value: float | None, digits: int = 0) -> str:
    return NONE if value is None else f"{100 * value:.{digits}f}\u202f%"


def points(value: float | None) -> str:
    """The difference of two shares in percentage points."""
    return NONE if value is None else f"{100 * value:+.1f}".replace("-", "−")


def gained(value: float | None, digits: int = 2) -> str:
    """A gain or a loss with its sign."""
    return NONE if value is None else f"{value:+.{digits}f}".replace("-", "−")


def changed(change: Change | None, *, shares: bool = False) -> str:
    """A difference and half the width of its 95 % interval; of shares in percentage points."""
    if change is None:
        return NONE
    if shares:
        return f"{points(change.difference)} ± {100 * change.half_width:.1f}"
    return f"{change.difference:+.2f} ± {change.half_width:.2f}".replace("-", "−")


def tone_of(change: Change | None) -> str:
    """The class of a change: green or red only where it is more than chance."""
    if change is None:
        return ""
    return {1: "up", -1: "down", 0: "same"}[change.direction]


def count(value: float | None) -> str:
    return NONE if value is None else f"{value:,.0f}".replace(",", "\u202f")


def short(value: float | None) -> str:
    """A count in few characters: 950, 12.3k, 4.1M."""
    if value is None:
        return NONE
    for limit, sign in ((1e6, "M"), (1e4, "k")):
        if value >= limit:
            scaled = value / (1e6 if sign == "M" else 1e3)
            return f"{scaled:.0f}{sign}" if scaled >= 100 else f"{scaled:.1f}{sign}"
    return count(value)


def number(value: float | None, digits: int = 2) -> str:
    return NONE if value is None else f"{value:.{digits}f}".replace("-", "−")


def rate(value: float | None) -> str:
    """A speed with about three significant digits."""
    return NONE if value is None else count(value) if value >= 100 else number(value, 1)


def duration(value: float | None) -> str:
    if value is None or not math.isfinite(value):
        return NONE
    if value < 1:
        return f"{1000 * value:.0f}\u202fms"
    if value < 60:
        return f"{value:.1f}\u202fs"
    minutes, seconds = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    parts = [(days, "d"), (hours, "h"), (minutes, "min"), (seconds, "s")]
    first = next(place for place, (amount, _) in enumerate(parts) if amount)
    return " ".join(f"{amount}\u202f{unit}" for amount, unit in parts[first : first + 2] if amount)


def ago(at: float | None, now: float | None = None) -> str:
    if at is None:
        return NONE
    passed = int(max(0.0, (time.time() if now is None else now) - at))
    if passed < 5:
        return "just now"
    return f"{passed}\u202fs ago" if passed < 60 else f"{duration(passed)} ago"


def moment(at: float) -> Markup:
    """A time in UTC; a script in the page converts it to the reader's time zone."""
    stamp = datetime.fromtimestamp(at, UTC)
    return tag("time", stamp.strftime("%Y-%m-%d %H:%M:%S UTC"), datetime=stamp.isoformat())


def shown(cell: Cell, column: Column) -> str:
    if cell is None or isinstance(cell, str):
        return NONE if cell is None else cell
    match column.kind:
        case "time":
            return moment(float(cell))
        case "share":
            return share(cell, 1)
        case "gain":
            return points(cell)
        case "count":
            return count(cell)
        case "seconds":
            return duration(cell)
        case _:
            return number(cell)


# -- pieces --------------------------------------------------------------------------------------


def figure(
    key: str,
    label: str,
    value: float | int | str | None,
    text: str,
    note: str = "",
    about: str | None = None,
) -> Markup:
    """A figure in large type. `value` is the exact number, for programs that read the page.

    about: what it is, shown where the pointer rests on the label.
    """
    return tag(
        "div",
        tag("dt", label, title=about),
        tag("dd", text, data_figure=key, data_value=NONE if value is None else repr(value)),
        tag("p", note) if note else Markup(),
        class_="figure",
    )


def figures(*items: Markup) -> Markup:
    return tag("dl", *items, class_="figures")


def pill(text: str, tone: str) -> Markup:
    """A coloured label. tone: good, busy, bad or quiet. The text always says the same as the colour."""
    return tag("span", text, class_=f"pill {tone}")


def numbers(table: Table) -> Markup:
    """The table in HTML, with the newest rows first if it has a time column."""
    rows = table.rows[::-1] if table.columns[0].kind == "time" else table.rows
    head = tag(
        "tr", *(tag("th", column.label, scope="col", class_=_align(column)) for column in table.columns)
    )
    body = [
        tag("tr", *(_cell(*pair) for pair in zip(row, table.columns, strict=True)))
        for row in rows[:MANY_ROWS]
    ]
    more = len(rows) - MANY_ROWS
    rest = tag("p", f"{count(more)} more rows are in the CSV.", class_="hint") if more > 0 else Markup()
    whole = tag("table", tag("thead", head), tag("tbody", *body), data_table=table.key)
    return join([tag("div", whole, class_="scroll"), rest])


def _cell(cell: Cell, column: Column) -> Markup:
    value = cell if cell is None or isinstance(cell, str) else repr(cell)
    return tag("td", shown(cell, column), class_=_align(column), data_key=column.key, data_value=value)


def _align(column: Column) -> str:
    return "text" if column.kind == "text" else "num"


def legend(entries: Iterable[tuple[str, str, str]]) -> Markup:
    """A legend from the (name, colour, last figure) of every line."""
    items = [
        tag("li", tag("i", style=f"background:{colour}"), tag("span", name), tag("b", text))
        for name, colour, text in entries
    ]
    return tag("ul", *items, class_="legend")


def notice(title: str, text: str, tone: str = "quiet", *more: Markup) -> Markup:
    return tag("div", tag("strong", title), tag("p", text), *more, class_=f"notice {tone}", role="status")
