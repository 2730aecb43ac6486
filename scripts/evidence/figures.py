"""From the files of single runs to figures with intervals. Knows no model.

A prompt's counts are added up over the seeds, and the bootstrap of `moedraft.showcase.findings.estimates`
draws prompts. So an interval says how far other prompts might lead; how far other seeds might, the seeds' own
figures beside it say. A difference is called sure only where the interval excludes zero and no seed
contradicts it.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any

import numpy as np

from moedraft.showcase.findings.estimates import Estimate, PairedChange, change, ratio

Found = Mapping[str, Any]  # one run's file
Rows = np.ndarray  # int [prompts, 4]: tried first guesses, drafts with a right token number 1, 2, 3
Part = Callable[[Rows], list[tuple[float, float]]]
Wait = int | str | None  # requests, or NEVER; None: not measured
NEVER = "never"


def first_guesses(rows: Rows) -> list[tuple[float, float]]:
    """Right first guesses out of all, by prompt."""
    return [(float(row[1]), float(row[0])) for row in rows]


def tokens_per_step(rows: Rows) -> list[tuple[float, float]]:
    """Tokens of a target step that verifies three drafted tokens, begun at every token; by prompt."""
    return [(float(row.sum()), float(row[0])) for row in rows]


@dataclass(frozen=True)
class Compared:
    """Two arrangements on the same prompts, and each seed's own difference."""

    change: PairedChange
    seeds: tuple[float, ...]

    @property
    def verdict(self) -> str:
        """`better` or `worse` where the interval and every seed say so, else `open`."""
        said = self.change.verdict
        sign = {"better": 1, "worse": -1}.get(said, 0)
        return said if all(sign * one > 0 for one in self.seeds) else "open"


def in_json(one: Estimate) -> dict[str, float]:
    return {"value": one.value, "low": one.low, "high": one.high}


def compared_in_json(one: Compared | None) -> dict[str, Any] | None:
    if one is None:
        return None
    return in_json(one.change.difference) | {"seeds": list(one.seeds), "verdict": one.verdict}


class Runs:
    """All runs that were found, by pattern and arrangement."""

    def __init__(self, found: Iterable[Found]) -> None:
        self.by_name: dict[tuple[str, str], dict[int, Found]] = defaultdict(dict)
        for one in found:
            self.by_name[one["pattern"], one["arrangement"]][one["seed"]] = one

    @classmethod
    def read(cls, folder: Path) -> Runs:
        return cls(json.loads(file.read_text(encoding="utf-8")) for file in sorted(folder.glob("*.json")))

    def seeds(self, pattern: str, *arrangements: str) -> list[int]:
        """The seeds that all of these were run with."""
        sets = [set(self.by_name.get((pattern, name), {})) for name in arrangements]
        return sorted(set.intersection(*sets)) if sets else []

    def of(self, pattern: str, arrangement: str, seeds: Sequence[int] | None = None) -> list[Found]:
        runs = self.by_name.get((pattern, arrangement), {})
        return [runs[seed] for seed in (sorted(runs) if seeds is None else seeds)]

    def patterns(self) -> list[str]:
        return list(dict.fromkeys(pattern for pattern, _ in self.by_name))


def rows_at(run: Found, point: int = -1, domains: Iterable[str] | None = None) -> Rows:
    """Counts at a point of the curve, of the held-out prompts of these domains."""
    wanted = set(run["held_out"] if domains is None else domains)
    pairs = zip(run["held_out"], run["curve"][point]["counts"], strict=True)
    return np.array([counts for name, counts in pairs if name in wanted]).reshape(-1, 4)


def share(rows: Sequence[Rows]) -> float:
    """Right first guesses out of all; as `level`, without an interval, which takes far longer."""
    return _value(first_guesses(np.concatenate(rows)))


def level(runs: Sequence[Found], part: Part = first_guesses, **where: Any) -> Estimate:
    return ratio(part(reduce(add, [rows_at(run, **where) for run in runs])))


