"""Draws the dashboard's most important charts into one picture file."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moedraft.core import SHARED, InvalidRequest

if TYPE_CHECKING:
    from moedraft.insight.observe import Observer
    from moedraft.insight.tables.spans import TimeSpan
    from moedraft.insight.tables.table import Column, Table
    from moedraft.insight.views import Overview

SUFFIXES = (".png", ".svg", ".pdf")
HUES = ("#2f6fd0", "#d9772b", "#3c9a5f", "#b04a9c", "#c2a21b", "#7a62c9", "#2aa3b5", "#c44f57")
MOST_LINES = 6  # of experts in one chart
GREY, INK, ACCENT = "#9aa1a9", "#1d2023", "#0f766e"


def check_file(path: Path) -> None:
    """Raises InvalidRequest if the file's name has no suffix of a supported picture format."""
    if path.suffix.lower() not in SUFFIXES:
        raise InvalidRequest(f"the picture must be a {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]} file.")


def draw(observer: Observer, span: TimeSpan, path: Path) -> None:
    """Draw tokens per target step by expert, tokens per second, traffic by domain and the gain of updates.

    Raises InvalidRequest, without writing a file, if nothing was served in `span`. Raises OSError if the file
    cannot be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    check_file(path)
    overview = observer.overview(span)
    if not overview.requests:
        raise InvalidRequest(f"nothing was served in {span.words}, so there is nothing to plot.")
    paints = _paints([expert.name for expert in overview.experts])
    with pyplot.rc_context({"font.size": 9, "axes.titlesize": 10.5, "axes.titleweight": "bold"}):
        figure, axes = pyplot.subplots(2, 2, figsize=(12, 7.2), layout="constrained")
        figure.suptitle(f"moedraft, {span.words}: {overview.requests:,} requests, {overview.tokens:,} tokens")
        per_step = "Tokens per target step (1 is plain decoding)"
        _lines(axes[0][0], overview.by_expert, _busiest(overview), paints, per_step, close=True)
        speed = overview.throughput.columns[3:]
        _lines(axes[0][1], overview.throughput, speed, {"tokens/s": ACCENT}, "Tokens per second")
        shares = observer.router(span).shares
        _stack(axes[1][0], shares, paints, "Routed traffic by domain")
        _gains(axes[1][1], observer.learning(span).updates, paints, "What each update gained, in points")
        try:
            with warnings.catch_warnings():  # of requests within an instant it says that it finds no dates
                warnings.filterwarnings("ignore", "AutoDateLocator", UserWarning)
                figure.savefig(path, dpi=150)
        finally:
            pyplot.close(figure)


def _paints(names: Sequence[str]) -> dict[str, str]:
    others = [name for name in names if name != SHARED]
    return {name: HUES[place % len(HUES)] for place, name in enumerate(others)} | {SHARED: GREY}


def _busiest(overview: Overview) -> list[Column]:
    """The column of all requests, and those of the experts with the most; more lines cannot be told apart."""
    every, *others = overview.by_expert.columns[1:]
    most = sorted(overview.experts, key=lambda expert: -expert.requests)[:MOST_LINES]
    names = {expert.name for expert in most}
    return [every, *(column for column in others if column.label in names)]


def _lines(
    axes: Any,
    table: Table,
    columns: Sequence[Column],
    paints: dict[str, str],
    title: str,
    *,
    close: bool = False,
) -> None:
    """Draw lines over time. close: the axis covers the values only, and need not begin at 0."""
    for column in columns:
        points = [
            (at, v)
            for at, v in zip(table.column("at"), table.column(column.key), strict=True)
            if v is not None
        ]
        moments = [datetime.fromtimestamp(float(at or 0)) for at, _ in points]
        values = [value for _, value in points]
        axes.plot(
            moments, values, color=paints.get(column.label, INK), linewidth=1.6, label=_plain(column.label)
        )
    if columns[0].kind == "share":
        axes.yaxis.set_major_formatter(lambda v, _: f"{100 * v:.0f} %")
    elif not close:
        axes.set_ylim(bottom=0)
    _finish(axes, table, title, legend=len(columns) > 1)


def _stack(axes: Any, table: Table, paints: dict[str, str], title: str) -> None:
    moments = [datetime.fromtimestamp(float(at or 0)) for at in table.column("at")]
    columns = table.columns[2:]
    shares = [[v or 0 for v in table.column(column.key)] for column in columns]
    colours = [paints.get(column.label, GREY) for column in columns]
    axes.stackplot(
        moments, shares, labels=[_plain(c.label) for c in columns], colors=colours, step="post", linewidth=0
    )
    axes.yaxis.set_major_formatter(lambda v, _: f"{100 * v:.0f} %")
    axes.set_ylim(0, 1)
    _finish(axes, table, title, legend=True)


def _gains(axes: Any, table: Table, paints: dict[str, str], title: str) -> None:
    rows = zip(table.column("at"), table.column("expert"), table.column("gain"), strict=True)
    measured = [
        (datetime.fromtimestamp(float(at or 0)), str(name), v) for at, name, v in rows if v is not None
    ]
    for name in dict.fromkeys(name for _, name, _ in measured):
        own = [(at, 100 * float(gain)) for at, one, gain in measured if one == name]
        axes.plot(
            *zip(*own, strict=True),
            "o-",
            color=paints.get(name, GREY),
            markersize=4,
            linewidth=0.8,
            label=_plain(name),
        )
    axes.axhline(0, color=GREY, linewidth=0.8)
    if not measured:
        axes.text(0.5, 0.5, "no update", transform=axes.transAxes, ha="center", color=GREY)
    _finish(axes, table, title, legend=bool(measured))


def _finish(axes: Any, table: Table, title: str, *, legend: bool) -> None:
    from matplotlib import dates

    axes.set_title(title, loc="left")
    axes.set_xlim(datetime.fromtimestamp(table.since), datetime.fromtimestamp(table.until))
    axes.grid(axis="y", color="#e4e4de", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    locator = dates.AutoDateLocator(maxticks=7)
    axes.xaxis.set_major_locator(locator)
    axes.xaxis.set_major_formatter(dates.ConciseDateFormatter(locator))
    if legend:
        axes.legend(frameon=False, fontsize=8, ncols=6, loc="upper center", bbox_to_anchor=(0.5, -0.13))


def _plain(name: str) -> str:
    """A label that matplotlib shows as it is, not as a formula, and not hidden for a leading underscore."""
    return name.replace("$", r"\$").lstrip("_") or "?"
