#!/usr/bin/env python3
"""Measure what experts bring on a real model: serve a stream, learn from it, compare on held-out prompts.

    python scripts/bench_experts.py --target smollm2 --data ../shared/data --out results/smollm2/experts.json

The parts are those of the server: engine, recorder, replay, joint updates, gate. The true domain of every
prompt is given, so that the router plays no part. All systems answer the same held-out prompts greedily, in
turns:

    plain               the target alone
    static              the draft base as it came
    experts             the same with shared adapter and experts, after the stream
    one adapter         the same with one adapter for all domains (`selector = "fixed"`), as large as those
                        two, that has learned from the same requests
    lookup              guesses from the prompt's and the answer's own text alone
    lookup in answers   the same, and from the earlier answers of the domain (`lookup_answers`)
    ... + lookup        drafter and lookup in the own text, the better one for each row
    ... + lookup in answers
                        drafter and lookup in both, as a server has it

Reported are, with 95 % intervals over the prompts (bootstrap, paired): tokens per second at batch 1 and at
batch 8 with all domains mixed, tokens per target step, and the share of the target's tokens that the
drafter's first guess hits where it reads the target's own answer.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from feature_answers import prompts_of

from moedraft.config import load_settings
from moedraft.core import SHARED, RequestOutput, SamplingParams
from moedraft.distill.assembly import build_loop
from moedraft.distill.joint.joint_loop import JointLoop
from moedraft.distill.loop import DistillLoop
from moedraft.drafting.base import load_base
from moedraft.drafting.lookup.drafter import LookupDrafter
from moedraft.showcase.bench import surroundings
from moedraft.showcase.findings.estimates import Estimate, change, quotient, ratio
from moedraft.showcase.measure import (
    only_base,
    right_guesses,
    step_costs,
    warm_up,
)
from moedraft.system.build import System, assemble, open_store, opened
from moedraft.system.domains.registering import register_all

DOMAINS = "sql_en,code_python,math_en,docs_fr,docs_ja,support"
ONE, ANSWERS = "one adapter", "lookup in answers"
SOURCES = {
    "static": "model",
    "experts": "model",
    ONE: "model",
    "lookup": "lookup",
    ANSWERS: "lookup",
    f"static + {ANSWERS}": "auto",
    "experts + lookup": "auto",
    f"{ONE} + lookup": "auto",
    f"experts + {ANSWERS}": "auto",
    f"{ONE} + {ANSWERS}": "auto",
}
NAMES = ("plain", *SOURCES)
QUEUE = 5  # requests that one place in the batch serves of a queue
LEARNED = "bench_experts.json"  # in a home: what was learned
Prompts = list[tuple[str, str]]  # domain and prompt
Pair = tuple[float, float]  # what is counted, and out of how much
Answered = dict[str, tuple[list[RequestOutput], list[float]]]  # by system: answers, and seconds of each
Batches = tuple[dict[str, list[Pair]], dict[str, list[list[int]]]]  # by system: (tokens, seconds), answers


class Systems:
    """What is compared, on one target; each with a draft budget of its own, as if it served alone."""

    def __init__(self, system: System, one: System | None = None, names: Sequence[str] = NAMES) -> None:
        """one: with one adapter for all domains; the other has experts. names: which are compared."""
        self.system, self.one, self.names = system, one, names
        self.budgets = {name: copy.deepcopy(self.of(name).engine.chooser.budget) for name in names}
        self.lookups: dict[str, LookupDrafter] = {}
        self.begin_to_look_up()
        for name in (name for name in names if name.startswith("static")):
            self.budgets[name].acceptance.clear()  # what is known there is the experts' acceptance

    def begin_to_look_up(self) -> None:
        """From now on no system knows how often what it looks up is right."""
        self.lookups = {
            name: LookupDrafter(self.of(name).engine.chooser.lookup.past if name.endswith(ANSWERS) else None)
            for name in self.names
            if name in SOURCES
        }

    def of(self, name: str) -> System:
        if not name.startswith(ONE):
            return self.system
        assert self.one is not None
        return self.one

    def drafts(self, name: str, domain: str) -> str:
        """Who drafts for a request of this domain."""
        return SHARED if name.startswith(ONE) else domain

    @contextmanager
    def serving(self, name: str) -> Iterator[None]:
        """The engine as this system; `plain` is what requests ask for themselves."""
        source, system = SOURCES.get(name, "auto"), self.of(name)
        chooser, lookup = system.engine.chooser, self.lookups.get(name)
        drafting = chooser.using(self.budgets[name], source, lookup=lookup)  # type: ignore[arg-type]
        with drafting, only_base(system, name.startswith("static")):
            yield


def answer(
    systems: Systems, name: str, prompts: Prompts, params: SamplingParams
) -> tuple[list[RequestOutput], float]:
    """The answers to all prompts at once, and the seconds they took."""
    engine = systems.of(name).engine
    with systems.serving(name):
        began = time.perf_counter()
        options: dict[str, Any] = {"draft": name != "plain", "capture": False, "chat": True}
        ids = [
            engine.add(prompt, params, expert=systems.drafts(name, domain), **options)
            for domain, prompt in prompts
        ]
        done: dict[str, RequestOutput] = {}
        while engine.has_work:
            done |= {output.request_id: output for output in engine.step() if output.finish_reason}
        return [done[i] for i in ids], time.perf_counter() - began


def learn(system: System, loop: DistillLoop, prompts: Prompts, params: SamplingParams) -> dict[str, Any]:
    """Serve the stream and learn from it: updates between two steps of the engine, then in its idle time.

    While requests come an update is made for new records only; after the last one it goes on by itself, as
    long as the gate does not throw an update away.
    """
    engine = system.engine
    waiting, spent, decisions = list(prompts), [0.0], list[list[str | None]]()
    began = time.perf_counter()

    def train() -> None:
        at = time.perf_counter()
        loop.run_once()
        spent.append(time.perf_counter() - at)
        decisions.extend([one.expert, one.decision] for one in loop.outcomes)
        system.refresh()
        published = sum(one.decision == "promote" for one in loop.outcomes)
        print(
            f"update {len(spent) - 1}: {published} of {len(loop.outcomes)} published, {len(waiting)} requests"
            f" left, {sum(spent):.0f} s of learning {loop.state.reason or ''}",
            flush=True,
        )

    idle = 0  # updates that a server would go on with in its idle time
    while waiting or engine.has_work:
        while waiting and len(engine.sequences) < system.settings.max_batch_size:
            domain, prompt = waiting.pop(0)
            engine.add(prompt, params, expert=domain, capture=True, chat=True)
        finished = [output for output in engine.step() if output.finish_reason]
        if isinstance(loop, JointLoop):
            idle, loop.again = loop.again or idle, 0
        if finished and loop.due() is not None:
            idle = 0
            train()
    served = time.perf_counter() - began
    if isinstance(loop, JointLoop):
        loop.again = loop.again or idle
    while loop.due() is not None:
        train()
    return {
        "requests": len(prompts),
        "updates": len(spent) - 1,
        "seconds_of_the_stream": round(served, 1),
        "seconds_of_learning": round(sum(spent), 1),
        "published": sum(decision == "promote" for _, decision in decisions),
        "judged": len(decisions),
    }


def one_by_one(systems: Systems, prompts: Prompts, params: SamplingParams, rounds: int) -> Answered:
    """Every system answers every prompt alone; the systems take turns at each prompt."""
    names = list(systems.names)
    seconds: dict[str, list[list[float]]] = {name: [[] for _ in prompts] for name in names}
    outputs: dict[str, list[RequestOutput]] = {name: [] for name in names}
    for number in range(rounds):
        for i, prompt in enumerate(prompts):
            for name in names[i % len(names) :] + names[: i % len(names)]:
                [output], took = answer(systems, name, [prompt], params)
                seconds[name][i].append(took)
                if number == 0:
                    outputs[name].append(output)
    return {name: (outputs[name], [median(each) for each in seconds[name]]) for name in names}


def in_a_queue(systems: Systems, prompts: Prompts, params: SamplingParams, rounds: int) -> Batches:
    """Every system answers queues of prompts of all domains, with a full batch as long as prompts wait.

    The systems take turns at each queue. Each has answered one before, so that its budget has seen full
    batches.
    """
    size = QUEUE * systems.system.settings.max_batch_size
    queues = [prompts[first : first + size] for first in range(0, len(prompts) - size + 1, size)] or [prompts]
    answers: dict[str, list[list[int]]] = {}
    rates: dict[str, list[Pair]] = {}
    names = systems.names
    for name in names:
        answer(systems, name, queues[0], params)
    for _ in range(rounds):
        for i, queue in enumerate(queues):
            for name in (*names[i % len(names) :], *names[: i % len(names)]):
                outputs, took = answer(systems, name, queue, params)
                rates.setdefault(name, []).append((float(sum(len(o.token_ids) for o in outputs)), took))
                answers.setdefault(name, []).extend(o.token_ids for o in outputs)
    return rates, answers


def rounded(estimate: Estimate) -> list[float]:
    """[figure, low, high], as it is stored."""
    return [round(each, 4) for each in (estimate.value, estimate.low, estimate.high)]


def figures(found: Answered, hits: dict[str, list[Pair]]) -> dict[str, Any]:
    """Of these prompts: each system's speed and tokens a step, and what the experts changed."""
    speed = {
        name: [(float(len(o.token_ids)), took) for o, took in zip(outputs, seconds, strict=True)]
        for name, (outputs, seconds) in found.items()
    }
    length = {
        name: [(float(len(o.token_ids)), float(max(1, o.speculation.num_steps))) for o in outputs]
        for name, (outputs, _) in found.items()
    }
    gain, beside = change(hits["static"], hits["experts"]), change(hits[ONE], hits["experts"])
    result: dict[str, Any] = {
        name: {
            "tokens_per_second": rounded(ratio(speed[name])),
            "times_plain": rounded(quotient(speed[name], speed["plain"])),
            "tokens_per_step": rounded(ratio(length[name])),
        }
        for name in found
    }
    return result | {
        "experts / static": {
            "tokens_per_second": rounded(quotient(speed["experts"], speed["static"])),
            "tokens_per_step": rounded(quotient(length["experts"], length["static"])),
        },
        f"experts / {ONE}": {
            "tokens_per_second": rounded(quotient(speed["experts"], speed[ONE])),
            "tokens_per_step": rounded(quotient(length["experts"], length[ONE])),
        },
        "experts + lookup / lookup": {
            "tokens_per_second": rounded(quotient(speed["experts + lookup"], speed["lookup"]))
        },
        **{
            f"experts + {kind} / {ONE} + {kind}": {
                "tokens_per_second": rounded(quotient(speed[f"experts + {kind}"], speed[f"{ONE} + {kind}"]))
            }
            for kind in ("lookup", ANSWERS)
        },
        **{
            f"experts + {ANSWERS} / {other}": {
                "tokens_per_second": rounded(quotient(speed[f"experts + {ANSWERS}"], speed[other]))
            }
            for other in ("experts + lookup", f"static + {ANSWERS}", ANSWERS)
        },
        "first_step": {
            "static": rounded(gain.before),
            "experts": rounded(gain.after),
            ONE: rounded(beside.before),
            "gain": rounded(gain.difference),
            f"more than {ONE}": rounded(beside.difference),
        },
    }