def compared(before: Sequence[Rows], after: Sequence[Rows], part: Part = first_guesses) -> Compared:
    """By seed: counts of the same prompts, without and with."""
    whole = change(part(reduce(add, before)), part(reduce(add, after)))
    seeds = tuple(_value(part(b)) for b in after), tuple(_value(part(b)) for b in before)
    return Compared(whole, tuple(a - b for a, b in zip(*seeds, strict=True)))


def against(
    runs: Runs, pattern: str, one: str, other: str, part: Part = first_guesses, **where: Any
) -> Compared | None:
    """What `other` has more than `one` at the end, on the seeds of both; None where there are none."""
    seeds = runs.seeds(pattern, one, other)
    if not seeds:
        return None
    pair = [[rows_at(run, **where) for run in runs.of(pattern, name, seeds)] for name in (one, other)]
    return compared(pair[0], pair[1], part)


@dataclass(frozen=True)
class Lowest:
    """Where a domain stood lowest, of all measurements after the first update."""

    requests: int
    compared: Compared
    served: tuple[int, ...]  # requests of the domain until then, by seed
    measured: tuple[int, ...]  # after how many requests there was a measurement


def lowest(runs: Runs, pattern: str, one: str, other: str, domain: str) -> Lowest | None:
    """The point at which `other` has least more than what `one` has at its end; `one` learns nothing."""
    seeds = runs.seeds(pattern, one, other)
    still, found = runs.of(pattern, one, seeds), runs.of(pattern, other, seeds)
    before = [rows_at(run, domains=[domain]) for run in still]
    lows, points = [], common_points(found)
    for requests in points:
        after = [rows_at(run, point_at(run, requests), [domain]) for run in found]
        served = tuple(run["domains"][:requests].count(domain) for run in found)
        lows.append(Lowest(requests, compared(before, after), served, tuple(points)))
    return min(lows, key=lambda low: low.compared.change.difference.value, default=None)


def measured_at(found: Sequence[Found]) -> list[int]:
    """Numbers of requests after which all of these runs were measured."""
    points = [{int(point["requests"]) for point in run["curve"]} for run in found]
    return sorted(set.intersection(*points)) if points else []


def mean_at(found: Sequence[Found], requests: int, part: Part) -> float:
    """A share after so many requests, over the prompts of all these runs; without an interval."""
    rows = [rows_at(run, point_at(run, requests)) for run in found]
    return _value(part(np.concatenate(rows)))


def common_points(found: Sequence[Found]) -> list[int]:
    """As `measured_at`, with an update before."""
    return [n for n in measured_at(found) if all(run["curve"][point_at(run, n)]["updates"] for run in found)]


def point_at(run: Found, requests: int) -> int:
    return next(i for i, point in enumerate(run["curve"]) if point["requests"] == requests)


def near(run: Found, turn: int) -> list[int]:
    """The points of the curve from the turn on until a window after it; empty: the turn was not measured."""
    last = turn + run["settings"]["every"]
    return [i for i, point in enumerate(run["curve"]) if turn <= point["requests"] <= last]


def at_turn(run: Found, turn: int) -> int | None:
    """The point at the turn at which nothing that came later had been learned from; None: not measured."""
    return next((i for i in near(run, turn) if _learned_until(run, i) <= turn), None)


def after_service(run: Found, turn: int) -> int | None:
    """The point at the turn at which all that came before had been learned from; None: not measured."""
    return next((i for i in near(run, turn) if _learned_until(run, i) >= turn), None)


def _learned_until(run: Found, point: int) -> int:
    """After how many requests the last update before this point was made."""
    updates = run["curve"][point]["updates"]
    return int(run["updates"][updates - 1]["requests"]) if updates else 0


def forgotten(runs: Sequence[Found]) -> Compared | None:
    """What domains lost while they were silent: from when they were last served to the last measurement.

    After a return: to the moment before it. None for traffic without turns and turns not measured.
    """
    pairs = [pair for run in runs for pair in [_silence(run)] if pair is not None]
    return compared([b for b, _ in pairs], [a for _, a in pairs]) if pairs else None


