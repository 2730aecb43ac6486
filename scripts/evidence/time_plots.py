"""Pictures of how learning goes on: over requests, updates and seconds of training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np
from matplotlib import pyplot

from evidence.arrangements import (
    ARRANGEMENTS,
    BOUNDS,
    GATED,
    JOINT,
    LATEST,
    MAIN,
    SERVED,
    STATIC,
    WITHHELD_GATED,
)
from evidence.figures import (
    Found,
    Runs,
    common_points,
    measured_at,
    point_at,
    rows_at,
    share,
    stream_gain,
)
from evidence.looks import AS_SERVED, COLOURS, LOOK, NARROW, legend, line
from evidence.streams import title_of
from moedraft.showcase.findings.picture import GREY

FOLLOWED = (STATIC, LATEST, "mixed-replay", JOINT, GATED, WITHHELD_GATED, SERVED)  # that have several seeds
MOVING = ("shift", "new-domain", "one-by-one")
WINDOW = 16  # requests of a point on the stream
Spent = Callable[[Found, int], float]  # by a run until a point of its curve


def by_domain(runs: Runs, patterns: Sequence[str], path: Path) -> None:
    """A row for each pattern, a column for each domain: first guesses on held-out prompts."""
    held = {p: found["held_out"] for (p, _), by in runs.by_name.items() for found in by.values()}
    names = list(dict.fromkeys(name for pattern in patterns for name in held[pattern]))
    with pyplot.rc_context(LOOK):
        figure, axes = pyplot.subplots(
            len(patterns),
            len(names),
            figsize=(3 * len(names), 1.9 * len(patterns) + 1),
            squeeze=False,
            sharex=True,
            sharey="col",
            layout="constrained",
        )
        for row, pattern in enumerate(patterns):
            for axis, domain in zip(axes[row], names, strict=True):
                if domain in held[pattern]:
                    _of_domain(axis, runs, pattern, domain)
                else:
                    axis.set_axis_off()
            axes[row][0].set_ylabel(fill(title_of(pattern), 22))
        for axis, domain in zip(axes[0], names, strict=True):
            axis.set_title(domain)
        for axis in axes[-1]:
            axis.set_xlabel("requests")
        legend(figure, axes)
        figure.savefig(path, dpi=110)
        pyplot.close(figure)


def _of_domain(axis: Any, runs: Runs, pattern: str, domain: str) -> None:
    for name in FOLLOWED:
        found = runs.of(pattern, name)
        if not found:
            continue
        if name == STATIC:
            level = share([rows_at(run, -1, [domain]) for run in found])
            axis.axhline(level, color=COLOURS[name], linestyle="--", label=ARRANGEMENTS[name].title)
            continue
        at = measured_at(found)
        shares = [share([rows_at(run, point_at(run, n), [domain]) for run in found]) for n in at]
        line(axis, name, at, shares)


def recovery(axis: Any, runs: Runs, pattern: str) -> None:
    """What the requests themselves gained on static; with a new domain, its own requests alone."""
    example = next(run for (p, _), found in runs.by_name.items() if p == pattern for run in found.values())
    domains = [example["newcomer"]] if pattern == "new-domain" else None
    names = [name for name in (*FOLLOWED[1:], NARROW) if runs.seeds(pattern, STATIC, name)]
    common = runs.seeds(pattern, STATIC, *names)
    for name in names:
        # Only where the order of the domains changes with the seed must all have the same seeds.
        seeds = common if pattern == "one-by-one" else runs.seeds(pattern, STATIC, name)
        still, learned = (runs.of(pattern, which, seeds) for which in (STATIC, name))
        found = stream_gain(still, learned, WINDOW, domains)
        if found:
            line(axis, name, *zip(*found, strict=True))
    for turn in example["turns"]:
        axis.axvline(turn, color=GREY, linewidth=0.8, linestyle=":")
    axis.axhline(0, color=GREY, linewidth=0.8)
    axis.set_xlabel("requests")
    axis.set_ylabel("right first guesses\nmore than static")


def over_updates(axis: Any, runs: Runs, pattern: str) -> None:
    _gain_over(axis, runs, pattern, lambda run, point: run["curve"][point]["updates"])
    axis.set_xlabel("updates")


def over_seconds(axis: Any, runs: Runs, pattern: str) -> None:
    def seconds(run: Found, point: int) -> float:
        return sum(
            float(update["cpu_seconds"]) for update in run["updates"][: run["curve"][point]["updates"]]
        )

    _gain_over(axis, runs, pattern, seconds)
    axis.set_xlabel("seconds of one core for training")


def _gain_over(axis: Any, runs: Runs, pattern: str, spent: Spent) -> None:
    """Gain on static at each measurement; the mean of the seeds on both axes."""
    for name in (*MAIN, NARROW, *AS_SERVED):
        seeds = runs.seeds(pattern, STATIC, name) if name != STATIC else []
        still, found = runs.of(pattern, STATIC, seeds), runs.of(pattern, name, seeds)
        xs, ys = [0.0], [0.0]
        for requests in common_points(found):
            points = [point_at(run, requests) for run in found]
            xs.append(float(np.mean([spent(run, p) for run, p in zip(found, points, strict=True)])))
            after = [rows_at(run, point) for run, point in zip(found, points, strict=True)]
            ys.append(share(after) - share([rows_at(run) for run in still]))
        if found:  # what learned beforehand has no way to it
            begin = 1 if name in BOUNDS else 0
            line(axis, name, xs[begin:], ys[begin:])
    axis.axhline(0, color=GREY, linewidth=0.8)
    axis.set_ylabel("right first guesses\nmore than static")
