"""First guesses on the requests themselves, each before anything was learned from it: what users get."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from evidence.arrangements import ARRANGEMENTS, GATED, ONE_ADAPTER, SERVED, STATIC
from evidence.figures import Compared, Found, Rows, Runs, first_guesses
from evidence.streams import ONLY, POISONED, title_of
from evidence.words import DASH, difference, number, table
from moedraft.showcase.findings.estimates import Estimate, change, ratio

ONE_WIDE, UNGATED = "mixed-replay:wide", "joint:wide"
SHOWN = (STATIC, ONE_ADAPTER, GATED, ONE_WIDE, UNGATED, SERVED)
DEFAULT = {ONE_ADAPTER: GATED, ONE_WIDE: SERVED, UNGATED: SERVED}  # what a row is compared with
ABOUT = (
    "## On the requests as they came\n\nThe figures above are of held-out prompts of all domains, also of "
    "those that have not come yet or come no more. These are of the requests themselves, each guessed by "
    "what served when it came, before anything was learned from it: what users get, from the first request "
    "on. Intervals are by a paired bootstrap over the requests of all seeds; the seeds draw from the same "
    "prompts, so they are somewhat too narrow."
)
Whole = dict[str, Any]


def of_runs(runs: Runs, pattern: str, name: str) -> dict[str, Any]:
    """The level of an arrangement, its gain on static, and what the default of its kind has more."""
    found = runs.of(pattern, name)
    if not found or any(not run["stream"] for run in found):
        return {}
    default = DEFAULT.get(name)
    return {
        "level": _estimate(ratio(first_guesses(np.concatenate([_rows(run) for run in found])))),
        "gain": None if name == STATIC else _said(compared(runs, pattern, STATIC, name)),
        "default_more": {default: _said(compared(runs, pattern, name, default))} if default else {},
    }


def compared(runs: Runs, pattern: str, one: str, other: str) -> Compared | None:
    """What `other` has more than `one`, request by request; None without seeds of both."""
    seeds = runs.seeds(pattern, one, other)
    pairs = [
        (_rows(a), _rows(b))
        for a, b in zip(runs.of(pattern, one, seeds), runs.of(pattern, other, seeds), strict=True)
        if len(a["stream"]) == len(b["stream"]) > 0
    ]
    if not pairs:
        return None
    before, after = (np.concatenate([pair[side] for pair in pairs]) for side in (0, 1))
    each = tuple(_share(b) - _share(a) for a, b in pairs)
    return Compared(change(first_guesses(before), first_guesses(after)), each)


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


def _rows(run: Found) -> Rows:
    return np.array(run["stream"]).reshape(-1, 4)


def _share(rows: Rows) -> float:
    return float(rows[:, 1].sum() / max(rows[:, 0].sum(), 1e-9))


def _estimate(one: Estimate) -> dict[str, float]:
    return {"value": one.value, "low": one.low, "high": one.high}


def _said(one: Compared | None) -> dict[str, Any] | None:
    if one is None:
        return None
    return _estimate(one.change.difference) | {"seeds": list(one.seeds), "verdict": one.verdict}