def _silence(run: Found) -> tuple[Rows, Rows] | None:
    if run["pattern"] == "shift":
        begin, end = after_service(run, run["turns"][0]), at_turn(run, run["turns"][1])
        if begin is None or end is None:
            return None
        return rows_at(run, begin, run["absent"]), rows_at(run, end, run["absent"])
    if run["pattern"] != "one-by-one":
        return None
    before, after = [], []
    for name in sorted(set(run["domains"])):
        served = len(run["domains"]) - run["domains"][::-1].index(name)
        point = after_service(run, served)
        if point is None:
            return None
        silent = served < len(
            run["domains"]
        )  # prompts of the last one stay in their places and count nothing
        before.append(rows_at(run, point, [name]) * silent)
        after.append(rows_at(run, -1, [name]) * silent)
    return np.concatenate(before), np.concatenate(after)


def recovery(run: Found, within: float = 0.02) -> Wait:
    """Requests after the return until what returned is within `within` of what it had."""
    first, back = run["turns"]
    begin = after_service(run, first)
    if begin is None:
        return None
    wanted = _value(first_guesses(rows_at(run, begin, run["absent"]))) - within
    return _requests_until(run, back, run["absent"], wanted)


def arrival(run: Found, bound: Found, share: float = 0.8) -> Wait:
    """Requests after a new domain came until it has `share` of its offline gain."""
    names = [run["newcomer"]]
    begin = _value(first_guesses(rows_at(run, 0, names)))
    most = _value(first_guesses(rows_at(bound, -1, names)))
    return _requests_until(run, run["turns"][0], names, begin + share * (most - begin))


def _requests_until(run: Found, turn: int, names: Sequence[str], wanted: float) -> Wait:
    """By the first measurement from the turn on that shows it, so at most so many."""
    measured = near(run, turn)
    if not measured or not run["updates"]:
        return None
    for point in range(measured[0], len(run["curve"])):
        if _value(first_guesses(rows_at(run, point, names))) >= wanted:
            return int(run["curve"][point]["requests"]) - turn
    return NEVER


def stream_part(runs: Sequence[Found], first: float, last: float) -> Estimate:
    """First guesses on the requests themselves, each before it was learned from; a part of the stream."""
    rows = [
        np.array(run["stream"][int(first * len(run["stream"])) : int(last * len(run["stream"]))])
        for run in runs
    ]
    return ratio(first_guesses(np.concatenate(rows)))


def stream_gain(
    still: Sequence[Found], learned: Sequence[Found], width: int, domains: Iterable[str] | None = None
) -> list[tuple[float, float]]:
    """What the second runs have more on the requests themselves, by windows of `width`: middle, gain.

    Both are of the same seeds. Windows without a request of these domains are left out.
    """
    pairs = list(zip(still, learned, strict=True))
    longest = max((len(run["stream"]) for run in learned), default=0)
    found = []
    for first in range(0, longest, width):
        rows = [
            (before["stream"][i], after["stream"][i])
            for before, after in pairs
            for i in range(first, min(first + width, len(after["stream"]), len(before["stream"])))
            if domains is None or after["domains"][i] in domains
        ]
        if rows:
            before, after = (share([np.array([row[k] for row in rows])]) for k in (0, 1))
            found.append((first + width / 2, after - before))
    return found


def cost(run: Found) -> float:
    """Operations of all updates out of those of the target for the requests that fed them.

    They were counted for one update, the second; see `running._counted`.
    """
    return float(run["operations"] * len(run["updates"]) / run["target_operations"])


def cpu_seconds(run: Found) -> float:
    return float(sum(update["cpu_seconds"] for update in run["updates"]))


def _value(counts: list[tuple[float, float]]) -> float:
    table = np.array(counts).sum(0)
    return float(table[0] / max(table[1], 1e-9))
