"""How the pictures look: colours, lines, panels and the legend that all panels share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

import matplotlib
import numpy as np

from evidence.arrangements import (
    ARRANGEMENTS,
    GATED,
    JOINT,
    LATEST,
    LATEST_WIDE,
    LISTS,
    ONE_WIDE,
    OTHER_WIDE,
    SEPARATE_WIDE,
    SERVED,
    STATIC,
    TURNS_WIDE,
    WITHHELD_GATED,
)
from evidence.figures import Runs
from evidence.streams import title_of
from moedraft.showcase.findings.picture import BLUE, GREY, INK, ORANGE, STYLE

matplotlib.use("Agg")
from matplotlib import pyplot

NARROW = "joint+gate:further"
LOOK = STYLE | {"font.size": 10, "axes.titlesize": 11, "axes.titlepad": 8}
COLOURS = {
    STATIC: GREY,
    LATEST: "#b2452f",
    "mixed-replay": ORANGE,
    "separate": "#7a5195",
    "separate-true": "#b79ac8",
    "turns": "#5d8a66",
    JOINT: BLUE,
    GATED: INK,
    "offline": "#c9b458",
    "offline:wide": "#c9b458",
    NARROW: "#e589b4",
    ONE_WIDE: "#8c5a14",  # the rivals of the last one, which learn as often
    WITHHELD_GATED: "#2f8f9d",
    LATEST_WIDE: "#d98c7a",
    SEPARATE_WIDE: "#7a5195",
    TURNS_WIDE: "#5d8a66",
    LISTS: "#8fb339",
    SERVED: "#c2187a",
}
AS_SERVED = (ONE_WIDE, WITHHELD_GATED, *OTHER_WIDE, SERVED)  # the default and its rivals
Draw = Callable[[Any, Runs, str], None]


def line(axis: Any, name: str, xs: Sequence[float], ys: Sequence[float]) -> None:
    """One arrangement's, with a mark at each measurement."""
    wide = 2.2 if name == SERVED else 1.5
    title, colour = ARRANGEMENTS[name].title, COLOURS[name]
    axis.plot(xs, ys, color=colour, linewidth=wide, marker=".", markersize=6, label=title)


def legend(figure: Any, axes: np.ndarray, columns: int = 3) -> None:
    """One for all panels."""
    handles = {
        label: handle
        for axis in axes.flat
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    if handles:
        figure.legend(
            handles.values(), handles.keys(), loc="outside lower center", ncols=columns, frameon=False
        )


def panels(runs: Runs, patterns: Sequence[str], draw: Draw, path: Path) -> None:
    """One panel a pattern, at most three in a row."""
    columns = min(3, len(patterns))
    lines = -(-len(patterns) // columns)
    with pyplot.rc_context(LOOK):
        figure, axes = pyplot.subplots(
            lines, columns, figsize=(5.2 * columns, 3.6 * lines + 0.4), squeeze=False, layout="constrained"
        )
        for place, axis in enumerate(axes.flat):
            axis.set_visible(place < len(patterns))
            if place < len(patterns):
                draw(axis, runs, patterns[place])
                axis.set_title(fill(title_of(patterns[place]), 32))
        legend(figure, axes, columns)
        figure.savefig(path, dpi=110)
        pyplot.close(figure)
