#!/usr/bin/env python3
"""Measure what drafting brings where answers are sampled: a stream is served, learned from, and compared.

    python scripts/bench_sampled.py --data ../shared/data --out results/smollm2/sampled.json

As `bench_experts.py`, with answers drawn at a temperature, as most servers of chats do. The stream is
drawn at `--learned-at`, once for the experts and once for the one adapter that they stand beside; then
held-out prompts are answered at each of `--temperatures`, 0 being greedy. `--experts-only` leaves the one
adapter out, which takes half of the time to learn.
Verification is the engine's own, by default chain, which keeps to the target's distribution; the answers of
two systems differ, so they are not compared with each other.

Reported are, with 95 % intervals over the prompts (bootstrap, paired): tokens per second at batch 1 and in
full batches, tokens per target step, and the drafter's acceptance: Σ min(p, q) over the tokens, of the
target's distribution p and the drafter's q, at each place of answers that the target gave alone. That is how
often a first drafted token is accepted there; of greedy answers, how often it is the target's own.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from bench_experts import (
    ANSWERS,
    ONE,
    Answered,
    Pair,
    Prompts,
    Systems,
    begin,
    in_a_queue,
    one_by_one,
    parser_of,
    prompts_for,
    rounded,
    taught,
    with_one_adapter,
)

from moedraft.chat import prompt_ids
from moedraft.config import load_settings
from moedraft.core import SamplingParams
from moedraft.drafting.base import FeatureBase, features_of
from moedraft.feature.text_tokens import GrowingText
from moedraft.showcase.bench import surroundings
from moedraft.showcase.findings.estimates import change, quotient, ratio
from moedraft.showcase.measure import step_costs, warm_up
from moedraft.system.build import System, opened

NAMES = (
    "plain",
    "static",
    "experts",
    ONE,
    ANSWERS,
    f"static + {ANSWERS}",
    f"experts + {ANSWERS}",
    f"{ONE} + {ANSWERS}",
)
DRAFTERS = ("static", "experts", ONE)
KEPT = 16  # likeliest tokens of the target that a record keeps
WARMING = 2  # prompts of each domain, neither learned from nor measured, that a budget sees first
QUOTIENTS = (
    ("experts", "static"),
    ("experts", ANSWERS),
    (f"experts + {ANSWERS}", ANSWERS),
    (f"experts + {ANSWERS}", f"static + {ANSWERS}"),
    ("experts", ONE),
    (f"experts + {ANSWERS}", f"{ONE} + {ANSWERS}"),
)


def distribution(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """Logits [N, V] → what is drawn from, [N, V]; greedy: all on the most likely token."""
    if temperature:
        return (logits.float() / temperature).softmax(-1)
    return torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).float()


@torch.inference_mode()
def acceptances(
    systems: Systems, prompt: tuple[str, str], answer: list[int], temperature: float
) -> dict[str, Pair]:
    """By drafter: Σ min(p, q) of its first drafted token, summed over the answer's tokens, and their number.

    It draws as in serving: from its list, and from the tokens that stand in the text before. The first token
    of the answer is left out: a feature drafter has nothing to guess it from.
    """
    system: System = systems.system
    domain, words = prompt
    text, count = [*prompt_ids(system.target.tokenizer, words, chat=True), *answer], len(answer) - 1
    drafters = [name for name in DRAFTERS if name in systems.names]
    if not count:
        by = (*drafters, *(f"{name}, by kept tokens" for name in drafters))
        return dict.fromkeys(by, (0.0, 0.0))
    ids = torch.tensor([text], device=system.target.device)
    logits = system.target.forward(system.target.new_cache(1), 0, ids, [0])[0, -count - 1 : -1]
    wanted, found = distribution(logits, temperature), {}
    features = features_of(system.draft, system.target, text)
    assert features is not None
    for name in drafters:
        base, bank = systems.of(name).draft, systems.of(name).bank
        assert isinstance(base, FeatureBase)
        draft = base.hf
        with systems.serving(name):
            bank.select([systems.drafts(name, domain)])
            hidden = draft.advance(draft.new_cache(1), 0, draft.fuse(features), ids[:, 1:-1], [0])
            normed, begin = draft.normed(hidden[:, -count:]), len(text) - count
            beside = GrowingText(draft, text, begin).beside(draft.vocabulary)  # of whoever drafts now
            known = torch.arange(begin, len(text), device=ids.device)
            drawn = distribution(beside.add(draft.guess(normed)[0], normed[0], known), temperature)
            tokens = beside.names
        both = torch.minimum(wanted[:, tokens], drawn)
        found[name] = float(both.sum()), float(count)
        likely = torch.zeros_like(wanted).scatter(1, wanted.topk(KEPT).indices, 1.0)[:, tokens]
        found[f"{name}, by kept tokens"] = float((both * likely).sum()), float(count)
    return found


def counted(rounds: list[Answered]) -> tuple[dict[str, list[Pair]], dict[str, list[Pair]]]:
    """By system and prompt, added up over the rounds: (tokens, seconds), and (tokens, target steps)."""
    speed: dict[str, list[Pair]] = {}
    length: dict[str, list[Pair]] = {}
    for name, (outputs, _) in rounds[0].items():
        for i in range(len(outputs)):
            mine = [one[name][0][i] for one in rounds]
            tokens = float(sum(len(output.token_ids) for output in mine))
            seconds = sum(one[name][1][i] for one in rounds)
            steps = float(sum(max(1, output.speculation.num_steps) for output in mine))
            speed.setdefault(name, []).append((tokens, seconds))
            length.setdefault(name, []).append((tokens, steps))
    return speed, length


def figures(rounds: list[Answered], accepted: dict[str, list[Pair]]) -> dict[str, Any]:
    """Each system's speed and tokens a step, some of them beside others, and what the experts changed."""
    speed, length = counted(rounds)
    gain = change(accepted["static"], accepted["experts"])
    beside = change(accepted[ONE], accepted["experts"]) if ONE in accepted else None
    kept = change(accepted["static, by kept tokens"], accepted["experts, by kept tokens"])
    return {
        **{
            name: {
                "tokens_per_second": rounded(ratio(speed[name])),
                "times_plain": rounded(quotient(speed[name], speed["plain"])),
                "tokens_per_step": rounded(ratio(length[name])),
            }
            for name in speed
        },
        **{f"{a} / {b}": rounded(quotient(speed[a], speed[b])) for a, b in QUOTIENTS if b in speed},
        "acceptance": {
            "static": rounded(gain.before),
            "experts": rounded(gain.after),
            **({ONE: rounded(beside.before)} if beside else {}),
            "gain": rounded(gain.difference),
            **({f"more than {ONE}": rounded(beside.difference)} if beside else {}),
            "gain by kept tokens": rounded(kept.difference),
        },
    }


