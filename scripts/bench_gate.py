#!/usr/bin/env python3
"""What the gate sees of an update, beside what the update truly gains on prompts that it never saw.

    python scripts/bench_gate.py --data ../shared/data --out results/gate.json

Runs of `scripts/evidence.py` (joint learning with the gate) on several patterns of traffic. After each update
the candidate is also measured on 40 held-out prompts of each domain that has had requests, weighed by its
share of these. By update: the gain in tokens per step and the rise of the right tokens' probability, both on
the gate's records and in truth, and how sure the gate was. A run that is done is not made again.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from evidence import command, running
from evidence.arrangements import ARRANGEMENTS, GATED
from evidence.running import Served

from moedraft.core import SHARED
from moedraft.distill.judging.gate import Verdict, compare
from moedraft.distill.judging.judge import Judge
from moedraft.distill.judging.options import Options
from moedraft.distill.judging.together import shares_of
from moedraft.distill.measuring.figures import Measured, expected_tokens, joined
from moedraft.distill.measuring.remembered import Remembered
from moedraft.storage.versions.candidate import Candidate

RUNS = (
    "shift:0,shift:1,shift:2,shift:3,one-by-one:0,one-by-one:1,one-by-one:2,one-by-one:3,steady:0,"
    "poison-noise:0,poison-labels:0,poison-flood:0"
)


OLDER = {"target": "smollm2", "arrangement": GATED}  # of files that do not tell it


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="folder with stream/ and dev/")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cache", type=Path, default=Path("~/.cache/moedraft-evidence").expanduser())
    parser.add_argument("--runs", default=RUNS, help="patterns of traffic and seeds")
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--arrangement", default=GATED, help="one with the gate, as in evidence.py")
    parser.add_argument("--dtype", default="auto", help="of the target, as in evidence.py")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    if args.arrangement not in ARRANGEMENTS or not ARRANGEMENTS[args.arrangement].gate:
        parser.error(f"there is no arrangement {args.arrangement} with a gate.")
    torch.set_num_threads(args.threads)
    usual = ["--data", str(args.data), "--out", str(args.out), "--cache", str(args.cache)]
    given = [*usual, "--target", args.target, "--dtype", args.dtype]
    workplace = command.Workplace(command.arguments(given))
    which = {"target": args.target, "arrangement": args.arrangement}
    found = json.loads(args.out.read_text()) if args.out.exists() else {**which, "runs": {}}
    if {key: found.get(key, old) for key, old in OLDER.items()} != which:
        parser.error(f"{args.out} is of another target or arrangement; name another --out.")
    for name in args.runs.split(","):
        if name not in found["runs"]:
            pattern, seed = name.rsplit(":", 1)
            updates = looked_at(workplace, pattern, args.arrangement, int(seed))
            words = {"commit": command.commit(), "precision": workplace.precision}
            found["runs"][name] = words | {"updates": updates}
            args.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
            print(f"{name}: {len(updates)} updates", flush=True)


def looked_at(
    workplace: command.Workplace, pattern: str, arrangement: str, seed: int
) -> list[dict[str, Any]]:
    """One run's updates."""
    watched: list[Watched] = []
    held: list[Served] = []
    held_out = workplace.held_out

    def remember(*args: Any) -> list[Served]:
        held[:] = held_out(*args)
        return list(held)

    def watch(*args: Any, **options: Any) -> Watched:
        watched.append(Watched(held, *args, **options))
        return watched[-1]

    with patch.object(workplace, "held_out", remember), patch.object(running, "Judge", watch):
        workplace.run(pattern, arrangement, seed)
    return watched[0].rows


class Watched(Judge):
    """The gate, and beside each of its decisions what the candidates truly gain."""

    def __init__(self, held: Sequence[Served], *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.held = held
        self.truth = Remembered(self.second_look.measure)
        self.seen_options: dict[str, Options] = {}
        self.rows: list[dict[str, Any]] = []

    def _options(self, made: dict[str, Candidate], on_batch: Callable[[], None]) -> dict[str, Options]:
        self.seen_options = super()._options(made, on_batch)
        return self.seen_options

    def __call__(
        self, candidates: Sequence[Candidate], on_batch: Callable[[], None] = lambda: None
    ) -> dict[str, Verdict]:
        made = {one.expert: one for one in candidates}
        true = self._true(made) if SHARED in made else {}
        verdicts = super().__call__(candidates, on_batch)
        if true and SHARED in verdicts:
            shown = shown_by(self.seen_options)
            self.rows.append(shown | {"true": true, "decision": verdicts[SHARED].decision})
        return verdicts

    def _true(self, made: dict[str, Candidate]) -> dict[str, float]:
        """Tokens per step gained, and the rise of the right tokens' probability, weighed by requests."""
        new, unadapted = made[SHARED], self.store.registry.unadapted()
        gain = rise = requests = 0.0
        for name, count in self.store.replay.sizes().items():
            records = [one.record for one in self.held if one.routed == name]
            if not records:
                continue
            live = self._live(name, new)
            before = {SHARED: self._live(SHARED, new), name: live}
            if name in unadapted:
                before = dict.fromkeys(before)
            after = {SHARED: new, name: made.get(name) or live}
            pair = [self.truth(serving, name, records, lambda: None) for serving in (before, after)]
            gain += count * (tokens(pair[1]) - tokens(pair[0]))
            rise += count * (chance(pair[1]) - chance(pair[0]))
            requests += count
        return {"gain": round(gain / requests, 5), "rise": round(rise / requests, 5)} if requests else {}


def shown_by(options: dict[str, Options]) -> dict[str, Any]:
    """What the gate's own records, and those of the line, show of the whole update."""
    befores = joined([one.before for one in options.values()])
    afters = joined([one.new or one.old for one in options.values()])
    seen = [one.seen for one in options.values() if one.seen is not None]
    own, shares = befores.records, shares_of(options)
    if seen:
        befores = joined([befores, joined([one.before for one in seen])])
        afters = joined([afters, joined([one.after for one in seen])])
        shares = shares_of(options, again=True)
    found = compare(befores, afters, shares)
    keys = ("gain", "low", "high", "better", "witness")
    figures = {key: None if (value := getattr(found, key)) is None else round(value, 5) for key in keys}
    rise = None if not befores.records else round(chance(afters) - chance(befores), 5)
    return {"records": own, "seen": befores.records - own, "rise": rise} | figures


def tokens(found: Measured) -> float:
    return float(expected_tokens(found.counts.sum(0).astype(float)))


def chance(found: Measured) -> float:
    """The mean probability that first guesses gave the right token."""
    assert found.chances is not None
    given, guesses = found.chances.sum(0)
    return float(given / guesses)


if __name__ == "__main__":
    main()
