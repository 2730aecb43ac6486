"""Pictures of what was found: small multiples, one panel for each pattern of traffic."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

import matplotlib
import numpy as np

from evidence.arrangements import ARRANGEMENTS, GATED, JOINT, LATEST, MAIN, STATIC
from evidence.figures import Runs, against, first_guesses, level
from evidence.streams import ONLY, title_of
from moedraft.showcase.picture import BLUE, GREY, INK, ORANGE, STYLE

matplotlib.use("Agg")
from matplotlib import pyplot

SMALL = {"font.size": 10, "axes.titlesize": 11, "axes.titlepad": 8}
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
}
Draw = Callable[[Any, Runs, str], None]


def draw_all(runs: Runs, folder: Path) -> list[str]:
    """The names of the pictures that there were runs for."""
    patterns = [name for name in runs.patterns() if not name.startswith(ONLY)]
    learned = any(name != STATIC for _, name in runs.by_name)
    drawn = {"curves": curves, "gains": gains, "domains": domains} if learned else {}
    for name, draw in drawn.items() if patterns else ():
        panels(runs, patterns, draw, folder / f"{name}.png")
    return list(drawn) if patterns else []


def panels(runs: Runs, patterns: Sequence[str], draw: Draw, path: Path) -> None:
    """One panel a pattern, at most three in a row."""
    columns = min(3, len(patterns))
    lines = -(-len(patterns) // columns)
    with pyplot.rc_context(STYLE | SMALL):
        figure, axes = pyplot.subplots(
            lines, columns, figsize=(5.2 * columns, 3.6 * lines), squeeze=False, layout="constrained"
        )
        for place, axis in enumerate(axes.flat):
            axis.set_visible(place < len(patterns))
            if place < len(patterns):
                draw(axis, runs, patterns[place])
                axis.set_title(fill(title_of(patterns[place]), 32))
        handles = {
            label: line
            for axis in axes.flat
            for line, label in zip(*axis.get_legend_handles_labels(), strict=True)
        }
        if handles:
            figure.legend(
                handles.values(), handles.keys(), loc="outside lower center", ncols=3, frameon=False
            )
        figure.savefig(path, dpi=110)
        pyplot.close(figure)


def curves(axis: Any, runs: Runs, pattern: str) -> None:
    """First guesses on all held-out prompts over the requests, mean of the seeds."""
    last = 0
    for name in MAIN:
        found = runs.of(pattern, name)
        if not found:
            continue
        at = [point["requests"] for point in found[0]["curve"]]
        shares = [level(found, point=i).value for i in range(len(at))]
        last = max(last, *at)
        if len(set(shares)) == 1 or len(at) == 1 or name == "offline":
            axis.axhline(
                shares[-1], color=COLOURS[name], linestyle="--", linewidth=1, label=ARRANGEMENTS[name].title
            )
        else:
            axis.plot(at, shares, color=COLOURS[name], linewidth=1.6, label=ARRANGEMENTS[name].title)
    example = next(run for (p, _), found in runs.by_name.items() if p == pattern for run in found.values())
    for turn in example["turns"] if pattern != "one-by-one" else []:
        axis.axvline(turn, color=GREY, linewidth=0.6, linestyle=":")
    axis.set_xlabel("requests")
    axis.set_ylabel("right first guesses")


def gains(axis: Any, runs: Runs, pattern: str) -> None:
    """What each arrangement gained on static at the end, with its interval."""
    names = [name for name in MAIN if name != STATIC and runs.seeds(pattern, STATIC, name)][::-1]
    for place, name in enumerate(names):
        found = against(runs, pattern, STATIC, name)
        assert found is not None
        one = found.change.difference
        axis.plot([one.low, one.high], [place, place], color=COLOURS[name], linewidth=2.4)
        axis.plot(one.value, place, "o", color=COLOURS[name])
        axis.plot(found.seeds, [place - 0.22] * len(found.seeds), "|", color=COLOURS[name], markersize=7)
    axis.axvline(0, color=GREY, linewidth=0.8)
    axis.set_yticks(range(len(names)), [ARRANGEMENTS[name].title for name in names])
    axis.set_xlabel("right first guesses more than static")


def domains(axis: Any, runs: Runs, pattern: str) -> None:
    """What became of each domain under the default, with its interval."""
    compared = [name for name in (LATEST, JOINT, GATED) if runs.seeds(pattern, STATIC, name)]
    if not compared:
        return
    held = list(dict.fromkeys(runs.of(pattern, compared[0])[0]["held_out"]))
    for shift, name in zip(np.linspace(0.2, -0.2, len(compared)), compared, strict=True):
        for place, domain in enumerate(held):
            found = against(runs, pattern, STATIC, name, first_guesses, domains=[domain])
            assert found is not None
            one, label = found.change.difference, ARRANGEMENTS[name].title if not place else None
            axis.plot([one.low, one.high], [place + shift] * 2, color=COLOURS[name], linewidth=2, label=label)
            axis.plot(one.value, place + shift, ".", color=COLOURS[name])
    axis.axvline(0, color=GREY, linewidth=0.8)
    axis.set_yticks(range(len(held)), held)
    axis.set_xlabel("right first guesses more than static")
