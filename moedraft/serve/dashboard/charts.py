"""Turns tables into options for ECharts.

Colours are CSS variables, so that the same chart fits the light and the dark page. Names are used only as
values, never as keys, because NiceGUI executes the value of a key that begins with a colon.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from moedraft.core import SHARED
from moedraft.insight.tables.figures import ALL
from moedraft.insight.tables.table import Cell, Column, Kind, Table

Options = dict[str, Any]

FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "Noto Sans", Arial, sans-serif'
HUES = 8  # number of colours --hue-0 … in the style sheet
SYMBOLS_UP_TO = 14  # a line with more points is drawn without dots
FORMATS: dict[Kind, str] = {
    "share": "v => v == null ? '–' : (100 * v).toFixed(1) + ' %'",
    "gain": "v => v == null ? '–' : (v > 0 ? '+' : '') + (100 * v).toFixed(1)",
    "number": "v => v == null ? '–' : v.toFixed(2)",
    "count": "v => v == null ? '–' : v.toLocaleString()",
    "seconds": "v => v == null ? '–' : v.toFixed(1) + ' s'",
}
ROUND_STEPS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20)  # between the labels of an axis
WHOLE: Options = {"min": 0, "max": 1, "interval": 0.25}
CLOCK = {  # formats for the labels of a time axis, without ECharts' bold text
    "year": "{yyyy}",
    "month": "{MMM}",
    "day": "{MMM} {d}",
    "hour": "{HH}:{mm}",
    "minute": "{HH}:{mm}",
    "second": "{HH}:{mm}:{ss}",
    "millisecond": "{HH}:{mm}:{ss}",
}
UPRIGHT: Options = {"left": 8, "right": 30, "top": 22, "bottom": 4, "containLabel": True}
LYING: Options = {"left": 108, "right": 46, "top": 8, "bottom": 26}
TICKS: dict[Kind, str] = {
    "share": "v => Math.round(100 * v) + ' %'",
    "gain": "v => (v > 0 ? '+' : '') + Math.round(1000 * v) / 10",
    "number": "v => Math.round(100 * v) / 100",
}


def colours(names: Sequence[str]) -> dict[str, str]:
    """A colour for each name, in the given order; `shared` and the sum of all have fixed ones."""
    others = [name for name in names if name not in (SHARED, ALL)]
    found = {name: f"var(--hue-{place % HUES})" for place, name in enumerate(others)}
    return {**found, SHARED: "var(--hue-shared)", ALL: "var(--ink)"}


def over_time(
    table: Table, columns: Sequence[Column], paints: dict[str, str], *, close: bool = False
) -> Options:
    """A line chart: columns of `table` over its first column, the time.

    The axis of shares covers only the range of the values, so that differences are visible; close=True does
    so for other kinds. A single line whose axis begins at 0 is drawn with a shaded area below it.
    """
    kind = columns[0].kind
    series = [_line(table, column, paints[column.label]) for column in columns]
    if len(series) == 1 and kind != "share" and not close:
        series[0]["areaStyle"] = {"color": series[0]["itemStyle"]["color"], "opacity": 0.1}
    if table.marks:
        series[0]["markLine"] = _marks(table)
    axis: Options = {"min": 0}
    if close or kind == "share":
        axis = axis_of(table, columns)
    return _options(series, _time(table), axis, kind)


def small(table: Table, column: Column, beside: Column, paint: str, axis: Options) -> Options:
    """A small line chart of `column` over time, with `beside` as a thin grey line to compare it with.

    axis: the same for all small charts that stand together, from `axis_of`.
    """
    grey = _line(table, beside, "var(--hue-shared)")
    grey |= {"showSymbol": False, "lineStyle": {"width": 1, "color": "var(--hue-shared)", "opacity": 0.8}}
    own = _line(table, column, paint)
    own["symbolSize"] = 4
    options = _options([grey, own], _time(table) | {"splitNumber": 2}, axis, column.kind)
    options["grid"] = {"left": 14, "right": 22, "top": 10, "bottom": 8, "containLabel": True}
    for name in ("xAxis", "yAxis"):
        options[name]["axisLabel"] |= {"fontSize": 11, "margin": 6}
    return options


def axis_of(table: Table, columns: Sequence[Column]) -> Options:
    """An axis that covers the values of these columns only, so that differences between them are visible."""
    values = [_number(v) for column in columns for v in table.column(column.key) if v is not None]
    return _close(values) if columns[0].kind == "share" else _round(values)


def stacked(table: Table, columns: Sequence[Column], paints: dict[str, str]) -> Options:
    """Touching bars for columns of `table` that add up to one. A step without values has no bar."""
    at = [1000 * _number(cell) for cell in table.column("at")]
    series = [
        {
            "type": "bar",
            "name": column.label,
            "stack": "all",
            "data": [list(pair) for pair in zip(at, table.column(column.key), strict=True)],
            "barCategoryGap": "12%",
            "itemStyle": {"color": paints[column.label]},
            "emphasis": {"disabled": True},
        }
        for column in columns
    ]
    return _options(series, _time(table), WHOLE, "share")


def scatter(table: Table, key: str, paints: dict[str, str]) -> Options:
    """A dot for each row over time, in the colour of the row's expert."""
    kind = _kind(table, key)
    dots: dict[str, list[list[Cell]]] = {}
    for at, name, value in zip(table.column("at"), table.column("expert"), table.column(key), strict=True):
        own = dots.setdefault(str(name), [])
        if value is not None:
            own.append([1000 * _number(at), value])
    series = [
        {
            "type": "line",
            "name": name,
            "data": data,
            "symbol": "circle",
            "symbolSize": 7,
            "showSymbol": True,
            "lineStyle": {"width": 1.25, "color": paints[name], "opacity": 0.45},
            "itemStyle": {"color": paints[name]},
            "emphasis": {"disabled": True},
        }
        for name, data in dots.items()
    ]
    options = _options(series, _time(table), {"scale": True}, kind)
    options["tooltip"] |= {"trigger": "item"}
    return options


