"""What happens where one data set follows another: as the paper shows it, over the requests as they came."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from evidence.arrangements import ARRANGEMENTS, STATIC
from evidence.figures import Compared, Found, Rows, Runs, compared_in_json, first_guesses, share
from evidence.words import DASH, difference, short, short_sign, table
from moedraft.showcase.findings.estimates import change

PATTERN = "one-by-one"
PLACES = {"before": "last window of a data set", "after": "first window of the next"}
Whole = dict[str, Any]


def of_runs(runs: Runs, name: str) -> dict[str, Any]:
    """On both sides of the boundaries, what is guessed more than by the static draft; by data set too.

    A window is as many requests as come between two updates, so of a first one nothing was learned yet.
    """
    seeds = runs.seeds(PATTERN, STATIC, name)
    pairs = list(zip(runs.of(PATTERN, STATIC, seeds), runs.of(PATTERN, name, seeds), strict=True))
    whole = all(len(a["stream"]) == len(b["stream"]) == len(b["domains"]) for a, b in pairs)
    if name == STATIC or not pairs or not whole:  # what learns beforehand serves nothing
        return {}
    found: dict[str, Any] = {}
    for place in PLACES:
        parts = [[_part(still, run, *window) for window in _windows(run, place)] for still, run in pairs]
        found[place] = compared_in_json(_compared(parts)) if all(parts) else None
    return found | {"by": _by_domain(pairs)}


def _by_domain(pairs: Sequence[tuple[Found, Found]]) -> dict[str, list[float]]:
    """Of each data set: first guesses more than static in its first window, and in its last one."""
    result = {}
    for domain in sorted({name for _, run in pairs for name in run["domains"]}):
        ends: list[list[tuple[Rows, Rows]]] = [[], []]
        for still, run in pairs:
            for name, begin, end in _stretches(run):
                if name == domain:
                    width = _width(run, begin, end)
                    ends[0].append(_part(still, run, begin, begin + width))
                    ends[1].append(_part(still, run, end - width, end))
        gains = [share([after for _, after in end]) - share([before for before, _ in end]) for end in ends]
        result[domain] = [round(gain, 5) for gain in gains]
    return result


def _stretches(run: Found) -> Iterator[tuple[str, int, int]]:
    """Domain, begin and end of the requests of each."""
    domains, begin = run["domains"], 0
    for i in range(1, len(domains) + 1):
        if i == len(domains) or domains[i] != domains[begin]:
            yield domains[begin], begin, i
            begin = i


def _width(run: Found, begin: int, end: int) -> int:
    """Of a window in a stretch; at most half of it, so that both ends have one."""
    return max(1, min(int(run["settings"]["every"]), (end - begin) // 2))


def _windows(run: Found, place: str) -> Iterator[tuple[int, int]]:
    """On one side of each boundary."""
    stretches = list(_stretches(run))
    for _, begin, end in stretches[:-1] if place == "before" else stretches[1:]:
        width = _width(run, begin, end)
        yield (end - width, end) if place == "before" else (begin, begin + width)


def _part(still: Found, run: Found, begin: int, end: int) -> tuple[Rows, Rows]:
    before, after = (np.array(one["stream"][begin:end]).reshape(-1, 4) for one in (still, run))
    return before, after


def _compared(parts: Sequence[Sequence[tuple[Rows, Rows]]]) -> Compared:
    """By seed, windows of the static draft and of the arrangement."""
    pairs = [tuple(np.concatenate(of) for of in zip(*one, strict=True)) for one in parts]
    before, after = (np.concatenate([pair[i] for pair in pairs]) for i in (0, 1))
    each = tuple(share([b]) - share([a]) for a, b in pairs)
    return Compared(change(first_guesses(before), first_guesses(after)), each)


def part(whole: Whole) -> str:
    """The table; nothing without such runs."""
    of = {name: one for name, one in whole["patterns"].get(PATTERN, {}).items() if one.get("boundaries")}
    if not of:
        return ""
    domains = list(next(iter(of.values()))["boundaries"]["by"])
    rows = [
        [
            ARRANGEMENTS[name].title,
            str(one["seeds"]),
            *(difference(one["boundaries"][place]) for place in PLACES),
            *(_ends(one["boundaries"]["by"].get(domain)) for domain in domains),
        ]
        for name, one in of.items()
    ]
    head = ("arrangement", "seeds", *PLACES.values(), *domains)
    return (
        "**At the boundaries** of the same streams: first guesses more than the static draft's on the "
        "requests as they came. In the last window before a boundary one update or more had learned from "
        "that data set; of the first one after it nothing had been learned, so below zero there means that "
        "what was learned from others does harm to who comes next. Then each data set's first and last "
        "window, without intervals. In the paper's figure α falls at each boundary and is back within some "
        "hundred requests.\n\n" + table(head, rows)
    )


def _ends(gains: Sequence[float] | None) -> str:
    return DASH if gains is None else " → ".join(short_sign(g) if g >= 0 else short(g) for g in gains)
