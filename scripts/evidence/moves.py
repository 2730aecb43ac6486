"""Where traffic moves: what domains lost while they were silent, and when they were back."""

from __future__ import annotations

from typing import Any

from evidence.arrangements import ARRANGEMENTS, BOUNDS, MAIN, SERVED, STATIC, WIDE_RIVALS
from evidence.streams import title_of
from evidence.words import DASH, NOT_MEASURED, difference, how_many, listed, table, waits

# By pattern of traffic: which figures of the summary there should be.
WANTED = {
    "one-by-one": ("forgotten",),
    "shift": ("forgotten", "recovery"),
    "new-domain": ("arrival",),
}
COLUMNS = {
    "forgotten": "change while silent",
    "recovery": "requests until back",
    "arrival": "requests until at home",
}
ABOUT = (
    "## Where traffic moves\n\n*Change while silent*: first guesses on domains that stopped coming, in the "
    "end against when the last of their requests had been learned from; with a return, at the moment before "
    "it. *Until back*: after the return, until the domains are within .02 of what they had. *Until at home*: "
    "after a new domain came, until it has 80 % of what it gains offline. By seed. Both are read from the "
    "first measurement that shows it, so they are upper bounds. "
)
Whole = dict[str, Any]


def part(whole: Whole) -> str:
    """The table."""
    rows = [
        [title_of(pattern), *_row(of[name], name, pattern)]
        for pattern in WANTED
        for of in [whole["patterns"].get(pattern, {})]
        for name in _learners(of)
    ]
    if not rows:
        return ""
    head = ("traffic", "arrangement", "seeds", "measured after requests", *COLUMNS.values())
    return f"{ABOUT}{unmeasured(whole)}\n\n{table(head, rows)}"


def unmeasured(whole: Whole) -> str:
    """Which figures no run of the table has."""
    lacking = [
        f"{COLUMNS[key]} with {title_of(pattern)}"
        for pattern, keys in WANTED.items()
        for of in [whole["patterns"].get(pattern, {})]
        for key in keys
        if _learners(of) and not any(_measured(of[name][key]) for name in _learners(of))
    ]
    every = whole["settings"]["every"]
    rule = f"A figure counts only where what serves was measured within {every} requests after the turn."
    if not lacking:
        return rule
    newer = " Others are [on a page of their own](evidence-turns.md)." if _has_newer(whole) else ""
    return f"{rule} **Not measured in these runs: {listed(lacking)}.**{newer}"


def _has_newer(whole: Whole) -> bool:
    """Whether there are runs of the same models that are measured where traffic turns."""
    return str(whole["settings"].get("target", "")) == "smollm2"


def _learners(of: Whole) -> list[str]:
    some = (*MAIN, *WIDE_RIVALS, SERVED)
    return [name for name in some if name in of and name not in (STATIC, *BOUNDS)]


def _measured(one: Any) -> bool:
    """Of a comparison, or of waits by seed."""
    return any(wait is not None for wait in one) if isinstance(one, list) else one is not None


def _row(one: Whole, name: str, pattern: str) -> list[str]:
    found = {"forgotten": _change(one), "recovery": waits(one.get("recovery"))}
    found["arrival"] = waits(one.get("arrival"))
    shown = [found[key] if key in WANTED[pattern] else DASH for key in COLUMNS]
    return [ARRANGEMENTS[name].title, str(one["seeds"]), ", ".join(map(str, one["measured"])), *shown]


def _change(one: Whole) -> str:
    """With the number of seeds, where not all were measured."""
    change = one["forgotten"]
    if change is None:
        return NOT_MEASURED
    fewer = len(change["seeds"]) < one["seeds"]
    return difference(change) + (f" ({how_many(len(change['seeds']), 'seed')})" if fewer else "")