def bars(
    labels: Sequence[str],
    columns: Mapping[str, Sequence[Cell]],
    kind: Kind,
    paints: Sequence[str],
    *,
    lying: bool = False,
    gap: str = "35%",
) -> Options:
    """Bars by label, stacked if there are several columns. lying=True: horizontal, from top to bottom."""
    series: list[Options] = [
        {
            "type": "bar",
            "name": name,
            "data": list(values),
            "stack": "all",
            "barMaxWidth": 26 if lying else 44,
            "barCategoryGap": gap,
            "itemStyle": {"color": paint, "borderRadius": [0, 3, 3, 0] if lying else [3, 3, 0, 0]},
            "emphasis": {"disabled": True},
        }
        for (name, values), paint in zip(columns.items(), paints, strict=True)
    ]
    if len(series) == 1:
        place = "right" if lying else "top"
        label = {"show": True, "position": place, "color": "var(--muted)", "fontSize": 12}
        series[0]["label"] = label | {":formatter": f"p => ({TICKS.get(kind) or FORMATS[kind]})(p.value)"}
    categories: Options = {"type": "category", "data": list(labels), "axisTick": {"show": False}}
    if lying:
        categories |= {"inverse": True, "axisLabel": {"width": 94, "overflow": "truncate"}}
    values = WHOLE if kind == "share" else {"min": 0}
    options = _options(series, categories, values, kind, lying=lying)
    options["tooltip"] |= {"axisPointer": {"type": "none"}}
    return options


