#!/usr/bin/env python3
"""Measure what lookup in earlier answers brings while requests come, without draft model and clock.

    python scripts/bench_answers.py --data ../shared/data --out results/answers.json

Requests come in the orders of `evidence.py`, and the target's own greedy answers are read along: at each
step at most `--longest` tokens are drafted as the engine's own lookup finds them, all that are right count,
and one token more. An answer is kept when it has ended, under the domain that the router gives it. Three
systems:

    own text     only the prompt and the answer itself are searched
    one store    earlier answers as well, those of all domains together
    by domain    those of the request's domain first, then those of all domains, as a server does

Reported are tokens per step of the requests as they come, by how many came before, and on held-out prompts
after the last one; with 95 % intervals over the prompts, whose counts are added up over the seeds. A clock
plays no part, so neither do the budget and the load of the machine: what does not pay is drafted as well.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence as Items
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from evidence.command import Workplace, arguments
from evidence.running import Served
from evidence.streams import traffic

from moedraft.core import SHARED, SamplingParams, Sequence
from moedraft.drafting.lookup.drafter import LookupDrafter
from moedraft.drafting.lookup.past_answers import PastAnswers
from moedraft.showcase.findings.estimates import Estimate, change, ratio

SYSTEMS = ("own text", "one store", "by domain")
PATTERNS = "steady,zipf,drift,one-by-one,shift,new-domain,unregistered,reworded,crossed"
STAGES = (0, 16, 64)  # requests before; each stage ends where the next begins
HELD_OUT = "held-out prompts, in the end"
KEPT = 32768  # tokens by store, the default of `lookup_answers`
Counts = dict[tuple[str, str], list[float]]  # by stage and prompt: tokens and steps


class Reader:
    """Looks drafts up along answers that are known."""

    def __init__(self, system: str, longest: int) -> None:
        self.by_domain, self.longest = system == "by domain", longest
        self.lookup = LookupDrafter(PastAnswers(0 if system == "own text" else KEPT))

    def read(self, served: Served) -> tuple[int, int]:
        """The answer's tokens, and how many steps they take."""
        record, begin = served.record, served.record.num_prompt_tokens
        row = Sequence("", record.token_ids[:begin], begin, SamplingParams(), 0)
        row.routed = self._store(served)
        steps, answer = 0, record.token_ids[begin:]
        while (done := row.num_generated) < len(answer):
            match = self.lookup.find(row, self.longest, widely=True)
            guesses = match.tokens if match else []
            right = 0
            while (
                right < len(guesses) and done + right < len(answer) and guesses[right] == answer[done + right]
            ):
                right += 1
            row.token_ids += answer[done : done + right + 1]
            steps += 1
        self.lookup.forget(row)
        return len(answer), steps

    def keep(self, served: Served) -> None:
        record = served.record
        self.lookup.past.add(self._store(served), record.token_ids[record.num_prompt_tokens :])

    def _store(self, served: Served) -> str:
        return served.routed if self.by_domain else SHARED


def measure(workplace: Workplace, pattern: str, seeds: int, longest: int) -> dict[str, Any]:
    """The figures of one order of requests."""
    found: dict[str, Counts] = {name: {} for name in SYSTEMS}
    for seed in range(seeds):
        domains = workplace.domains_of(pattern)
        stream = traffic(pattern, domains, workplace.args.requests, seed)
        routed = workplace.route(stream.registered, [query.prompt for query in stream.queries])
        records = workplace.bench.answers.records(stream.queries)
        served = [Served(record, name) for record, name in zip(records, routed, strict=True)]
        held = workplace.held_out(pattern, stream, domains)
        for name in SYSTEMS:
            reader = Reader(name, longest)
            for number, one in enumerate(served):
                stage = max(begin for begin in STAGES if begin <= number)
                add(found[name], f"after {stage} requests", one, reader.read(one))
                reader.keep(one)
            for one in held:
                add(found[name], HELD_OUT, one, reader.read(one))
    stages = dict.fromkeys(stage for stage, _ in found[SYSTEMS[0]])
    return {stage: {name: figures(found, name, stage) for name in SYSTEMS} for stage in stages}


def add(counts: Counts, stage: str, served: Served, read: tuple[int, int]) -> None:
    key = stage, ",".join(map(str, served.record.token_ids))
    before = counts.setdefault(key, [0.0, 0.0])
    counts[key] = [before[0] + read[0], before[1] + read[1]]


def figures(found: dict[str, Counts], name: str, stage: str) -> dict[str, list[float]]:
    """Tokens per step of this system, and what it has more than each of the others."""
    mine = pairs(found[name], stage)
    others = {
        other: change(pairs(found[other], stage), mine).difference for other in SYSTEMS if other != name
    }
    more = {f"more than {other}": rounded(difference) for other, difference in others.items()}
    return {"tokens_per_step": rounded(ratio(mine))} | more


def pairs(counts: Counts, stage: str) -> list[tuple[float, float]]:
    return [(tokens, steps) for (where, _), (tokens, steps) in sorted(counts.items()) if where == stage]


def rounded(one: Estimate) -> list[float]:
    return [round(figure, 4) for figure in (one.value, one.low, one.high)]


def main(given: Items[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with stream/ and dev/")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cache", type=Path, help="folder of the target's answers, as of evidence.py")
    parser.add_argument("--patterns", default=PATTERNS)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=160)
    parser.add_argument("--heldout", type=int, default=40, help="prompts of each domain")
    parser.add_argument("--longest", type=int, default=4, help="most tokens drafted in a step")
    parser.add_argument("--target", default="smollm2")
    args = parser.parse_args(given)
    torch.set_num_threads(1)
    same = ["data", "out", "requests", "heldout", "target", *(["cache"] if args.cache else [])]
    usual = arguments([f"--{name}={getattr(args, name)}" for name in same] + ["--dtype=float32"])
    workplace = Workplace(usual)
    names = ("patterns", "seeds", "requests", "heldout", "longest", "target")
    report: dict[str, Any] = {
        "settings": {name: getattr(args, name) for name in names} | {"max_tokens": usual.max_tokens},
        "date": datetime.now(UTC).date().isoformat(),
        "patterns": {},
    }
    for pattern in args.patterns.split(","):
        report["patterns"][pattern] = measure(workplace, pattern, args.seeds, args.longest)
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        print(pattern, {n: v["tokens_per_step"][0] for n, v in report["patterns"][pattern][HELD_OUT].items()})


if __name__ == "__main__":
    main()
