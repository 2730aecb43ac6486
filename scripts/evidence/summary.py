"""All figures of all runs as one JSON object; the document is written from it and from nothing else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from operator import itemgetter
from statistics import median
from typing import Any

from evidence import boundaries, came, growth, tokens, withheld
from evidence.arrangements import (
    ARRANGEMENTS,
    BOUNDS,
    EQUAL_COST,
    GATED,
    JOINT,
    OFFLINE,
    OFFLINE_WIDE,
    ONE_ADAPTER,
    SERVED,
    SERVED_EQUAL_COST,
    STATIC,
)
from evidence.comparable import BEFORE_RATE
from evidence.figures import (
    Found,
    Runs,
    against,
    arrival,
    compared_in_json,
    cost,
    cpu_seconds,
    forgotten,
    in_json,
    level,
    lowest,
    measured_at,
    recovery,
    stream_part,
    tokens_per_step,
)
from moedraft.distill.assembly import WHOLE
from moedraft.distill.judging.gate import CONFIRMED

TENTH = 0.1
BEFORE = "bfloat16"  # of the target, in runs that do not tell it: they were made on one kind of processor
SEVERAL = 2  # domains that differ in the same thing
PUBLISHED = ("promote", "along")  # decisions of the gate after which a version serves


def summary(runs: Runs) -> dict[str, Any]:
    """By pattern and arrangement, with the settings and what the classifier was worth."""
    every = [run for found in runs.by_name.values() for run in found.values()]
    patterns = {
        pattern: {name: of_runs(runs, pattern, name) for p, name in runs.by_name if p == pattern}
        for pattern in runs.patterns()
    }
    return {
        "settings": every[0]["settings"],
        "machine": every[0]["machine"],
        "torch": every[0]["torch"],
        "runs": len(every),
        "unmarked": sum(not run.get("commit") for run in every),  # files that do not tell the code's commit
        "precisions": {
            pattern: sorted({run.get("precision", BEFORE) for run in every if run["pattern"] == pattern})
            for pattern in patterns
        },
        "strengths": sorted({run.get("strength", WHOLE) for run in every if run["updates"]}),
        "rates": sorted({run.get("learning_rate", BEFORE_RATE) for run in every if run["updates"]}),
        "resampled": {pattern: _resampled(every, pattern) for pattern in patterns},
        "unsure": {pattern: _unsure(every, pattern) for pattern in patterns},
        "router": {pattern: routed_right(runs, pattern) for pattern in patterns},
        "patterns": patterns,
        "withheld": _withheld(runs),
    }


def _withheld(runs: Runs) -> dict[str, Any]:
    """The rivals of the default as if they were withheld from new domains, by pattern."""
    if not any(name == SERVED for _, name in runs.by_name):
        return {}
    changed = withheld.runs_of(runs)
    found: dict[str, Any] = {}
    for pattern, name in changed.by_name:
        if name in withheld.RIVALS:
            run = {"run": withheld.how_many_run(runs, pattern, name)}
            found.setdefault(pattern, {})[name] = of_runs(changed, pattern, name) | run
    return found


def _resampled(every: Sequence[Found], pattern: str) -> list[int]:
    """Further answers to a prompt that the runs of this pattern learned from; older runs tell none."""
    return sorted({run.get("resampled", 0) for run in every if run["pattern"] == pattern and run["updates"]})


def _unsure(every: Sequence[Found], pattern: str) -> list[int | None]:
    """How many requests taught by probability in the runs of this pattern; None: such as do not tell."""
    mine = (run for run in every if run["pattern"] == pattern and run["updates"])
    found = {run.get("unsure") for run in mine if ARRANGEMENTS[run["arrangement"]].experts}
    return sorted(found, key=lambda count: -1 if count is None else count)


def of_runs(runs: Runs, pattern: str, name: str) -> dict[str, Any]:
    """One arrangement under one pattern of traffic; None for what cannot be said."""
    found, held = runs.of(pattern, name), _held(runs, pattern)
    gain = compared_in_json(against(runs, pattern, STATIC, name))
    updates = sum(len(run["updates"]) for run in found)
    result = {
        "seeds": len(found),
        "first_guess": in_json(level(found)),
        "tokens": in_json(level(found, tokens_per_step)),
        "gain": gain,
        "tokens_gain": compared_in_json(against(runs, pattern, STATIC, name, tokens_per_step)),
        "default_more": {
            default: compared_in_json(against(runs, pattern, name, default))
            for default in (JOINT, GATED, SERVED, EQUAL_COST, SERVED_EQUAL_COST)
            if default != name
        },
        "came": came.of_runs(runs, pattern, name),
        "domains": {d: compared_in_json(against(runs, pattern, STATIC, name, domains=[d])) for d in held},
        "lowest": {d: _lowest(runs, pattern, name, d) for d in held},
        "measured": measured_at(found),
        "grown": growth.grown(runs, pattern, name),
        "forgotten": compared_in_json(forgotten(found)),
        "seconds": median(run.get("seconds", 0) for run in found),
        "updates": updates,
        "cpu_seconds": sum(map(cpu_seconds, found)),
        "cost": sum(map(cost, found)) / len(found),
        "decisions": dict(sum((Counter(u["decisions"]) for run in found for u in run["updates"]), Counter())),
        "shared": dict(Counter(u["shared"] for run in found for u in run["updates"])),
        "record": record(found),
    }
    if gain is not None and updates:
        per_run = gain["value"] / (updates / len(found))
        result |= {
            "gain_per_update": per_run,
            "gain_per_minute": 60 * gain["value"] * len(found) / result["cpu_seconds"],
        }
    result |= {"groups": _groups(runs, pattern, name, held), "told": _tokens(found)}
    if pattern == boundaries.PATTERN:
        result["boundaries"] = boundaries.of_runs(runs, name)
    return result | _moving(runs, pattern, name, found) | _streamed(found)


def _groups(runs: Runs, pattern: str, name: str, held: Sequence[str]) -> dict[str, Any]:
    """More first guesses than static, and than one adapter, where domains differ in language or in topic."""
    parts = {"language": [d for d in held if d.startswith("docs")]}
    parts["topic"] = [d for d in held if d not in parts["language"]]
    if min(map(len, parts.values())) < SEVERAL or name == STATIC:
        return {}
    return {
        group: {
            "seeds": len(runs.seeds(pattern, STATIC, name)),
            "gain": compared_in_json(against(runs, pattern, STATIC, name, domains=domains)),
            "more": compared_in_json(against(runs, pattern, ONE_ADAPTER, name, domains=domains))
            if name != ONE_ADAPTER
            else None,
        }
        for group, domains in parts.items()
    }


def _tokens(found: Sequence[Found]) -> dict[str, Any]:
    """Of the most frequent tokens and the others: their share, precision and recall before and after."""
    rows = next((run["tokens"] for run in found if "tokens" in run), None)
    if rows is None:
        return {}
    before, after = (tokens.rates(rows[when]) for when in ("before", "after"))
    return {
        what: {"share": of["share"]}
        | {key: {"before": of[key], "after": after[what][key]} for key in ("precision", "recall")}
        for what, of in before.items()
    }


def _moving(runs: Runs, pattern: str, name: str, found: Sequence[Found]) -> dict[str, Any]:
    """After how many requests it was back, by seed; None: not measured. Of what learns while it serves."""
    if name in (STATIC, *BOUNDS):
        return {}
    if pattern == "shift":
        return {"recovery": [recovery(run) for run in found]}
    if pattern == "new-domain":
        wide = ARRANGEMENTS[name].shared > 1 and runs.seeds(pattern, name, OFFLINE_WIDE)
        bound = OFFLINE_WIDE if wide else OFFLINE
        seeds = runs.seeds(pattern, name, bound)
        pairs = zip(runs.of(pattern, name, seeds), runs.of(pattern, bound, seeds), strict=True)
        return {"arrival": [arrival(run, bound) for run, bound in pairs]}
    return {}


def record(found: Sequence[Found]) -> dict[str, Any]:
    """What the gate had measured of the versions that were published, by decision.

    Gains are tokens per step on held-out records, and their intervals the gate's, of 80 %. Empty for runs
    that are older than this record.
    """
    every = [one for run in found for u in run["updates"] for one in u.get("outcomes", ())]
    result = {}
    for decision in PUBLISHED:
        mine = [one for one in every if one["decision"] == decision and one["gain"] is not None]
        if mine:
            gains = [one["gain"] for one in mine]
            least = min(mine, key=itemgetter("gain"))
            result[decision] = {
                "versions": len(mine),
                "gain": sum(gains) / len(gains),
                "least": least["gain"],
                "least_interval": [least["low"], least["high"]],
                "sure": sum(one["low"] > 0 for one in mine),
                "surely_worse": sum(one["high"] < 0 for one in mine),
                "witnessed": witnessed(mine),
            }
    return result


def witnessed(published: Sequence[dict[str, Any]]) -> list[int] | None:
    """Of those that were judged by the right tokens' probability too and are not sure by gain: how many are
    sure by it, and how many there are. None where runs did not keep it.
    """
    judged = [one for one in published if one.get("witness") is not None]
    unsure = [one for one in judged if one["low"] <= 0]
    return [sum(one["witness"] >= CONFIRMED for one in unsure), len(unsure)] if judged else None


def _lowest(runs: Runs, pattern: str, name: str, domain: str) -> dict[str, Any] | None:
    one = lowest(runs, pattern, STATIC, name, domain) if name != STATIC else None
    if one is None:
        return None
    places = {"requests": one.requests, "served": list(one.served), "measured": list(one.measured)}
    return (compared_in_json(one.compared) or {}) | places


def _streamed(found: Sequence[Found]) -> dict[str, Any]:
    """On the requests as they came: the first and the last tenth."""
    if any(len(run["stream"]) < 1 / TENTH for run in found):
        return {}
    return {
        "first_tenth": in_json(stream_part(found, 0, TENTH)),
        "last_tenth": in_json(stream_part(found, 1 - TENTH, 1)),
    }


def routed_right(runs: Runs, pattern: str) -> float:
    """Share of the requests that the classifier sent to their true domain."""
    found = [run for (p, _), by_seed in runs.by_name.items() if p == pattern for run in by_seed.values()]
    pairs = [pair for run in found for pair in zip(run["domains"], run["routed"], strict=True)]
    return float(sum(a == b for a, b in pairs) / len(pairs))


def _held(runs: Runs, pattern: str) -> list[str]:
    some = next(run for (p, _), found in runs.by_name.items() if p == pattern for run in found.values())
    return list(dict.fromkeys(some["held_out"]))
