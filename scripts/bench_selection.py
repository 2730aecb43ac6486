#!/usr/bin/env python3
"""Measure who should draft: the router alone, or the router corrected by evidence, on a home with experts.

    python scripts/bench_selection.py --home HOME --data ../shared/data --out results/selection.json

All ways of choosing answer the same held-out prompts greedily, as they are and reworded, with a fixed draft
length, so that tokens per target step follow from the choice alone:

    oracle                 the expert of the prompt's own domain
    classifier             the router's choice
    evidence               that, corrected by what each expert would have guessed, whatever time that takes
    evidence as served     the same within the share of the time that a server allows for it
    permuted classifier    a router that takes every domain for another one
    permuted evidence      the same, corrected
    shared                 the shared draft for everything

Then the same prompts are answered one by one and in batches, with draft lengths as the budget chooses them,
to see what comparing costs and what of its gain is left in tokens per second. Intervals are those of a
bootstrap over prompts, 95 %. What the file of the results holds already, with the same settings, is not
measured again; a run with other `--kinds` adds these.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

from choosers import (
    Counts,
    KnownRouter,
    PausedClock,
    PromptClassifier,
    PromptEvidence,
    answers,
    begun,
    choosing,
    judge_of,
    lengths,
    options,
    rounded,
    save,
)
from feature_answers import prompts_of
from reworded import KINDS

from moedraft.config import load_settings
from moedraft.core import SHARED, RequestOutput
from moedraft.routing.selector import BackgroundSelector
from moedraft.selecting.selector import ArmJudge, EvidenceSelector
from moedraft.showcase.bench import surroundings
from moedraft.showcase.findings.estimates import quotient, ratio
from moedraft.showcase.measure import new_budget, warm_up
from moedraft.system.build import System, opened

DOMAINS = "sql_en,code_python,math_en,docs_fr,docs_ja,support"


def figures(found: dict[str, list[RequestOutput]], labels: list[str]) -> dict[str, Any]:
    """Tokens per step of every way and beside the oracle's; what is recovered of a wrong prior's loss.

    The last is None where the wrong prior loses nothing.
    """
    counts = {name: lengths(outputs) for name, outputs in found.items()}
    means = {name: ratio(each) for name, each in counts.items()}
    result: dict[str, Any] = {
        name: {
            "tokens_per_step": rounded(means[name]),
            "times_oracle": rounded(quotient(counts[name], counts["oracle"])),
            "ended_with_the_domains_expert": round(
                sum(o.expert == label for o, label in zip(outputs, labels, strict=True)) / len(labels), 3
            ),
        }
        for name, outputs in found.items()
    }
    lost = means["oracle"].value - means["permuted classifier"].value
    won = means["permuted evidence"].value - means["permuted classifier"].value
    return result | {"recovered": round(won / lost, 3) if lost > 0 else None, "prompts": len(labels)}


def prompts_by_domain(args: argparse.Namespace) -> dict[str, list[str]]:
    """So many held-out prompts of each domain. Leaves with one sentence where a domain has fewer."""
    raw = {}
    for each in args.domains.split(","):
        name, _, expert = each.partition("=")
        raw[expert or name] = prompts_of(args.data, name, "dev", args.heldout)
    for name, prompts in raw.items():
        if (found := len(prompts)) < args.heldout:
            raise SystemExit(f"{name} has {found} held-out prompts; --heldout asks for {args.heldout}.")
    return raw


def measure(
    system: System, judge: ArmJudge, args: argparse.Namespace, report: dict[str, Any]
) -> Iterator[str]:
    """Put tokens per step into `report` by kind of prompt, over all and by domain; yields each kind."""
    raw = prompts_by_domain(args)
    names = list(raw)
    turned = dict(zip(names, [*names[1:], names[0]], strict=True))
    for kind in args.kinds.split(","):
        if kind in report:
            continue
        reworded = KINDS[kind]
        labels = [name for _ in range(args.heldout) for name in names]
        prompts = [
            reworded(raw[name][i], random.Random(f"{name} {i} {kind}"))
            for i in range(args.heldout)
            for name in names
        ]
        plain, permuted = (KnownRouter(system.router, prompts, other) for other in ({}, turned))
        ways: dict[str, tuple[BackgroundSelector, list[str | None]]] = {
            "oracle": (PromptClassifier(plain), list(labels)),
            "classifier": (PromptClassifier(plain), [None] * len(labels)),
            "evidence": (PromptEvidence(plain, judge, time_share=None), [None] * len(labels)),
            "evidence as served": (PromptEvidence(plain, judge), [None] * len(labels)),
            "permuted classifier": (PromptClassifier(permuted), [None] * len(labels)),
            "permuted evidence": (PromptEvidence(permuted, judge, time_share=None), [None] * len(labels)),
            "shared": (PromptClassifier(plain), [SHARED] * len(labels)),
        }
        found = {}
        for name, (selector, experts) in ways.items():
            choosing(system, selector)
            with system.engine.chooser.using(source="model", fixed_length=args.draft_length):
                found[name] = answers(system, prompts, experts, args.max_tokens)
            selector.close()
        report[kind] = figures(found, labels) | {"same_answers": same(found)}
        report[kind]["by_domain"] = {
            name: figures(
                {way: outputs[i :: len(names)] for way, outputs in found.items()}, labels[i :: len(names)]
            )
            for i, name in enumerate(names)
        }
        show(kind, report[kind])
        yield kind


def same(found: dict[str, list[RequestOutput]]) -> float:
    """The share of prompts to which all ways give one answer; in half precision batches may round apart."""
    rows = zip(*found.values(), strict=True)
    return round(sum(len({tuple(o.token_ids) for o in row}) == 1 for row in rows) / len(found["oracle"]), 4)


def costs(system: System, judge: ArmJudge, args: argparse.Namespace) -> dict[str, Any]:
    """What comparing takes and brings, with the budget's draft lengths: one by one, and in batches."""
    raw = prompts_by_domain(args)
    prompts = [raw[name][i] for i in range(min(args.timed, args.heldout)) for name in raw]
    report: dict[str, Any] = {}
    for size in (1, system.settings.max_batch_size):
        taught = 6 * size // max(1, size // 2)  # the first prompts teach the budget
        if not any(first >= taught for first in range(0, len(prompts), size)):
            print(f"batch {size}: not timed, since {len(prompts)} prompts are too few", flush=True)
            continue
        clock = PausedClock()  # of evidence, which may not save up time while the other one is measured
        ways = {
            "classifier": BackgroundSelector(system.router),
            "evidence": EvidenceSelector(system.router, judge, clock=clock),
        }
        for selector in ways.values():  # what is computed once, and a cold cache, are no part of the costs
            choosing(system, selector)
            with system.engine.chooser.using(new_budget(system)):
                answers(system, prompts[:taught], [None] * taught, args.max_tokens)
        budgets = {name: new_budget(system) for name in ways}
        timer, taken = system.engine.timer, dict.fromkeys(ways, (0.0, 0.0))
        speeds: dict[str, Counts] = {name: [] for name in ways}
        for turn, first in enumerate(range(0, len(prompts), size)):
            batch = prompts[first : first + size]
            for name in list(ways)[:: 1 if turn % 2 else -1]:
                choosing(system, ways[name])
                before = (timer.select_seconds, timer.step_seconds)
                with (
                    system.engine.chooser.using(budgets[name]),
                    clock.running() if name == "evidence" else nullcontext(),
                ):
                    began = time.perf_counter()
                    outputs = answers(system, batch, [None] * len(batch), args.max_tokens)
                    spent = time.perf_counter() - began
                if first >= taught:
                    speeds[name].append((float(sum(len(o.token_ids) for o in outputs)), spent))
                    now = (timer.select_seconds, timer.step_seconds)
                    taken[name] = tuple(  # type: ignore[assignment]
                        total + b - a for total, a, b in zip(taken[name], before, now, strict=True)
                    )
        report[f"batch {size}"] = {
            "share_of_time": {name: round(some / all_, 4) for name, (some, all_) in taken.items()},
            "tokens_per_second": {name: rounded(ratio(each)) for name, each in speeds.items()},
            "evidence / classifier": rounded(quotient(speeds["evidence"], speeds["classifier"])),
        }
        print(f"batch {size}", report[f"batch {size}"], flush=True)
        for selector in ways.values():
            selector.close()
    return report


