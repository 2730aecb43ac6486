#!/usr/bin/env python3
"""Measure what experts add to one adapter where there are many records of each domain.

    python scripts/bench_records.py --data ../shared/data --out results/records.json

All requests of a steady mix are known beforehand. The shared adapter and the experts learn from them jointly,
and so does one adapter that has as many weights, in as many steps, without a gate. After so many steps the
held-out prompts' answers are read twice: each arrangement guesses from the tokens that it serves with, and
then from all tokens that one of its adapters guesses. A run that the file of the results holds is not made
again. The target answers the prompts first, which takes a quarter of an hour on two cores for 2 000 of them;
640 steps take a quarter of an hour of one core.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from evidence import benches
from evidence.arrangements import ARRANGEMENTS, Arrangement
from evidence.command import Workplace, commit
from evidence.running import Run, Served, new_home
from evidence.streams import traffic

from moedraft.distill.features.expert_vocabularies import OWN_TOKENS
from moedraft.distill.measuring.measures import instead

PATTERN = "steady"
STEPS, HELD_OUT = 40, 50  # steps of an update; prompts of a domain
OWN, SAME = "own", "same"  # which tokens are guessed from


def learned(
    workplace: Workplace, arrangement: Arrangement, seed: int, moments: Sequence[int], held: Sequence[Served]
) -> Iterator[tuple[int, dict[str, Any]]]:
    """The arrangement learns; steps, and by which tokens are guessed from, the counts of each prompt."""
    torch.manual_seed(seed)
    stream = traffic(PATTERN, workplace.domains, workplace.args.requests, seed)
    routed = workplace.route(stream.registered, [query.prompt for query in stream.queries])
    records = workplace.bench.answers.records(stream.queries)
    with new_home(stream.registered) as store:
        one = Run(workplace.bench, arrangement, store, seed)
        one.feed([Served(record, name) for record, name in zip(records, routed, strict=True)])
        steps = 0
        while steps < moments[-1]:
            one.learn()
            steps += workplace.plan.steps
            if steps in moments:
                yield steps, {OWN: one.counts(held), SAME: from_all_tokens(one, held)}


@torch.no_grad()
def from_all_tokens(one: Run, held: Sequence[Served]) -> list[list[int]]:
    """As `Run.counts`, each owner guessing from every token that some adapter guesses.

    By prompt: first guesses tried, and drafts with a right token number 1, 2 and 3.
    """
    student, lessons, plan = one.trainer.student, one.trainer.lessons, one.trainer.plan
    rows: list[list[int]] = [[] for _ in held]
    for owner in sorted({one.owner(served) for served in held}):
        mine = [i for i, served in enumerate(held) if one.owner(served) == owner]
        with instead(student, one.serving(owner)):
            student.use_lists({owner: student.vocabulary})
            for first in range(0, len(mine), plan.rows):
                some = mine[first : first + plan.rows]
                chosen = [held[i].record for i in some]
                found = lessons.guessed(chosen, [owner] * len(chosen), one.measure.depth, plan.max_tokens)[1]
                for i, counted in zip(some, found.counts.tolist(), strict=True):
                    rows[i] = [counted[0][1], *(right for right, _ in counted)]
    return rows


def main() -> None:
    parser = benches.parser(__doc__, domains="sql_en,code_python,docs_fr,docs_ja")
    parser.add_argument("--arrangements", default="mixed-replay:wide,joint:wide")
    parser.add_argument("--steps", default="80,160,320,480,640", help=f"multiples of {STEPS}")
    parser.set_defaults(requests=2000, dtype="auto")
    args = parser.parse_args()
    moments, names = sorted({int(one) for one in args.steps.split(",")}), args.arrangements.split(",")
    if unknown := [name for name in names if name not in ARRANGEMENTS]:
        parser.error(f"there is no arrangement {unknown[0]}; there are {', '.join(ARRANGEMENTS)}.")
    if moments[0] <= 0 or any(one % STEPS for one in moments):
        parser.error(f"an update makes {STEPS} steps; --steps are multiples of that.")
    if not (args.data / "stream").is_dir():
        parser.error(f"no stream/ folder in {args.data}; name the data with --data.")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    workplace = benches.workplace(args, "--steps", STEPS, "--heldout", HELD_OUT)
    for seed in range(args.seeds):
        for name in names:
            measure(workplace, name, seed, moments, args.out)


def measure(workplace: Workplace, name: str, seed: int, moments: Sequence[int], out: Path) -> None:
    """Add one arrangement's run to the results, unless it is there."""
    args = workplace.args
    which = {"target": Path(args.target).name, "arrangement": name, "seed": seed, "requests": args.requests}
    which |= {"domains": args.domains, "dtype": workplace.precision, "strength": workplace.manner.strength}
    which |= {"own_tokens": OWN_TOKENS, "steps": list(moments)}
    known = json.loads(out.read_text(encoding="utf-8"))["runs"] if out.exists() else []
    if any(which.items() <= run.items() for run in known):
        return
    stream = traffic(PATTERN, workplace.domains, args.requests, seed)
    held, found = workplace.held_out(PATTERN, stream, workplace.domains), {}
    for steps, counts in learned(workplace, ARRANGEMENTS[name], seed, moments, held):
        found[str(steps)] = counts
        shares = {by: sum(r[1] for r in rows) / sum(r[0] for r in rows) for by, rows in counts.items()}
        print(name, seed, steps, {by: round(share, 4) for by, share in shares.items()}, flush=True)
    made = which | {"commit": commit(), "counts": found}
    known = json.loads(out.read_text(encoding="utf-8"))["runs"] if out.exists() else []  # others may run too
    report = {"date": datetime.now(UTC).date().isoformat(), "runs": [*known, made]}
    scratch = out.with_suffix(f".{os.getpid()}.tmp")
    scratch.write_text(json.dumps(report, separators=(",", ":")) + "\n", encoding="utf-8")
    scratch.rename(out)


if __name__ == "__main__":
    main()
