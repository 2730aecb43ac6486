"""What decides who the default is: first whom an arrangement does harm to, then what it gains."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from evidence import boundaries, lows
from evidence.arrangements import ARRANGEMENTS, ONE_WIDE, ONE_WIDE_GATED, SERVED
from evidence.streams import ONLY, POISONED, title_of
from evidence.words import DASH, difference, how_many, listed, table

Whole = dict[str, Any]
COMPARED = (ONE_WIDE, ONE_WIDE_GATED, SERVED)
HEAD = (
    "arrangement",
    "patterns of traffic",
    "of these, a domain lost more than .01",
    "lowest point of all",
    "in the end, beside the default",
    "on the requests as they came",
    "first window of a new data set, beside static",
)
ABOUT = (
    "## What decides who the default is\n\n"
    "First that nobody loses, then what is gained: an operator who turns learning on must not fear for a "
    "domain. All of these make further updates, with a wide shared adapter or one adapter as large. *Lost"
    " more than .01*: of first guesses, against static, at any measurement on the way or in the end, and "
    "surely something by its interval, which is not corrected for how many there are. What a rival has "
    "beside the default: on how many patterns it is surely better, level as far as can be told, and "
    "surely worse. The gate of one adapter cannot leave a domain to the draft base alone, as that of "
    "experts can, since all domains have the same adapter; to withhold that from single domains would "
    "take a router as well, and was not tried."
)


def part(whole: Whole) -> str:
    """The table and what follows from it; nothing where the default stands beside no other."""
    of = {name: found for name in COMPARED if (found := _patterns(whole, name))}
    if SERVED not in of or len(of) == 1:
        return ""
    rows = [_row(whole, name, found) for name, found in of.items()]
    return f"{ABOUT}\n\n{table(HEAD, rows)}\n\n{verdict(whole, of)}"


def told(whole: Whole) -> str:
    """What follows from the table, by itself."""
    return verdict(whole, {name: found for name in COMPARED if (found := _patterns(whole, name))})


def _patterns(whole: Whole, name: str) -> list[str]:
    """Patterns of traffic that it was run on, poisoned ones left out."""
    return [
        pattern
        for pattern, of in whole["patterns"].items()
        if name in of and pattern not in POISONED and not pattern.startswith(ONLY)
    ]


def harmed(whole: Whole, name: str, patterns: Sequence[str]) -> list[str]:
    """The patterns on which a domain lost more than the aims allow, and surely something."""
    return [
        pattern
        for pattern in patterns
        if any(
            low["verdict"] == "worse" and low["value"] < -lows.WORST
            for low in lows.points(whole["patterns"][pattern][name]).values()
        )
    ]


def _row(whole: Whole, name: str, patterns: Sequence[str]) -> list[str]:
    of = {pattern: whole["patterns"][pattern][name] for pattern in patterns}
    each = [low for one in of.values() for low in lows.points(one).values()]
    lowest = min(each, key=lambda low: float(low["value"]), default=None)
    ends = [one["default_more"].get(SERVED) for one in of.values()]
    came = [one["came"].get("default_more", {}).get(SERVED) for one in of.values()]
    edge = of.get(boundaries.PATTERN, {}).get("boundaries", {}).get("after")
    return [
        _kind(name),
        str(len(patterns)),
        str(len(harmed(whole, name, patterns))),
        difference(lowest) if lowest else DASH,
        DASH if name == SERVED else _counted(ends),
        DASH if name == SERVED else _counted(came),
        difference(edge),
    ]


def _counted(found: Sequence[Whole | None]) -> str:
    """`better 1, level 7, worse 1`: the rival beside the default; `found` is what the default has more."""
    words = {"better": "worse", "worse": "better", "open": "level"}
    counts = Counter(words[one["verdict"]] for one in found if one is not None)
    return ", ".join(f"{word} {counts[word]}" for word in ("better", "level", "worse")) if counts else DASH


def verdict(whole: Whole, of: dict[str, list[str]]) -> str:
    """On the patterns that all of them were run on: who harms nobody, and so who won."""
    common = [pattern for pattern in of.get(SERVED, ()) if all(pattern in found for found in of.values())]
    if not common:
        return ""
    hurt = {name: harmed(whole, name, common) for name in of}
    said = [f"*{_kind(name)}* on {len(found)}{_where(found)}" for name, found in hurt.items()]
    safe = [name for name, found in hurt.items() if not found]
    if safe == [SERVED]:
        won = "So only with the default no domain did."
    elif SERVED in safe:
        others = listed(_kind(name) for name in safe if name != SERVED)
        won = f"So {others} is as safe as the default on these."
    else:
        won = "So the default does not keep its promise here."
    where = f"On the {how_many(len(common), 'pattern')} of traffic that all of these were run on"
    lost = "a domain lost more than .01 of its first guesses for a while"
    rule = (
        ""
        if ONE_WIDE_GATED in of
        else " What of this is the gate's doing, and what the experts', is open here."
    )
    return f"{where}, {lost} with {'; with '.join(said)}. {won}{rule}"


def _kind(name: str) -> str:
    """The title, without what all of these have."""
    return ARRANGEMENTS[name].title.removesuffix(", further updates")


def _where(patterns: Sequence[str]) -> str:
    return f" ({listed(map(title_of, patterns))})" if patterns else ""
