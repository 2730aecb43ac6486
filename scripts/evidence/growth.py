"""How guesses get better along a long stream of requests."""

from __future__ import annotations

from typing import Any

from evidence.arrangements import ARRANGEMENTS, STATIC
from evidence.figures import Runs, first_guesses, mean_at, measured_at, tokens_per_step
from evidence.streams import ONLY, title_of
from evidence.words import DASH, short, table

LONG = 480  # requests of a run from which on its stream is called long
ABOUT = (
    "## Along a long stream\n\nFirst guesses, and after the slash tokens per step, on the held-out prompts "
    "after so many requests; means of the seeds. What is learned brings less and less, but has not come to "
    "an end where these streams do."
)
Whole = dict[str, Any]


def grown(runs: Runs, pattern: str, name: str) -> list[dict[str, float]]:
    """At each measurement that all seeds have: requests, first guesses and tokens per step."""
    found = runs.of(pattern, name)
    return [
        {
            "requests": requests,
            "first_guess": mean_at(found, requests, first_guesses),
            "tokens": mean_at(found, requests, tokens_per_step),
        }
        for requests in measured_at(found)
    ]


def part(whole: Whole) -> str:
    """A table for each pattern of traffic; nothing where the streams are short."""
    if whole["settings"]["requests"] < LONG:
        return ""
    parts = [ABOUT]
    for pattern, of in whole["patterns"].items():
        if pattern.startswith(ONLY):
            continue
        points = sorted({int(one["requests"]) for arrangement in of.values() for one in arrangement["grown"]})
        head = ("arrangement", "seeds", *(f"{n}" for n in points))
        rows = [
            [ARRANGEMENTS[name].title, str(one["seeds"]), *_cells(one["grown"], points, name == STATIC)]
            for name, one in of.items()
        ]
        parts.append(f"{title_of(pattern).capitalize()}:\n\n{table(head, rows)}")
    return "\n\n".join(parts)


def _cells(grown: list[dict[str, float]], points: list[int], is_static: bool) -> list[str]:
    by = {int(one["requests"]): one for one in grown}
    if is_static:  # the same at all times
        by = dict.fromkeys(points, grown[-1])
    return [f"{short(by[n]['first_guess'])} / {by[n]['tokens']:.2f}" if n in by else DASH for n in points]
