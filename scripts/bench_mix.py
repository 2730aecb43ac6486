#!/usr/bin/env python3
"""Measure what many experts cost: a full batch of different ones beside one of a single one, and 64 beside 4.

    python scripts/bench_mix.py --home HOME --data ../shared/data --out results/mix.json

All slots are full, every row drafts with a pinned expert of the home and a fixed draft length, and what is
measured is the time of a step, whatever was accepted. The arrangements are measured in turns; a ratio is the
median of those of the rounds, beside the smallest and the largest.

    uniform          all rows have one expert, each expert in turn
    mixed            the rows have different experts
    4 experts        many short requests, which four experts serve in turns
    64 experts       the same requests, and 64 experts; copies of the home's own, with weights of their own
                     and some tokens in their lists that no other has, as another domain would bring them
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from itertools import cycle, islice
from typing import Any

import torch
from choosers import options, save
from feature_answers import prompts_of

from moedraft.config import load_settings
from moedraft.core import SHARED, SamplingParams
from moedraft.drafting.experts.adapter import Adapter
from moedraft.routing.selector import FixedSelector
from moedraft.showcase.bench import surroundings
from moedraft.showcase.measure import warm_up
from moedraft.system.build import System, opened

FEW, MANY = 4, 64  # experts
WARM = 4  # steps of full slots that are not timed
SHORT = 16  # tokens of a short request
OWN = 0.025  # of a copy's tokens that no other has: in a demo's home each expert brought some 200, of 8 192


def step_ms(system: System, prompts: Sequence[str], experts: Sequence[str], steps: int) -> float:
    """Milliseconds of a step with all slots full and these experts in them."""
    engine, params = system.engine, SamplingParams(max_tokens=500, ignore_eos=True)
    ids = [
        engine.add(p, params, expert=e, chat=True, counted=False)
        for p, e in zip(prompts, experts, strict=True)
    ]
    while engine.figures.running < len(ids) or any(not s.num_generated for s in engine.sequences):
        engine.step()
    for _ in range(WARM):
        engine.step()
    began = time.perf_counter()
    for _ in range(steps):
        engine.step()
    taken = time.perf_counter() - began
    for name in ids:
        engine.abort(name)
    return 1e3 * taken / steps


def queue_ms(system: System, prompts: Sequence[str], experts: Sequence[str]) -> float:
    """Milliseconds of a step while a queue of short requests is served."""
    engine, params = system.engine, SamplingParams(max_tokens=SHORT, ignore_eos=True)
    for prompt, expert in zip(cycle(prompts), experts):
        engine.add(prompt, params, expert=expert, chat=True, counted=False)
    steps, began = 0, time.perf_counter()
    while engine.has_work:
        engine.step()
        steps += 1
    return 1e3 * (time.perf_counter() - began) / steps


@contextmanager
def copies(system: System, names: Sequence[str], count: int) -> Iterator[list[str]]:
    """Inside, the bank has `count` experts: of these or copies of them, with tensors of their own.

    Those of the home that are too many are taken away. The first request of each expert prepares it.
    """
    bank = system.bank
    own = {name: bank.experts[name] for name in names}
    size = system.target.vocab_size
    made = {f"copy-{i}": copied(own[names[i % len(names)]], size, i) for i in range(count - len(names))}
    bank.take(bank.prepare(made | dict.fromkeys(names[count:])))
    yield [*names[:count], *made]
    bank.take(bank.prepare(dict.fromkeys(made) | {name: own[name] for name in names[count:]}))


def copied(adapter: Adapter, vocab_size: int, seed: int) -> Adapter:
    """The same weights in tensors of their own, and a list with a part of its tokens exchanged, see OWN."""
    deltas = {name: (a.clone(), b.clone()) for name, (a, b) in adapter.deltas.items()}
    return Adapter(adapter.version, deltas, exchanged(adapter.vocabulary, vocab_size, seed))


def exchanged(tokens: torch.Tensor | None, vocab_size: int, seed: int) -> torch.Tensor | None:
    if tokens is None:
        return None
    chance = torch.Generator().manual_seed(seed)
    own = tokens.cpu()
    kept = own[torch.randperm(len(own), generator=chance)[: len(own) - int(OWN * len(own))]]
    drawn = torch.randperm(vocab_size, generator=chance)
    more = drawn[~torch.isin(drawn, own)][: len(own) - len(kept)]
    rest = own[~torch.isin(own, kept)][: len(own) - len(kept) - len(more)]  # where too few others are left
    return torch.cat([kept, more, rest]).sort().values.to(tokens)


def size(system: System) -> int:
    """Bytes of all experts' own weights."""
    adapters = system.bank.experts.values()
    return sum(t.nbytes for one in adapters for pair in one.deltas.values() for t in pair)


