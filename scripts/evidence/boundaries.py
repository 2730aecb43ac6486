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
Request = tuple[tuple[str, ...], Sequence[float], Sequence[float]]


def of_runs(runs: Runs, name: str) -> dict[str, Any]:
    """On both sides of the boundaries, what is guessed more than by the static draft; by data set too.

    A window is as many requests as come between two updates, so of a first one nothing was learned yet. That
    holds only where boundaries fall between windows; elsewhere there is nothing to tell.
    """
    seeds = runs.seeds(PATTERN, STATIC, name)
    pairs = list(zip(runs.of(PATTERN, STATIC, seeds), runs.of(PATTERN, name, seeds), strict=True))
    whole = all(len(a["stream"]) == len(b["stream"]) == len(b["domains"]) for a, b in pairs)
    if name == STATIC or not pairs or not whole:  # what learns beforehand serves nothing
        return {}
    if any(begin % _every(run) for _, run in pairs for _, begin, _ in _stretches(run)):
        return {}
    found: dict[str, Any] = {}
    for place in PLACES:
        parts = [
            [row for ends in _windows(run, place) for row in _part(still, run, *ends)] for still, run in pairs
        ]
        found[place] = compared_in_json(_compared(parts)) if all(parts) else None
    return found | {"by": _by_domain(pairs)}


def _by_domain(pairs: Sequence[tuple[Found, Found]]) -> dict[str, list[float]]:
    """Of each data set: first guesses more than static in its first window, and in its last one."""
    result = {}
    for domain in sorted({name for _, run in pairs for name in run["domains"]}):
        ends: list[list[Request]] = [[], []]
        for still, run in pairs:
            for name, begin, end in _stretches(run):
                if name == domain:
                    width = _width(run, begin, end)
                    ends[0] += _part(still, run, begin, begin + width)
                    ends[1] += _part(still, run, end - width, end)
        result[domain] = [round(_gain(end), 5) for end in ends]
    return result


def _stretches(run: Found) -> Iterator[tuple[str, int, int]]:
    """Domain, begin and end of the requests of each."""
    domains, begin = run["domains"], 0
    for i in range(1, len(domains) + 1):
        if i == len(domains) or domains[i] != domains[begin]:
            yield domains[begin], begin, i
            begin = i


def _every(run: Found) -> int:
    return int(run["settings"]["every"])


def _width(run: Found, begin: int, end: int) -> int:
    """Of a window in a stretch; at most half of it, so that both ends have one."""
    return max(1, min(_every(run), (end - begin) // 2))


def _windows(run: Found, place: str) -> Iterator[tuple[int, int]]:
    """On one side of each boundary."""
    stretches = list(_stretches(run))
    for _, begin, end in stretches[:-1] if place == "before" else stretches[1:]:
        width = _width(run, begin, end)
        yield (end - width, end) if place == "before" else (begin, begin + width)


def _part(still: Found, run: Found, begin: int, end: int) -> list[Request]:
    """Of each request what tells its prompt from others, and the counts of both drafts, see `came`."""
    return [
        ((run["domains"][i], *map(str, still["stream"][i])), still["stream"][i], run["stream"][i])
        for i in range(begin, end)
    ]


def _gain(requests: Sequence[Request]) -> float:
    before, after = (share([np.array([request[k] for request in requests])]) for k in (1, 2))
    return after - before


def _compared(parts: Sequence[Sequence[Request]]) -> Compared:
    """By seed, requests in windows. A prompt's counts are added up over the seeds, as on all of a page."""
    sums: dict[tuple[str, ...], Rows] = {}
    for key, before, after in (request for part in parts for request in part):
        sums[key] = sums.get(key, 0) + np.array([before, after])
    both = np.array(list(sums.values()))
    return Compared(change(first_guesses(both[:, 0]), first_guesses(both[:, 1])), tuple(map(_gain, parts)))


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
