"""First guesses on the requests themselves, each before anything was learned from it: what users get."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from evidence.arrangements import (
    ARRANGEMENTS,
    GATED,
    ONE_ADAPTER,
    ONE_GATED,
    SERVED,
    STATIC,
    WIDE_RIVALS,
)
from evidence.figures import Compared, Found, Rows, Runs, compared_in_json, first_guesses, in_json
from evidence.lows import WORST
from evidence.streams import ONLY, POISONED, title_of
from evidence.words import DASH, difference, number, table
from moedraft.showcase.findings.estimates import change, ratio

UNGATED = "joint:wide"
RIVALS = (*WIDE_RIVALS, UNGATED)  # of the default
SHOWN = (STATIC, ONE_ADAPTER, ONE_GATED, GATED, *RIVALS, SERVED)
# What a row is compared with.
DEFAULT = {
    **dict.fromkeys((ONE_ADAPTER, ONE_GATED), GATED),
    **dict.fromkeys(RIVALS, SERVED),
}
FEWEST = 5  # requests of a domain that tell anything of it
ABOUT = (
    "## On the requests as they came\n\nThe figures above are of held-out prompts of all domains, also of "
    "those that have not come yet or come no more. These are of the requests themselves, each guessed by "
    "what served when it came, before anything was learned from it: what users get, from the first request "
    "on. Intervals are by a paired bootstrap over prompts, whose counts are added up over the seeds, which "
    "serve the same prompts in other orders; a prompt is known by its domain and by what the static draft "
    "guesses of it."
)
Whole = dict[str, Any]


def of_runs(runs: Runs, pattern: str, name: str) -> dict[str, Any]:
    """The level of an arrangement, its gain on static, and what the default of its kind has more."""
    seeds = runs.seeds(pattern, STATIC, name)
    found = runs.of(pattern, name, seeds)
    if not found or not _whole(runs, pattern, seeds, found):
        return {}
    default = DEFAULT.get(name)
    more = {default: compared_in_json(compared(runs, pattern, name, default))} if default else {}
    return {
        "level": in_json(ratio(first_guesses(_by_prompt(runs, pattern, seeds, found)))),
        "gain": None if name == STATIC else compared_in_json(compared(runs, pattern, STATIC, name)),
        "default_more": more,
        "domains": {} if name == STATIC else _by_domain(runs, pattern, name),
    }


def lost(came: Mapping[str, Any]) -> dict[str, Whole]:
    """The domains whose own requests got less than from static, by more than the aims allow."""
    return {d: one for d, one in came.get("domains", {}).items() if one is not None and one["value"] < -WORST}


def _by_domain(runs: Runs, pattern: str, name: str) -> dict[str, Any]:
    """What each domain's own requests got more than from static."""
    seeds = runs.seeds(pattern, STATIC, name)
    served = [Counter[str](run["domains"]) for run in runs.of(pattern, STATIC, seeds)]
    enough = [one for one in sorted(served[0]) if all(counts[one] >= FEWEST for counts in served)]
    return {one: compared_in_json(compared(runs, pattern, STATIC, name, one)) for one in enough}


def compared(runs: Runs, pattern: str, one: str, other: str, domain: str | None = None) -> Compared | None:
    """What `other` has more than `one`, prompt by prompt; None without seeds of both and of static.

    domain: on the requests of this one only, which every seed must have.
    """
    seeds = runs.seeds(pattern, STATIC, one, other)
    both = [runs.of(pattern, name, seeds) for name in (one, other)]
    if not seeds or not all(_whole(runs, pattern, seeds, found) for found in both):
        return None
    before, after = (_by_prompt(runs, pattern, seeds, found, domain) for found in both)
    each = tuple(_share(_rows(b, domain)) - _share(_rows(a, domain)) for a, b in zip(*both, strict=True))
    return Compared(change(first_guesses(before), first_guesses(after)), each)


def _whole(runs: Runs, pattern: str, seeds: Sequence[int], found: Sequence[Found]) -> bool:
    """Whether these served every request; what learns beforehand does not."""
    pairs = zip(runs.of(pattern, STATIC, seeds), found, strict=True)
    return all(0 < len(run["stream"]) == len(still["stream"]) for still, run in pairs)


def _by_prompt(
    runs: Runs, pattern: str, seeds: Sequence[int], found: Sequence[Found], only: str | None = None
) -> Rows:
    """The counts [prompts, 4] of these runs, one of each seed, added up over the requests with one prompt.

    The static draft guesses the same of a prompt whenever it comes. Prompts that happen to look alike to it
    are taken for one, which makes intervals wider, not narrower.
    """
    sums: dict[tuple[str, ...], Rows] = {}
    for still, run in zip(runs.of(pattern, STATIC, seeds), found, strict=True):
        for domain, known, row in zip(still["domains"], still["stream"], _rows(run), strict=True):
            if only in (None, domain):
                key = (domain, *map(str, known))
                sums[key] = sums.get(key, 0) + row
    return np.array(list(sums.values()))


def part(whole: Whole) -> str:
    """The table; nothing where neither default was run."""
    rows = [
        [title_of(pattern), *_row(name, of[name])]
        for pattern, of in whole["patterns"].items()
        if not pattern.startswith(ONLY) and pattern not in POISONED and (GATED in of or SERVED in of)
        for name in SHOWN
        if of.get(name, {}).get("came")
    ]
    head = ("traffic", "arrangement", "seeds", "first guesses", "more than static", "the default has more")
    return f"{ABOUT}\n\n{table(head, rows)}" if rows else ""


def _row(name: str, one: Mapping[str, Any]) -> Sequence[str]:
    came = one["came"]
    more = difference(came["default_more"].get(DEFAULT.get(name, ""))) if name in DEFAULT else DASH
    return ARRANGEMENTS[name].title, str(one["seeds"]), number(came["level"]), difference(came["gain"]), more


def _rows(run: Found, domain: str | None = None) -> Rows:
    rows = np.array(run["stream"]).reshape(-1, 4)
    return rows if domain is None else rows[[one == domain for one in run["domains"]]]


def _share(rows: Rows) -> float:
    return float(rows[:, 1].sum() / max(rows[:, 0].sum(), 1e-9))
