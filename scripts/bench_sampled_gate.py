#!/usr/bin/env python3
"""Measure how well the gate tells versions apart where answers were sampled.

    python scripts/bench_sampled.py --data ../shared/data --out OUT --homes HOMES
    python scripts/bench_sampled_gate.py --home HOMES/0 --out results/smollm2/sampled_gate.json

Of a home that has learned from sampled answers, on its held-out records: each joint update whose versions are
still on disk against the one before it, first as the gate counts sampled answers (how likely drawn tokens are
accepted), then by whether the likeliest guess was the token that was drawn, as greedy answers are counted.
And what the live versions give when what they add is multiplied by factors: published versions are weaker
than what was learned.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench_mixtures import scaled

from moedraft.config import load_settings
from moedraft.core import SHARED, ReplayRecord, StorageError
from moedraft.distill.assembly import build_loop
from moedraft.distill.joint.joint_loop import JointLoop
from moedraft.distill.judging.gate import compare
from moedraft.distill.measuring.figures import Measured, joined
from moedraft.distill.measuring.measures import JointMeasure, Measure, Serving
from moedraft.storage.retention.holding import is_held_out
from moedraft.storage.store import Store
from moedraft.system.build import opened

FACTORS = (0.8, 0.9, 1.0, 1.1, 1.2, 1.35)  # of what is published; it has .85 of what was learned


def served(store: Store, version: int, domains: Sequence[str]) -> Serving | None:
    """What served when this version of the shared adapter was published; None: no longer on disk."""
    try:
        [shared] = [one for one in store.registry.versions(SHARED) if one.version == version]
        found: dict[str, Any] = {SHARED: store.adapters.load(shared)}
        for name in domains:
            stood = [one for one in store.registry.versions(name) if (one.stood_on or 0) <= version]
            found[name] = store.adapters.load(stood[-1]) if stood else None
        return found
    except StorageError:
        return None


def measured(measure: Measure, serving: Serving, records: Sequence[ReplayRecord]) -> Measured:
    """Each record under the shared adapter and the expert of its domain."""
    parts = []
    for name in sorted({record.domain for record in records}):
        mine = [record for record in records if record.domain == name]
        only = {SHARED: serving[SHARED], name: serving.get(name)}
        parts.append(replace(measure(only, name, mine, lambda: None), loss=None))
    return joined(parts)


def accepted(found: Measured) -> float:
    """Of first guesses."""
    hits, tries = found.counts[:, 0].sum(0)
    return float(hits / tries)


def report(store: Store, measure: Measure, records: list[ReplayRecord]) -> dict[str, Any]:
    """All figures, by way of counting."""
    domains = sorted({record.domain for record in records} - {SHARED})
    sets = [served(store, one.version, domains) for one in store.registry.versions(SHARED)]
    there = [one for one in sets if one is not None]
    ways: dict[str, Any] = {}
    for way in ("sampled", "as greedy"):
        mine = records if way == "sampled" else [replace(record, temperature=0.0) for record in records]
        found = [measured(measure, one, mine) for one in there]
        pairs = [compare(before, after) for before, after in pairwise(found)]
        ways[way] = {
            "updates": [
                {"gain": one.gain, "low": one.low, "high": one.high, "better": one.better} for one in pairs
            ],
            "static": accepted(measured(measure, dict.fromkeys((SHARED, *domains)), mine)),
            "factors": {
                str(factor): accepted(measured(measure, scaled(there[-1], SHARED, factor, factor), mine))
                for factor in FACTORS
            },
        }
        print(way, json.dumps(ways[way]), flush=True)
    return {"records": len(records), "ways": ways}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--home", type=Path, required=True)
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--draft", default="auto")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    settings = load_settings(home=args.home, target=args.target, draft=args.draft)
    with opened(settings) as system:
        loop = build_loop(settings, system.store)
        assert isinstance(loop, JointLoop)
        measure = JointMeasure(loop.trainer, settings.num_speculative_tokens)
        records = [one for one in system.store.replay.records() if is_held_out(one) and one.temperature > 0]
        found = report(system.store, measure, records)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    dated = {"date": datetime.now(UTC).date().isoformat(), **found}
    args.out.write_text(json.dumps(dated, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
