"""Pictures of what was found: small multiples, one panel for each pattern of traffic."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np

from evidence import time_plots
from evidence.arrangements import ARRANGEMENTS, BOUNDS, GATED, JOINT, LATEST, MAIN, SERVED, STATIC
from evidence.figures import (
    Compared,
    Runs,
    against,
    first_guesses,
    forgotten,
    measured_at,
    point_at,
    rows_at,
    share,
)
from evidence.looks import AS_SERVED, COLOURS, NARROW, line, panels
from evidence.streams import ONLY
from moedraft.showcase.findings.picture import GREY

SHOWN = (*MAIN[:-1], *AS_SERVED, MAIN[-1])  # in this order
SILENT = ("one-by-one", "shift")  # in which domains stop coming
DEPTH = 3  # tokens of a draft


def draw_all(runs: Runs, folder: Path) -> list[str]:
    """The names of the pictures that there were runs for."""
    patterns = [name for name in runs.patterns() if not name.startswith(ONLY)]
    learned = [name for name in patterns if any(p == name and a != STATIC for p, a in runs.by_name)]
    moving = [name for name in time_plots.MOVING if name in learned]
    drawn = {
        "curves": (curves, learned),
        "gains": (gains, learned),
        "domains": (domains, learned),
        "positions": (positions, learned),
        "recovery": (time_plots.recovery, moving),
        "forgetting": (forgetting, [name for name in SILENT if _silent(runs, name)]),
        "updates": (time_plots.over_updates, learned),
        "seconds": (time_plots.over_seconds, learned),
    }
    for name in (name for name, (_, where) in drawn.items() if not where):
        (folder / f"{name}.png").unlink(missing_ok=True)  # of earlier runs
    drawn = {name: (draw, where) for name, (draw, where) in drawn.items() if where}
    for name, (draw, where) in drawn.items():
        panels(runs, where, draw, folder / f"{name}.png")
    if learned:
        time_plots.by_domain(runs, learned, folder / "by-domain.png")
    return [*drawn, *(["by-domain"] if learned else [])]


def curves(axis: Any, runs: Runs, pattern: str) -> None:
    """First guesses on all held-out prompts over the requests, mean of the seeds."""
    for name in SHOWN:
        found = runs.of(pattern, name)
        if not found:
            continue
        at = measured_at(found)
        shares = [share([rows_at(run, point_at(run, n)) for run in found]) for n in at]
        if len(set(shares)) == 1 or len(at) == 1 or name in BOUNDS:
            axis.axhline(
                shares[-1], color=COLOURS[name], linestyle="--", linewidth=1, label=ARRANGEMENTS[name].title
            )
        else:
            line(axis, name, at, shares)
    example = next(run for (p, _), found in runs.by_name.items() if p == pattern for run in found.values())
    for turn in example["turns"] if pattern != "one-by-one" else []:
        axis.axvline(turn, color=GREY, linewidth=0.6, linestyle=":")
    axis.set_xlabel("requests")
    axis.set_ylabel("right first guesses")


def gains(axis: Any, runs: Runs, pattern: str) -> None:
    """What each arrangement gained on static at the end, with its interval."""
    found = {name: against(runs, pattern, STATIC, name) for name in SHOWN if name != STATIC}
    bars(axis, {name: one for name, one in found.items() if one is not None})
    axis.set_xlabel("right first guesses more than static")


def forgetting(axis: Any, runs: Runs, pattern: str) -> None:
    """What domains lost or gained while they were silent, with its interval."""
    bars(axis, _silent(runs, pattern))
    axis.set_xlabel("change of right first guesses while silent")


def _silent(runs: Runs, pattern: str) -> dict[str, Compared]:
    """By arrangement, the change while silent, where it was measured."""
    names = [name for name in (*MAIN, NARROW, *AS_SERVED) if name not in (STATIC, *BOUNDS)]
    found = {name: forgotten(runs.of(pattern, name)) for name in names}
    return {name: one for name, one in found.items() if one is not None}


def bars(axis: Any, found: dict[str, Compared]) -> None:
    """One line for each arrangement: its interval, its value, and the seeds' own as small marks."""
    names = list(found)[::-1]
    for place, name in enumerate(names):
        one, seeds = found[name].change.difference, found[name].seeds
        axis.plot([one.low, one.high], [place, place], color=COLOURS[name], linewidth=2.4)
        axis.plot(one.value, place, "o", color=COLOURS[name])
        axis.plot(seeds, [place - 0.22] * len(seeds), "|", color=COLOURS[name], markersize=7)
    axis.axvline(0, color=GREY, linewidth=0.8)
    axis.set_yticks(range(len(names)), [fill(ARRANGEMENTS[name].title, 30) for name in names])


def domains(axis: Any, runs: Runs, pattern: str) -> None:
    """What became of each domain under the default, with its interval."""
    learned = [name for name in (LATEST, JOINT, GATED, SERVED) if runs.seeds(pattern, STATIC, name)]
    if not learned:
        return
    held = list(dict.fromkeys(runs.of(pattern, learned[0])[0]["held_out"]))
    for shift, name in zip(
        0.09 * np.linspace(1, -1, len(learned)) * (len(learned) - 1), learned, strict=True
    ):
        for place, domain in enumerate(held):
            found = against(runs, pattern, STATIC, name, first_guesses, domains=[domain])
            assert found is not None
            one, label = found.change.difference, ARRANGEMENTS[name].title if not place else None
            axis.plot([one.low, one.high], [place + shift] * 2, color=COLOURS[name], linewidth=2, label=label)
            axis.plot(one.value, place + shift, ".", color=COLOURS[name])
    axis.axvline(0, color=GREY, linewidth=0.8)
    axis.set_yticks(range(len(held)), held)
    axis.set_xlabel("right first guesses more than static")


def positions(axis: Any, runs: Runs, pattern: str) -> None:
    """How many of all drafts are right up to each position, at the end, on held-out prompts."""
    places = list(range(1, DEPTH + 1))
    for name in SHOWN:
        found: Sequence[Any] = runs.of(pattern, name)
        if found:
            counts = sum(rows_at(run).sum(0) for run in found)
            line(axis, name, places, [counts[place] / counts[0] for place in places])
    axis.set_xticks(places)
    axis.set_ylim(bottom=0)
    axis.set_xlabel("position in the draft")
    axis.set_ylabel("drafts right up to there")
