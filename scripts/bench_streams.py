#!/usr/bin/env python3
"""Measure who should draft where the router is wrong or cannot know, on a home with learned experts.

    python scripts/bench_streams.py --home HOME --data ../shared/data --out results/streams.json

The streams:

    labelled             held-out prompts of the registered domains
    translated           the same, with their instruction in another language
    framed, typos, noise the same, inside another template, mistyped, with something else before them
    few origins          the same, with a router fitted on examples of one or two sources a domain
    permuted             the same, with a router that takes every domain for another one
    two in a prompt      two requests of different domains in one prompt
    change               the answer to one prompt, in whose middle the answer to another domain's begins
    no domain            prompts that belong to none
    before registration  prompts of a domain that neither router nor experts know; the shared draft learned it
    4, 8, 16, 64 arms    `labelled` and `permuted` with fewer experts, or with decoys beside them

A decoy is an expert with its parts put together wrongly: it is as large as the expert and guesses badly. The
router leaves three tenths of the probability to all decoys together.

In `change` the target's logits are overwritten so that the answer is the given text; everything else is as
ever, and the text begins and ends in the same way for all. Every fixed expert answers all prompts too. So for
each request the best one is known in hindsight, and what a way of choosing loses against it, its regret.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from choosers import (
    ChosenArms,
    Counts,
    FollowingOwner,
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
from selection_streams import Part, Streams

from moedraft.config import load_settings
from moedraft.core import SHARED, RequestOutput
from moedraft.drafting.experts.adapter import Adapter
from moedraft.evidence import Proposal, Rows
from moedraft.routing.selector import BackgroundSelector
from moedraft.selecting.selector import ArmJudge
from moedraft.showcase.bench import surroundings
from moedraft.showcase.findings.estimates import quotient, ratio
from moedraft.showcase.measure import warm_up
from moedraft.system.build import System, opened

DOMAINS = "sql_en,code_python,math_en,docs_fr,docs_ja,support"
NOWHERE = "general_en,medical_en,textbook_en"
FORCED = 1e4  # added to the logit of a token that is to come


def decoy(adapter: Adapter, rng: torch.Generator) -> Adapter:
    """As large as the expert, with each of its ranks added or taken away by chance."""
    deltas = {}
    for name, (a, b) in adapter.deltas.items():
        signs = torch.randint(0, 2, (len(a), 1), generator=rng).to(a) * 2 - 1
        deltas[name] = (a * signs, b)
    return Adapter(adapter.version, deltas, adapter.vocabulary)


@contextmanager
def decoys(system: System, arms: Sequence[str], names: Sequence[str]) -> Iterator[None]:
    """Inside, the bank has the decoys that are among `arms`, made from the experts `names` in turns."""
    bank, rng = system.bank, torch.Generator().manual_seed(0)
    new = [arm for arm in arms if arm not in bank.experts and arm != SHARED]
    made = {arm: decoy(bank.experts[names[i % len(names)]], rng) for i, arm in enumerate(new)}
    bank.take(bank.prepare(made))
    try:
        yield
    finally:
        bank.take(bank.prepare(dict.fromkeys(made)))


@contextmanager
def forced(system: System, scripts: dict[str, list[int]]) -> Iterator[None]:
    """Inside, the target answers each of these prompts with the given tokens."""
    engine_round = system.engine.round
    verify = engine_round.verify

    def overwritten(rows: Rows, proposal: Proposal, logits: torch.Tensor) -> Any:
        for b, row in enumerate(rows.sequences):
            coming = scripts[row.prompt][row.num_generated :][: logits.shape[1]]
            logits[b, range(len(coming)), coming] += FORCED
        return verify(rows, proposal, logits)

    engine_round.verify = overwritten
    try:
        yield
    finally:
        engine_round.verify = verify


def answered(
    system: System, part: Part, selector: BackgroundSelector, expert: str | None, args: argparse.Namespace
) -> list[RequestOutput]:
    before = system.engine.selector
    choosing(system, selector)
    scripts = dict(zip(part.prompts, part.scripts, strict=True)) if part.scripts else {}
    longest = [len(script) for script in part.scripts] or args.max_tokens
    with (
        forced(system, scripts) if scripts else nullcontext(),
        system.engine.chooser.using(source="model", fixed_length=args.draft_length),
    ):
        found = answers(system, part.prompts, [expert] * len(part.prompts), longest)
    selector.close()
    system.engine.selector = before
    if scripts:
        told = [list(output.token_ids) for output in found]
        assert told == part.scripts, "the target did not say what it was made to say"
    return found


def quarters(counts: Counts) -> list[Counts]:
    """The first quarter of the prompts, in the order in which they came, to the last one."""
    ends = [len(counts) * i // 4 for i in range(5)]
    return [counts[first:end] for first, end in pairwise(ends) if end > first]


class Alone:
    """What every arm gives that drafts all answers alone; the same prompts are answered once."""

    def __init__(self, system: System, args: argparse.Namespace) -> None:
        self.system, self.args = system, args
        self._known: dict[tuple[str, ...], Counts] = {}

    def lengths(self, part: Part, arm: str) -> Counts:
        key = (arm, str(part.scripts), *part.prompts)
        if key not in self._known:
            chosen = answered(self.system, part, PromptClassifier(part.router), arm, self.args)
            self._known[key] = lengths(chosen)
        return self._known[key]


def measured(
    system: System, judge: ArmJudge, parts: list[Part], alone: Alone, args: argparse.Namespace
) -> dict[str, Any]:
    """Tokens per step of all ways over the parts of one stream, with what choosing took."""
    counts: dict[str, Counts] = {}
    best: Counts = []
    sent = [
        route.domain == owners[0][1]
        for part in parts
        for route, owners in zip(part.router.route(part.prompts), part.owners, strict=bool(part.owners))
    ]
    spent = 0.0
    total = 0.0
    for part in parts:
        arms = ChosenArms(judge, part.arms)
        ways: dict[str, BackgroundSelector] = {
            "classifier": PromptClassifier(part.router),
            "evidence": PromptEvidence(part.router, arms, time_share=None),
            "evidence as served": PromptEvidence(part.router, arms),
        }
        if part.owners:
            ways["owner"] = FollowingOwner(part.router, dict(zip(part.prompts, part.owners, strict=True)))
        real = [arm for arm in part.arms if not arm.startswith("decoy-")]
        with decoys(system, part.arms, [arm for arm in real if arm != SHARED]):
            fixed = {arm: alone.lengths(part, arm) for arm in real}
            best += [max(each, key=lambda one: one[0] / one[1]) for each in zip(*fixed.values(), strict=True)]
            counts.setdefault("shared", []).extend(fixed[SHARED])
            for name, selector in ways.items():
                before = system.engine.timer.select_seconds, system.engine.timer.step_seconds
                counts.setdefault(name, []).extend(lengths(answered(system, part, selector, None, args)))
                if name == "evidence":
                    spent += system.engine.timer.select_seconds - before[0]
                    total += system.engine.timer.step_seconds - before[1]
    counts["best fixed"] = best
    return {
        "prompts": len(best),
        "sent_right": round(sum(sent) / len(sent), 4) if sent else None,
        "share_of_time": round(spent / total, 4),
        "ways": {
            name: {
                "tokens_per_step": rounded(ratio(each)),
                "times_best_fixed": rounded(quotient(each, best)),
                "times_owner": rounded(quotient(each, counts["owner"])) if "owner" in counts else None,
                "times_classifier": rounded(quotient(each, counts["classifier"])),
                "quarters": [round(ratio(part).value, 4) for part in quarters(each)],
            }
            for name, each in counts.items()
        },
    }


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--domains", default=DOMAINS, help="of the data, or NAME=EXPERT of the home")
    parser.add_argument("--nowhere", default=NOWHERE, help="of the data, domains that are not registered")
    parser.add_argument("--streams", help="only these, separated by commas")
    parser.add_argument("--heldout", type=int, default=12, help="prompts of each domain")
    parser.add_argument("--max-tokens", type=int, default=96)
    args = parser.parse_args()
    settings = load_settings(home=args.home, target=args.target, draft=args.draft, selector="evidence")
    free = ("home", "data", "out", "streams")
    shown = {key: str(value) for key, value in vars(args).items() if key not in free}
    with opened(settings) as system, TemporaryDirectory() as folder:
        judge = judge_of(system)
        warm_up(system)
        versions = {name: system.bank.version(name) for name in (SHARED, *sorted(system.bank.experts))}
        report = begun(shown | {"versions": str(versions)}, args.out, "streams") | surroundings(system)
        made, alone = Streams(system, args, Path(folder)).all(), Alone(system, args)
        chosen = args.streams.split(",") if args.streams else list(made)
        if unknown := [name for name in chosen if name not in made]:
            raise SystemExit(f"There is no stream {', '.join(unknown)}; there are {', '.join(made)}.")
        for name in chosen:
            if name in report["streams"]:
                continue
            found = report["streams"][name] = measured(system, judge, made[name](), alone, args)
            print(f"{name}: {found['prompts']} prompts, comparing {found['share_of_time']:.1%} of the time")
            for way, each in found["ways"].items():
                print(f"  {way:20} {each['tokens_per_step']} × best {each['times_best_fixed']}", flush=True)
            save(report, args.out)


if __name__ == "__main__":
    main()