def by_domain(prompts: Prompts, accepted: dict[str, list[Pair]]) -> dict[str, Any]:
    """The drafter's acceptance before and after the stream, of each domain."""
    found = {}
    for domain in sorted({name for name, _ in prompts}):
        mine = [i for i, (name, _) in enumerate(prompts) if name == domain]
        static, experts = ([accepted[name][i] for i in mine] for name in ("static", "experts"))
        gain = change(static, experts)
        found[domain] = {"static": rounded(gain.before), "experts": rounded(gain.after)}
        found[domain]["gain"] = rounded(gain.difference)
    return found


def measure(
    systems: Systems, prompts: Prompts, params: SamplingParams, args: argparse.Namespace
) -> dict[str, Any]:
    """All figures at one temperature, together and by domain."""
    rounds = [one_by_one(systems, prompts, params, rounds=1) for _ in range(args.rounds)]  # drawn anew
    each = [
        acceptances(systems, prompt, output.token_ids, params.temperature)
        for prompt, output in zip(prompts, rounds[0]["plain"][0], strict=True)
    ]
    accepted = {name: [one[name] for one in each] for name in each[0]}
    rates, _ = in_a_queue(systems, prompts, params, args.queue_rounds)
    return {
        "all": figures(rounds, accepted),
        "by_domain": by_domain(prompts, accepted),
        "batch": {name: rounded(quotient(rate, rates["plain"])) for name, rate in rates.items()},
        "prompts": len(prompts),
    }


def run(args: argparse.Namespace, seed: int, home: Path) -> Iterator[dict[str, Any]]:
    """One home, that learns unless it has; the report so far after each temperature."""
    settings = load_settings(home=home, target=args.target, draft=args.draft, update_every=args.update_every)
    names = [name for name in NAMES if not (args.experts_only and name.startswith(ONE))]
    with opened(settings) as system, nullcontext() if args.experts_only else with_one_adapter(system) as one:
        for each in (system, one) if one else (system,):
            warm_up(each)
        stream = prompts_for(args, "stream", args.requests, seed)
        drawn = SamplingParams(max_tokens=args.max_tokens, temperature=args.learned_at)
        report: dict[str, Any] = {"learning": taught(system, stream, drawn, seed), "temperatures": {}}
        if one:
            report["learning of one adapter"] = taught(one, stream, drawn, seed)
        report |= {"step_ms": step_costs(system), **surroundings(system)}
        prompts = prompts_for(args, "dev", args.heldout, seed)
        others = prompts_for(args, "dev", args.heldout + WARMING, seed)[len(prompts) :]
        for temperature in args.temperatures:
            params = SamplingParams(max_tokens=args.max_tokens, temperature=temperature)
            systems = Systems(system, one, names=names)
            for budget in systems.budgets.values():  # what the stream has shown is the experts' acceptance
                budget.acceptance.clear()
            begin(systems, others, params)
            report["temperatures"][f"{temperature:g}"] = measure(systems, prompts, params, args)
            show(temperature, report["temperatures"][f"{temperature:g}"], names)
            yield report


def show(temperature: float, found: dict[str, Any], names: list[str]) -> None:
    part = found["all"]
    speeds = "  ".join(
        f"{name} {part[name]['times_plain'][0]:.2f}×/{part[name]['tokens_per_step'][0]:.2f}" for name in names
    )
    print(f"temperature {temperature:g}: {speeds}, {part['acceptance']}, batch {found['batch']}", flush=True)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--requests", type=int, default=40, help="of the stream, for each domain")
    parser.add_argument("--heldout", type=int, default=7, help="prompts of each domain to measure with")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--learned-at", type=float, default=1.0, help="temperature of the stream")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[1.0, 0.7])
    parser.add_argument("--experts-only", action="store_true", help="without the one adapter for all domains")
    parser.add_argument("--rounds", type=int, default=2, help="times that each prompt is answered alone")
    parser.add_argument("--queue-rounds", type=int, default=2, help="times that each queue is answered")
    args = parser.parse_args()
    given = {key: str(value) for key, value in vars(args).items() if key not in ("data", "out", "homes")}
    report: dict[str, Any] = {"settings": given, "date": datetime.now(UTC).date().isoformat(), "seeds": []}
    for seed in range(args.seeds):
        before = report["seeds"]
        with tempfile.TemporaryDirectory() as folder:
            for found in run(args, seed, args.homes / str(seed) if args.homes else Path(folder)):
                report["seeds"] = [*before, found]
                args.out.parent.mkdir(parents=True, exist_ok=True)
                args.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
