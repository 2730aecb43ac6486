#!/usr/bin/env python3
"""Measure what it brings to learn from further answers of the target to the requests (`resampled_answers`).

    python scripts/bench_resampled.py --data ../shared/data --out results/resampled.json

Arrangements learn from a stream as in `scripts/evidence.py`, with as many updates and steps: from the answers
that were served alone, and from further ones as well. Given are first guesses on held-out prompts in the end,
and on the requests themselves, each before it was learned from. What the file of the results holds already is
not measured again; with --reuse the same goes for runs in the folder of some evidence.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from evidence import benches
from evidence.arrangements import SERVED
from evidence.command import Workplace, settings
from evidence.further import KeptFurther

Run = Mapping[str, Any]


def kept(run: Run, which: Mapping[str, Any]) -> dict[str, Any]:
    """What is kept of a run: counts by prompt, as in `evidence.running.Run.counts`."""
    return {**which, "held_out": run["curve"][-1]["counts"], "came": run["stream"]}


def reused(workplace: Workplace, folder: Path, which: Mapping[str, Any]) -> Run | None:
    """A run of the evidence with the same settings, if there is one."""
    now = workplace.manner
    wanted = {"settings": settings(workplace.args), "strength": now.strength}
    wanted |= {"own_tokens": now.own_tokens, "text_tokens": now.text_tokens}
    for file in sorted((folder / "runs").glob("*.json")):
        run: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        found = {key: run[key] for key in ("pattern", "arrangement", "seed")}
        found |= {"requests": run["settings"]["requests"], "resampled": run.get("resampled", 0)}
        found |= {"target": Path(run["settings"]["target"]).name, "dtype": run.get("precision", "")}
        if found == which and wanted.items() <= run.items():
            return run
    return None


def made(workplace: Workplace, which: Mapping[str, Any]) -> Run:
    """A new run."""
    count = which["resampled"]
    further = KeptFurther(workplace.bench.answers, count) if count else None
    workplace.bench = replace(workplace.bench, further=further)
    return workplace.run(which["pattern"], which["arrangement"], which["seed"])


def share(rows: Sequence[Sequence[float]]) -> float:
    """First guesses that are right."""
    return sum(row[1] for row in rows) / sum(row[0] for row in rows)


def main() -> None:
    parser = benches.parser(__doc__, "steady,one-by-one,shift,drift")
    parser.add_argument("--arrangements", default=f"mixed-replay:wide,{SERVED}")
    parser.add_argument("--counts", type=int, nargs="+", default=[0, 2], help="further answers to a prompt")
    parser.add_argument("--reuse", type=Path, nargs="*", default=[], help="folders of evidence")
    args = parser.parse_args()
    if args.resampled:
        parser.error("--counts says from how many further answers is learned.")
    workplace = benches.workplace(args)
    report = json.loads(args.out.read_text(encoding="utf-8")) if args.out.exists() else {"runs": []}
    for one in benches.runs(args, workplace):
        for which in ({**one, "resampled": count} for count in args.counts):
            if any(which.items() <= run.items() for run in report["runs"]):
                continue
            run = next((found for folder in args.reuse if (found := reused(workplace, folder, which))), None)
            report["runs"].append(kept(run or made(workplace, which), which))
            report["date"] = datetime.now(UTC).date().isoformat()
            args.out.write_text(json.dumps(report, separators=(",", ":")) + "\n", encoding="utf-8")
            end, came = (share(report["runs"][-1][place]) for place in ("held_out", "came"))
            print(*which.values(), f"in the end {end:.4f}, as they came {came:.4f}", flush=True)


if __name__ == "__main__":
    main()
