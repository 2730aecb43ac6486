"""What the gate decided, and by which figures."""

from __future__ import annotations

from typing import Any

from evidence.arrangements import ARRANGEMENTS, GATED, SERVED
from evidence.streams import ONLY, title_of
from evidence.words import short, short_sign, table

DECISIONS = {"promote": "published", "keep": "kept", "discard": "discarded"}
Whole = dict[str, Any]
Row = tuple[str, str, Whole]  # pattern, arrangement, its figures


def gate(whole: Whole) -> str:
    """How often it decided what, and its record of what it published."""
    found: list[Row] = [
        (pattern, name, of[name])
        for pattern, of in whole["patterns"].items()
        for name in (GATED, SERVED)
        if name in of and not pattern.startswith(ONLY)
    ]
    if not found:
        return ""
    head = (
        "traffic",
        "arrangement",
        "seeds",
        *(f"{who} {what}" for who in ("shared:", "all:") for what in DECISIONS.values()),
    )
    rows = [
        [title_of(pattern), ARRANGEMENTS[name].title, str(one["seeds"]), *counts(one)]
        for pattern, name, one in found
    ]
    return f"## What the gate decided\n\n{table(head, rows)}\n\n{record(found)}"


def counts(one: Whole) -> list[str]:
    return [str(part.get(key, 0)) for part in (one["shared"], one["decisions"]) for key in DECISIONS]


def record(found: list[Row]) -> str:
    """What the gate had measured of each version that it published, where run files hold it."""
    rows = [
        [title_of(pattern), ARRANGEMENTS[name].title, *figures(one["record"])]
        for pattern, name, one in found
        if one["record"]
    ]
    if not rows:
        return (
            "Whether a published version was ever worse than the one before by the gate's own record cannot "
            "be shown: these runs kept how often it decided what, not by which figures. New runs keep both."
        )
    head = (
        "traffic",
        "arrangement",
        "published",
        "mean gain",
        "least gain",
        "80 % interval above 0",
        "of the others, right tokens surely likelier",
        "along",
    )
    return (
        "By the gate's own record, in tokens per step on held-out records, against the version before; "
        "*along*: experts that were published with the shared adapter without a gain of their own. The gate "
        "publishes what surely gains, and what surely gives the right tokens more probability where a gain "
        "has 30 % or more ([how](how-it-works.md)). So a *least gain* below zero is a loss within chance, of "
        "a version that was published for the second reason (*surely likelier*: with 95 %; judged of a whole "
        "update, not of single experts); older runs asked for a likely gain there too. "
        "What versions did to domains is told by the held-out prompts above, as their lowest points. Only "
        f"runs that kept it.\n\n{table(head, rows)}"
    )


def figures(of: Whole) -> list[str]:
    own, along = of.get("promote"), of.get("along", {"versions": 0})
    if own is None:
        return ["0", "—", "—", "—", "—", str(along["versions"])]
    sure = f"{own['sure']} of {own['versions']}"
    gains = [short_sign(own["gain"]), short_sign(own["least"])]
    beside = f", least {short(along['least'])}" if along["versions"] else ""
    seen = own.get("witnessed")
    by_witness = "—" if seen is None else f"{seen[0]} of {seen[1]}"
    return [str(own["versions"]), *gains, sure, by_witness, f"{along['versions']}{beside}"]
