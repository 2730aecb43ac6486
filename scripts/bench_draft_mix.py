#!/usr/bin/env python3
"""Measure what a draft step costs an independent draft model in a batch of several experts, by their rank.

    python scripts/bench_draft_mix.py --out results/draft_mix.json

Eight rows are drafted for by the shared draft alone, and by one, two, four and eight random experts of the
scope "tail": either with merged weights of each expert's own for its rows, or with the low-rank terms of all
of them beside one product. The ways take turns; reported are medians in ms, beside a step of the target.
"""

from __future__ import annotations

import argparse
import json
import time
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

import torch

from moedraft.config import load_settings
from moedraft.core import SHARED
from moedraft.cpu import groups
from moedraft.cpu.threads import set_threads
from moedraft.drafting.base import load_base
from moedraft.drafting.experts.adapter import Adapter
from moedraft.drafting.experts.lora import ExpertBank
from moedraft.models import LanguageModel, load_by

ROWS, EXPERTS, FIRST = 8, 8, 20  # rows of a batch; experts; tokens of a row that are read before
BATCHES = {"shared": 0, "one": 1, "two": 2, "four": 4, "eight": 8}  # experts of a batch
WAYS = {"merged": False, "joined": True}


def experts_of(bank: ExpertBank, rank: int) -> None:
    """Publish random experts of this rank."""
    for seed in range(EXPERTS):
        generator = torch.Generator().manual_seed(seed)
        deltas = {}
        for name in sorted(bank.tail):
            out, inner = bank.layers[name].base_weight().shape
            a, b = (torch.randn(*shape, generator=generator) for shape in ((rank, inner), (out, rank)))
            deltas[name] = (0.05 * a, 0.05 * b)
        bank.publish(str(seed), Adapter(1, deltas))


def step(model: LanguageModel, bank: ExpertBank | None, names: list[str]) -> float:
    """ms of one forward of a token for each row, which stand behind FIRST tokens of zeros."""
    ids = torch.randint(0, model.vocab_size, (ROWS, 1))
    cache = model.new_cache(ROWS)
    if bank is not None:
        bank.select(names)
    with torch.inference_mode():
        began = time.perf_counter()
        model.forward(cache, 0, ids, [FIRST] * ROWS, keep=1)
    return 1000 * (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="mini")
    parser.add_argument("--draft", default="auto")
    parser.add_argument("--ranks", default="4,8,16,32,64")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    settings = load_settings(target=args.target, draft=args.draft)
    target = load_by(settings, "target")
    banks: dict[tuple[int, str], tuple[LanguageModel, ExpertBank]] = {}
    for rank in map(int, args.ranks.split(",")):
        for way, joined in WAYS.items():
            draft = load_base(settings, target)
            assert isinstance(draft, LanguageModel), "an independent draft model is measured"
            bank = ExpertBank(draft)
            bank.grouped = bank.grouped and not joined
            experts_of(bank, rank)
            banks[rank, way] = draft, bank
    set_threads(settings.threads, target)
    groups.FEW_EXPERTS = EXPERTS  # what is measured here decides where the one way ends and the other begins
    times: dict[tuple[int, str, str], list[float]] = {}
    steps = []
    for _ in range(args.rounds):
        steps.append(step(target, None, []))
        for (rank, way), (draft, bank) in banks.items():
            for batch, count in BATCHES.items():
                names = [str(i % count) if count else SHARED for i in range(ROWS)]
                step(draft, bank, names)  # another batch than the last: what is prepared for it is no part
                times.setdefault((rank, way, batch), []).append(step(draft, bank, names))
    found = {
        str(rank): {
            way: {batch: round(median(times[rank, way, batch][5:]), 3) for batch in BATCHES} for way in WAYS
        }
        for rank in map(int, args.ranks.split(","))
    }
    report = {
        "date": datetime.now(UTC).date().isoformat(),
        "threads": torch.get_num_threads(),
        "parameters": banks[next(iter(banks))][0].num_parameters,
        "target_step_ms": round(median(steps[5:]), 3),
        "draft_step_ms": found,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(report))


if __name__ == "__main__":
    main()
