"""How guesses get better along a long stream of requests."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from evidence.arrangements import ARRANGEMENTS, EQUAL_COST, EQUAL_STEPS, JOINT, ONE_ADAPTER, STATIC
from evidence.figures import Runs, first_guesses, mean_at, measured_at, tokens_per_step
from evidence.streams import ONLY, heading_of
from evidence.words import DASH, how_many, interval, short, short_sign, table

ALIKE = 0.05  # costs that differ by less are called about as many
LONG = 480  # requests of a run from which on its stream is called long
ABOUT = (
    "## Along a long stream\n\nFirst guesses, and after the slash tokens per step, on the held-out prompts "
    "after so many requests; all seeds' counts together. In the last column, what learning took, of the "
    "operations of the target for the same requests ([how it is counted](#what-it-costs))."
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
        head = ("arrangement", "seeds", *(f"{n}" for n in points), "learning's operations")
        rows = [_row(of, name, points) for name in of]
        parts += [f"{heading_of(pattern)}:\n\n{table(head, rows)}", still(of)]
        parts.append(at_equal_cost(of, whole["settings"]["steps"]))
    return "\n\n".join(one for one in parts if one)


def still(of: Whole) -> str:
    """What the first stretch of the stream brought, and the last."""
    grown = of.get(JOINT, {}).get("grown", [])
    if len(grown) < 3:
        return ""
    gains = [after["first_guess"] - before["first_guess"] for before, after in pairwise(grown)]
    ends = [int(one["requests"]) for one in grown]
    return (
        f"{ARRANGEMENTS[JOINT].title.capitalize()}: the first {ends[1] - ends[0]} requests brought "
        f"{short_sign(gains[0])} first guesses, the last {ends[-1] - ends[-2]} {short_sign(gains[-1])}."
    )


def at_equal_cost(of: Whole, steps: int) -> str:
    """Joint learning beside one adapter that takes about as many operations; nothing where it was not run."""
    more = of.get(ONE_ADAPTER, {}).get("default_more", {}).get(EQUAL_COST)
    if more is None:
        return ""
    costs = [of[name]["cost"] for name in (ONE_ADAPTER, EQUAL_COST)]
    ratio = costs[1] / costs[0]
    as_much = "about as many operations" if abs(ratio - 1) < ALIKE else f"{ratio:.2f} times the operations"
    verdict = {"better": "more", "worse": "**less**", "open": "not surely more or less"}[more["verdict"]]
    return (
        "A step of joint learning takes fewer operations than one of the single adapter, since a row is "
        "guessed from its own expert's list of tokens, where one adapter guesses from all lists together. "
        f"With {EQUAL_STEPS} steps where one adapter makes {steps}, joint learning takes {as_much} "
        f"({costs[1]:.0%} and {costs[0]:.0%} of the target's), and then hits {verdict}: {interval(more)} "
        f"first guesses ({how_many(len(more['seeds']), 'seed')})."
    )


def _row(of: Whole, name: str, points: list[int]) -> list[str]:
    one, is_static = of[name], name == STATIC
    cost = DASH if is_static else f"{one['cost']:.0%} of the target's"
    title = ARRANGEMENTS[name].title
    return [title, str(one["seeds"]), *_cells(one["grown"], points, is_static), cost]


def _cells(grown: list[dict[str, float]], points: list[int], is_static: bool) -> list[str]:
    by = {int(one["requests"]): one for one in grown}
    if is_static:  # the same at all times
        by = dict.fromkeys(points, grown[-1])
    return [f"{short(by[n]['first_guess'])} / {by[n]['tokens']:.2f}" if n in by else DASH for n in points]
