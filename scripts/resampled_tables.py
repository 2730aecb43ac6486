"""Makes the table of further answers, of the file that `bench_resampled.py` writes."""

from __future__ import annotations

from typing import Any

from evidence.arrangements import ARRANGEMENTS
from evidence.streams import title_of
from markdown_tables import table

from moedraft.showcase.findings.estimates import change

WHERE = {"held_out": "held-out prompts, in the end", "came": "all requests, as they came"}
Key = tuple[str, str]  # pattern of traffic and arrangement


def resampled(found: dict[str, Any]) -> str:
    """First guesses with further answers, beside those of the same run without."""
    runs: dict[Key, dict[int, list[dict[str, Any]]]] = {}  # by count, those of each seed
    for run in found["runs"]:
        runs.setdefault((run["pattern"], run["arrangement"]), {}).setdefault(run["resampled"], []).append(run)
    rows = []
    for (pattern, name), by_count in runs.items():
        for count in sorted(set(by_count) - {0}):
            for pair in _paired(by_count.get(0, []), by_count[count]):
                cells = [title_of(pattern), ARRANGEMENTS[name].title, str(count), str(pair[0]["seed"])]
                rows.append(cells + [_beside(pair, place) for place in WHERE])
    head = ["traffic", "arrangement", "further answers to a prompt", "seed", *WHERE.values()]
    return f"{table(head, rows)}\n\n{note(found)}"


def _paired(
    before: list[dict[str, Any]], after: list[dict[str, Any]]
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Runs of the same seed."""
    known = {run["seed"]: run for run in before}
    return [(known[run["seed"]], run) for run in after if run["seed"] in known]


def _beside(pair: tuple[dict[str, Any], dict[str, Any]], place: str) -> str:
    """`.476 → .498 (+.014 to +.031)`"""
    without, with_them = ([(row[1], row[0]) for row in run[place]] for run in pair)
    one = change(without, with_them)
    gain = one.difference
    return f"{one.before.value:.3f} → {one.after.value:.3f} ({gain.low:+.3f} to {gain.high:+.3f})"


def note(found: dict[str, Any]) -> str:
    """On what it was measured."""
    run = found["runs"][0]
    return (
        f"First guesses, {run['requests']} requests, {len(run['held_out'])} held-out prompts, the target in "
        f"{run['dtype']}, {found['date']}. Intervals are 95 %, paired, over the prompts."
    )