def _options(series: list[Options], x: Options, y: Options, kind: Kind, *, lying: bool = False) -> Options:
    """The options that all charts have in common, such as plain axes and a tooltip that stays in its card."""
    text = {"color": "var(--muted)", "fontSize": 12}
    line = {"lineStyle": {"color": "var(--line)"}}
    tick = {":formatter": TICKS[kind]} if kind in TICKS else {}
    first = {"axisLine": line, "axisTick": {"show": False}, "splitLine": {"show": False}, **x}
    first["axisLabel"] = text | {"margin": 10} | x.get("axisLabel", {})
    second = {"type": "value", "splitNumber": 4, "splitLine": line, "axisLabel": text | tick, **y}
    return {
        "animation": False,
        "textStyle": {"fontFamily": FONT},
        "grid": LYING if lying else UPRIGHT,
        "xAxis": second if lying else first,
        "yAxis": first if lying else second,
        "series": series,
        "tooltip": {
            "trigger": "axis",
            "confine": True,
            "transitionDuration": 0,
            "backgroundColor": "var(--card)",
            "borderColor": "var(--line)",
            "textStyle": {"color": "var(--ink)", "fontSize": 12.5},
            "axisPointer": {"type": "line", "lineStyle": {"color": "var(--muted)", "type": "dashed"}},
            "extraCssText": "box-shadow: var(--shadow); border-radius: 8px",
            ":valueFormatter": FORMATS[kind],
        },
    }


def _close(values: Sequence[float]) -> Options:
    """An axis in tenths around the values, to make differences visible; 0 … 1 if they are far apart."""
    tenths = [10 * value for value in values] or [0.0]
    low, high = max(0, math.floor(min(tenths) - 0.2)), min(10, math.ceil(max(tenths) + 0.2))
    low, high = (low, low + 2) if high - low < 2 and low <= 8 else (low, high)
    return WHOLE if high - low > 5 else {"min": low / 10, "max": high / 10, "interval": 0.1}


def _round(values: Sequence[float]) -> Options:
    """An axis around the values in at most five equal steps, with round numbers at both ends."""
    least, most = min(values, default=0.0), max(values, default=1.0)
    step = next((one for one in ROUND_STEPS if most - least <= 4 * one), ROUND_STEPS[-1])
    low = max(0, math.floor(least / step))
    high = max(low + 2, math.ceil(most / step))
    return {"min": round(low * step, 2), "max": round(high * step, 2), "interval": step}


def _line(table: Table, column: Column, paint: str) -> Options:
    pairs = list(zip(table.column("at"), table.column(column.key), strict=True))
    return {
        "type": "line",
        "name": column.label,
        "data": [[1000 * _number(at), value] for at, value in pairs],
        "connectNulls": True,
        "showSymbol": sum(value is not None for _, value in pairs) <= SYMBOLS_UP_TO,
        "symbol": "circle",
        "symbolSize": 5,
        "lineStyle": {"width": 2, "color": paint},
        "itemStyle": {"color": paint},
        "emphasis": {"disabled": True},
    }


def _time(table: Table) -> Options:
    ends = {"min": 1000 * table.since, "max": 1000 * table.until}
    return {"type": "time", **ends, "splitNumber": 5, "axisLabel": {"hideOverlap": True, "formatter": CLOCK}}


def _marks(table: Table) -> Options:
    """Thin vertical lines for the table's marks. If there are many, only the last ones get a label."""
    named = 6
    data = [
        {"xAxis": 1000 * mark.at, "name": mark.label, "label": {"show": place >= len(table.marks) - named}}
        for place, mark in enumerate(table.marks)
    ]
    return {
        "silent": True,
        "symbol": "none",
        "animation": False,
        "lineStyle": {"color": "var(--accent)", "type": "solid", "width": 1, "opacity": 0.75},
        "label": {"formatter": "{b}", "color": "var(--accent)", "fontSize": 11, "distance": 4},
        "data": data,
    }


def _kind(table: Table, key: str) -> Kind:
    return next(column.kind for column in table.columns if column.key == key)


def _number(cell: Cell) -> float:
    assert isinstance(cell, int | float)
    return float(cell)
