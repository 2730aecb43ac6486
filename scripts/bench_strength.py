#!/usr/bin/env python3
"""Measure how strong adapters should be published: what they add, multiplied by factors below 1.

    python scripts/bench_strength.py --data ../shared/data --out results/strength.json

Arrangements learn from a stream as in `scripts/evidence.py`, and publish what they learned at full strength.
When all is learned, the answers to the held-out prompts are read once for each factor of all that serves, the
shared adapter and the experts. What the file of the results holds already is not measured again. With a
--temperature the answers are sampled, and a guess counts by how likely a drawn one is accepted.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from bench_mixtures import scaled
from evidence import benches
from evidence.arrangements import at_full_strength
from evidence.command import Workplace
from evidence.running import Run, Served

FACTORS = (1.0, 0.9, 0.85, 0.8, 0.65)


def by_factor(one: Run, held: Sequence[Served], factors: Sequence[float] = FACTORS) -> dict[str, Any]:
    """By factor, the counts of each prompt as in `Run.counts`."""
    return {str(factor): counts(one, held, factor) for factor in factors}


def counts(one: Run, held: Sequence[Served], factor: float) -> list[list[int]]:
    """By prompt: first guesses tried, and drafts with a right token number 1, 2 and 3."""
    rows: list[list[int]] = [[] for _ in held]
    for owner in sorted({one.owner(served) for served in held}):
        mine = [i for i, served in enumerate(held) if one.owner(served) == owner]
        serving = scaled(one.serving(owner), owner, factor, factor)
        found = one.measure(serving, owner, [held[i].record for i in mine], lambda: None).counts
        for i, counted in zip(mine, found.tolist(), strict=True):
            rows[i] = [counted[0][1], *(right for right, _ in counted)]
    return rows


def share(rows: Sequence[Sequence[int]]) -> float:
    """First guesses that are right."""
    table = np.array(rows)
    return float(table[:, 1].sum() / table[:, 0].sum())


def main() -> None:
    parser = benches.parser(__doc__, "steady,crossed,reworded,zipf,unregistered", samples=True)
    parser.add_argument("--arrangements", default="joint+gate,mixed-replay")
    args = parser.parse_args()
    workplace = benches.workplace(args)
    # Runs of greedy answers tell no temperature, and those that learned from no further answers no number.
    how = {"temperature": args.temperature, "resampled": args.resampled}
    for which in benches.runs(args, workplace):
        measure(workplace, which | {name: value for name, value in how.items() if value}, args.out)


def measure(workplace: Workplace, which: dict[str, Any], out: Path) -> None:
    """Add the run `which` to the results, unless it is there."""
    report = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {"runs": []}
    apart = ("temperature", "resampled")
    same = (run for run in report["runs"] if all(run.get(key) == which.get(key) for key in apart))
    if any(which.items() <= run.items() for run in same):
        return
    arrangement = at_full_strength(which["arrangement"])
    found = workplace.run(which["pattern"], arrangement, which["seed"], by_factor)["at_end"]
    print(*which.values(), {factor: round(share(rows), 4) for factor, rows in found.items()}, flush=True)
    report["runs"].append(which | {"counts": found})
    report["date"] = datetime.now(UTC).date().isoformat()
    out.write_text(json.dumps(report, separators=(",", ":")) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
