#!/usr/bin/env python3
"""What an expert's first minutes bring: joint updates on a demo's few records, measured on later prompts.

    moedraft demo --home HOME
    python scripts/bench_few_records.py --home HOME --seconds 75 --out results/few_records.json

A copy of the home serves the shipped prompts that its stream has not had, with the domain of each given.
Their answers are what is measured and are never learned from. Then each plan learns from the records that the
home had before, from nothing, for the same time: one update whose learning rate falls as it does in the demo.
Reported by domain: the share of first guesses that are right, and tokens per target step at draft length 3.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from moedraft.config import Settings, load_settings
from moedraft.core import SHARED, ReplayRecord, SamplingParams
from moedraft.distill.assembly import build_loop
from moedraft.distill.joint.joint_trainer import JointTrainer
from moedraft.distill.measuring.figures import expected_tokens
from moedraft.distill.rows.drawn import Drawn
from moedraft.distill.single.trainer import LAST_RATE
from moedraft.showcase import shipped
from moedraft.storage.retention.holding import is_held_out
from moedraft.storage.store import Store
from moedraft.system.build import opened

DEPTH = 3
PLANS: dict[str, dict[str, Any]] = {
    "unrolled 1": {"unrolled": 1},
    "unrolled 2": {"unrolled": 2},
    "unrolled 3": {"unrolled": 3},
}
# What is left of the weights of the shared adapter and of an expert where both are measured.
PARTS = {
    "": (1.0, 1.0),
    ", times 0.7": (0.7, 0.7),
    ", shared alone": (1.0, 0.0),
    ", expert alone": (0.0, 1.0),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--home", type=Path, required=True, help="of a demo on SmolLM2")
    parser.add_argument("--seconds", type=float, default=75.0, help="of each plan's learning")
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder) / "home"
        shutil.copytree(args.home, home)
        changes = {"features": "keep", "resampled_answers": 0}
        settings = load_settings(home=home, target=args.target).model_copy(update=changes)
        last = answer_more(settings)
        found = {
            name: one for plan in PLANS for name, one in measured(settings, plan, last, args.seconds).items()
        }
    if args.out:
        args.out.write_text(json.dumps({"seconds": args.seconds, "plans": found}, indent=1) + "\n")


def answer_more(settings: Settings) -> int:
    """Answer the prompts that the home has not had; returns the id of its last record before."""
    prompts = shipped.chosen()
    with opened(settings) as system:
        last = system.store.replay.last_id()
        queries = [*prompts.stream[last:], *prompts.heldout]  # a demo keeps its stream alone
        for query in queries:
            params = SamplingParams(max_tokens=query.max_tokens)
            system.engine.add(query.prompt, params, expert=query.domain, capture=True, chat=True)
        while system.engine.has_work:
            system.engine.step()
    return last


def measured(settings: Settings, plan: str, last: int, seconds: float) -> dict[str, Any]:
    """Learn as `plan` says from the records up to `last`, and measure on those after it."""
    torch.manual_seed(0)
    store = Store.open(settings.home, states_bytes=settings.states_bytes)
    try:
        trainer = from_nothing(settings, store)
        trainer.plan = replace(trainer.plan, strength=1.0, **PLANS[plan])
        records = [one for one in store.replay.newest(10_000, 0, None) if len(one.topk_ids) > 1]
        train = [one for one in records if one.id <= last and not is_held_out(one)]
        later = [one for one in records if one.id > last]
        prepare(trainer, train)
        rows = {"static": report("static", guesses(trainer, later))}
        steps = learn(trainer, train, seconds)
        for part, (shared, expert) in PARTS.items():
            with trainer.averaged(), scaled(trainer, shared, expert):
                rows[plan + part] = report(f"{plan}{part}, {steps} steps", guesses(trainer, later))
        return rows
    finally:
        store.close()


def from_nothing(settings: Settings, store: Store) -> JointTrainer:
    """The home's trainer, as if no version had been published."""
    trainer: JointTrainer = build_loop(settings, store).trainer  # type: ignore[assignment]
    trainer.versions = dict.fromkeys((SHARED, *store.replay.sizes()), 0)
    for name in trainer.versions:
        trainer.student.add(name)
    return trainer


def prepare(trainer: JointTrainer, records: Sequence[ReplayRecord]) -> None:
    trainer._choose_vocabularies(records)
    for first in range(0, len(records), trainer.plan.rows):
        trainer.lessons.states.of(records[first : first + trainer.plan.rows])


def learn(trainer: JointTrainer, records: list[ReplayRecord], seconds: float) -> int:
    """Optimiser steps for so long; returns how many there were."""
    began, steps = time.monotonic(), 0
    for chosen in trainer.batches(Drawn(records, records, []), 10**6):
        share = (time.monotonic() - began) / seconds
        if share >= 1:
            break
        trainer._step(chosen, [one.domain for one in chosen], 1 - (1 - LAST_RATE) * share)
        steps += 1
    return steps


@contextmanager
def scaled(trainer: JointTrainer, shared: float, expert: float) -> Iterator[None]:
    """The student with so much of its adapters' weights."""
    parts = [
        (part.b, shared if name == SHARED else expert)
        for name in trainer.student.names
        for part in trainer.student.low_ranks(name).values()
    ]
    before = [b.data for b, _ in parts]
    for b, share in parts:
        b.data = b.data * share
    try:
        yield
    finally:
        for (b, _), weight in zip(parts, before, strict=True):
            b.data = weight


@torch.no_grad()
def guesses(trainer: JointTrainer, records: Sequence[ReplayRecord]) -> dict[str, torch.Tensor]:
    """By domain, hits and tries [DEPTH, 2]."""
    found: dict[str, torch.Tensor] = {}
    for first in range(0, len(records), trainer.plan.rows):
        chosen = records[first : first + trainer.plan.rows]
        names = [one.domain for one in chosen]
        owners, made = trainer.lessons.guessed(chosen, names, DEPTH, trainer.plan.max_tokens)
        for owner, counts in zip(owners, made.counts, strict=True):
            found[owner] = found.get(owner, torch.zeros_like(counts)) + counts
    return {name: found[name] for name in sorted(found)}


def report(name: str, found: dict[str, torch.Tensor]) -> dict[str, Any]:
    first = {domain: float(counts[0, 0] / counts[0, 1]) for domain, counts in found.items()}
    tokens = {domain: float(expected_tokens(c.double().numpy())) for domain, c in found.items()}
    row = {"first": first, "tokens_per_step": tokens}
    means = [sum(values.values()) / len(values) for values in row.values()]
    print(f"{name}: first guess right {means[0]:.3f}, tokens per step {means[1]:.3f}", flush=True)
    return {key: {domain: round(v, 4) for domain, v in values.items()} for key, values in row.items()}


if __name__ == "__main__":
    main()