def first_guesses(
    systems: Systems, prompts: Prompts, answers: Sequence[RequestOutput]
) -> dict[str, list[Pair]]:
    """By system and prompt: the answer's tokens that the drafter's first guess hits, and all of them."""
    hits = {}
    for name in ("static", "experts", ONE):
        with systems.serving(name):
            found = [
                right_guesses(systems.of(name), prompt, output.token_ids, systems.drafts(name, domain))
                for (domain, prompt), output in zip(prompts, answers, strict=True)
            ]
        hits[name] = [(float(right), float(tried)) for right, tried in found]
    return hits


def measure(systems: Systems, prompts: Prompts, args: argparse.Namespace) -> dict[str, Any]:
    """All figures on the held-out prompts, together and by domain."""
    params = SamplingParams(max_tokens=args.max_tokens)
    found = one_by_one(systems, prompts, params, args.rounds)
    plain = [output.token_ids for output in found["plain"][0]]
    hits = first_guesses(systems, prompts, found["plain"][0])
    domains: dict[str, Any] = {}
    for domain in sorted({domain for domain, _ in prompts}):
        mine = [i for i, (name, _) in enumerate(prompts) if name == domain]
        part = {n: ([out[i] for i in mine], [took[i] for i in mine]) for n, (out, took) in found.items()}
        domains[domain] = figures(part, {name: [each[i] for i in mine] for name, each in hits.items()})
    rates, batched = in_a_queue(systems, prompts, params, args.queue_rounds)
    whole = plain[: len(batched["plain"]) // args.queue_rounds] * args.queue_rounds
    alone = [[o.token_ids for o in outputs] == plain for outputs, _ in found.values()]
    return {
        "all": figures(found, hits),
        "by_domain": domains,
        "batch": {
            name: {
                "tokens_per_second": rounded(ratio(rate)),
                "times_plain": rounded(quotient(rate, rates["plain"])),
                "times_static": rounded(quotient(rate, rates["static"])),
            }
            for name, rate in rates.items()
        },
        "same_answers": all(alone) and all(answers == whole for answers in batched.values()),
        "prompts": len(prompts),
    }


def prompts_for(args: argparse.Namespace, split: str, count: int, seed: int) -> Prompts:
    """`count` prompts of each domain, one of each in turn, in another order for each seed."""
    names = args.domains.split(",")
    each = {name: prompts_of(args.data, name, split, 10**6) for name in names}
    for name in names:
        if split == "stream":
            random.Random(seed).shuffle(each[name])
    return [(name, each[name][i]) for i in range(count) for name in names if i < len(each[name])]


def taught(system: System, stream: Prompts, params: SamplingParams, seed: int) -> dict[str, Any]:
    """Register the domains, serve the stream and learn from it, unless the home has done so before."""
    done = system.settings.home / LEARNED
    if not done.exists():
        if system.settings.selector == "fixed":
            stream = [(SHARED, prompt) for _, prompt in stream]
        examples: dict[str, list[str]] = {}
        for name, prompt in stream:
            if name != SHARED:
                examples.setdefault(name, []).append(prompt)
        register_all(system.store, system.router, {name: some[:20] for name, some in examples.items()})
        loop = build_loop(system.settings, system.store)
        loop.trainer.seed = 1000 * seed
        done.write_text(json.dumps(learn(system, loop, stream, params)), encoding="utf-8")
    learned: dict[str, Any] = json.loads(done.read_text(encoding="utf-8"))
    return learned


def begin(systems: Systems, prompts: Prompts, params: SamplingParams) -> None:
    """Let each system's budget see a few answers before anything is timed."""
    for name in systems.names:
        for prompt in prompts:
            answer(systems, name, [prompt], params)
    systems.begin_to_look_up()  # what the stream's own prompts found was found in their own answers


@contextmanager
def with_one_adapter(system: System) -> Iterator[System]:
    """A second engine over the same target, in a home within the first one's, without experts."""
    usual = system.settings
    changed = {"selector": "fixed", "shared_rank": usual.shared_rank + usual.adapter_rank}
    settings = usual.model_copy(update={**changed, "home": usual.home / "one"})
    one = assemble(settings, open_store(settings), system.target, load_base(settings, system.target))
    try:
        yield one
    finally:
        one.close()


def run(args: argparse.Namespace, seed: int, home: Path) -> dict[str, Any]:
    """One home, from nothing to learned experts; one that has learned before is only measured."""
    settings = load_settings(
        home=home,
        target=args.target,
        draft=args.draft,
        update_every=args.update_every,
        gate=args.gate,
        update_steps=args.update_steps,
    )
    with opened(settings) as system, with_one_adapter(system) as one:
        stream = prompts_for(args, "stream", args.requests, seed)
        for each in (system, one):
            warm_up(each)
        params = SamplingParams(max_tokens=args.max_tokens)
        learned = {"learning": taught(system, stream, params, seed)}
        learned["learning of one adapter"] = taught(one, stream, params, seed)
        systems = Systems(system, one)
        begin(systems, stream[: 2 * args.domains.count(",") + 2], params)
        measured = measure(systems, prompts_for(args, "dev", args.heldout, seed), args)
        costs = step_costs(system)
        own = [step_costs(system, domain)["draft_ms"] for domain in args.domains.split(",")]
        costs["draft_own_list_ms"] = sum(own) / len(own)
        return {**learned, "step_ms": costs, **measured, **surroundings(system)}


def show(seed: int, found: dict[str, Any]) -> None:
    print(f"seed {seed}: {found['learning']}, same answers {found['same_answers']}, {found['step_ms']}")
    for name, part in [("all", found["all"]), *found["by_domain"].items()]:
        speeds = "  ".join(
            f"{n} {part[n]['times_plain'][0]:.2f}×/{part[n]['tokens_per_step'][0]:.2f}" for n in SOURCES
        )
        first = part["first_step"]
        gain = "{:+.3f} [{:+.3f}, {:+.3f}]".format(*first["gain"])
        print(
            f"{name:12} {speeds}  first {first['static'][0]:.3f} → {first['experts'][0]:.3f} ({gain})",
            flush=True,
        )
    print("batch 8", {name: each["times_plain"] for name, each in found["batch"].items()}, flush=True)


def parser_of(title: str) -> argparse.ArgumentParser:
    """The options that this benchmark and `bench_sampled.py` have in common."""
    parser = argparse.ArgumentParser(description=title.splitlines()[0])
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--draft", default="auto")
    parser.add_argument("--data", type=Path, required=True, help="folder with stream/ and dev/")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--domains", default=DOMAINS)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--homes", type=Path, help="folder that keeps the homes, so that a run can go on")
    parser.add_argument("--update-every", type=int, default=32)
    return parser


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--requests", type=int, default=100, help="of the stream, for each domain")
    parser.add_argument("--heldout", type=int, default=20, help="prompts of each domain to measure with")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument(
        "--rounds", type=int, default=1, help="times that each answer is timed; the median counts"
    )
    parser.add_argument("--queue-rounds", type=int, default=2, help="times that each queue is answered")
    parser.add_argument("--update-steps", type=int, default=16)
    parser.add_argument("--gate", choices=["on", "off"], default="on")
    args = parser.parse_args()
    given = {key: str(value) for key, value in vars(args).items() if key not in ("data", "out", "homes")}
    usual = load_settings(target=args.target)
    report: dict[str, Any] = {
        "settings": given | {key: str(getattr(usual, key)) for key in ("adapter_rank", "shared_rank")},
        "date": datetime.now(UTC).date().isoformat(),
        "seeds": [],
    }
    for seed in range(args.seeds):
        with tempfile.TemporaryDirectory() as folder:
            report["seeds"].append(run(args, seed, args.homes / str(seed) if args.homes else Path(folder)))
        show(seed, report["seeds"][-1])
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