def middle(each: Sequence[float]) -> float:
    return round(statistics.median(each), 3)


def ratios(above: Sequence[float], below: Sequence[float]) -> list[float]:
    """[median, smallest, largest] of the rounds' quotients."""
    each = [a / b for a, b in zip(above, below, strict=True)]
    return [round(x, 4) for x in (statistics.median(each), min(each), max(each))]


def mixed_batches(
    system: System, prompts: Sequence[str], names: Sequence[str], args: argparse.Namespace
) -> dict[str, Any]:
    """A full batch of different experts, before and after a full batch of each of them alone."""
    different = list(islice(cycle(names), len(prompts)))
    mixed, uniform = [], []
    for turn in range(args.rounds + 1):
        both = [step_ms(system, prompts, different, args.steps)]
        alone = [step_ms(system, prompts, [name] * len(prompts), args.steps) for name in names]
        both.append(step_ms(system, prompts, different, args.steps))
        if turn:  # the first one warms up
            mixed.append(statistics.mean(both))
            uniform.append(statistics.mean(alone))
    return {
        "different": len({*different}),
        "step_ms": {"uniform": middle(uniform), "mixed": middle(mixed)},
        "mixed / uniform": ratios(mixed, uniform),
    }


def registered(
    system: System, prompts: Sequence[str], names: Sequence[str], args: argparse.Namespace
) -> dict[str, Any]:
    """A queue that four experts serve, and the same with 64."""
    sizes = {"own": size(system)}
    taken: dict[int, list[float]] = {FEW: [], MANY: []}
    for turn in range(args.rounds + 1):
        for count in (FEW, MANY) if turn % 2 else (MANY, FEW):
            with copies(system, names, count) as experts:
                sizes[str(count)] = size(system)
                ms = queue_ms(system, prompts, list(islice(cycle(experts), MANY)))
            if turn:
                taken[count].append(ms)
    return {
        "bytes": sizes,
        "step_ms": {str(count): middle(each) for count, each in taken.items()},
        f"{MANY} / {FEW}": ratios(taken[MANY], taken[FEW]),
    }


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20, help="that are timed of a full batch")
    args = parser.parse_args()
    settings = load_settings(home=args.home, target=args.target, draft=args.draft)
    with opened(settings) as system:
        system.engine.selector = FixedSelector()
        warm_up(system)
        names = sorted(name for name in system.bank.experts if name != SHARED)
        if len(names) < 2:
            raise SystemExit("The home has fewer than two trained experts.")
        slots = system.settings.max_batch_size
        prompts = prompts_of(args.data, "general_en", "dev", slots)
        report = surroundings(system) | {"date": datetime.now(UTC).date().isoformat()}
        report |= {"draft_length": args.draft_length, "slots": slots, "experts": len(names)}
        with system.engine.chooser.using(source="model", fixed_length=args.draft_length):
            report["batches"] = mixed_batches(system, prompts, names, args)
            print(report["batches"], flush=True)
            report["registered"] = registered(system, prompts, names, args)
            print(report["registered"], flush=True)
    save(report, args.out)


if __name__ == "__main__":
    main()