def show(kind: str, part: dict[str, Any]) -> None:
    print(f"{kind}: recovered {part['recovered']}, same answers {part['same_answers']}")
    for name, each in part.items():
        if isinstance(each, dict) and "tokens_per_step" in each:
            print(f"  {name:20} {each['tokens_per_step']} × oracle {each['times_oracle']}", flush=True)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--domains", default=DOMAINS, help="of the data, or NAME=EXPERT of the home")
    parser.add_argument("--kinds", default=",".join(KINDS), help="of rewording")
    parser.add_argument("--heldout", type=int, default=15, help="prompts of each domain and kind")
    parser.add_argument("--timed", type=int, default=8, help="of these, how many are timed")
    parser.add_argument("--max-tokens", type=int, default=96)
    args = parser.parse_args()
    settings = load_settings(home=args.home, target=args.target, draft=args.draft, selector="evidence")
    free = ("home", "data", "out", "kinds")
    shown = {key: str(value) for key, value in vars(args).items() if key not in free}
    report = begun(shown, args.out, "tokens per step")
    with opened(settings) as system:
        judge = judge_of(system)
        warm_up(system)
        report |= surroundings(system)
        for _ in measure(system, judge, args, report["tokens per step"]):
            save(report, args.out)
        if args.timed and "cost" not in report:
            report["cost"] = costs(system, judge, args)
            save(report, args.out)


if __name__ == "__main__":
    main()
