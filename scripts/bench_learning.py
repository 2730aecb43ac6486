#!/usr/bin/env python3
"""Measure whether learning from the stream raises acceptance, and which arrangement of adapters learns best.

    python scripts/bench_learning.py --data ../shared/data --out results/learning.json

Every arrangement serves the same queries with the same number of updates and does not see the queries'
domains. Measured is the acceptance on held-out queries that were never served: the share of the target's
greedy tokens that the draft guesses when it reads the target's answer token by token. It is the mean over
the domains.

    static      the generic draft base, nothing learns
    one         one online adapter, trained on the latest window only (as Online Speculative Decoding)
    shared      the shared adapter alone, trained on replay of all domains in equal shares
    experts     per-domain experts alone, routed by the classifier
    both        the shared adapter with experts on top; the one that promises most is trained (default)
    oracle      the same, with the true domain of every query given
    offline     one adapter trained on the whole stream beforehand (the most that one adapter can reach)

The target's answers are computed once and kept in a folder, so that the arrangements differ in learning only.
"""

from __future__ import annotations

import argparse
import json
import lzma
import platform
import random
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from moedraft.config import load_settings
from moedraft.core import SHARED, ReplayRecord
from moedraft.distill.assembly import build_loop
from moedraft.distill.loop import DistillLoop
from moedraft.showcase.measure import by_domain, right_guesses
from moedraft.showcase.shipped import Query
from moedraft.system.build import System, build
from moedraft.system.domains import register_all

ARMS = ("static", "one", "shared", "experts", "both", "oracle", "offline")


def rows(path: Path) -> list[dict]:
    with lzma.open(path, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


@dataclass
class Data:
    examples: dict[str, list[str]]
    stream: list[Query]
    heldout: list[Query]


def load_data(folder: Path, args: argparse.Namespace) -> Data:
    """The router's examples (from dev/), the stream and held-out queries (from stream/), without overlap."""
    rng = random.Random(args.seed)
    names = sorted(p.name.split(".")[0] for p in (folder / "stream").glob("*.jsonl.xz"))[: args.domains]
    examples, stream, heldout = {}, [], []
    for name in names:
        short = [r for r in rows(folder / "dev" / f"{name}.jsonl.xz") if len(r["prompt"]) < 900]
        examples[name] = [r["prompt"] for r in rng.sample(short, args.examples)]
        served = [r for r in rows(folder / "stream" / f"{name}.jsonl.xz") if len(r["prompt"]) < 900]
        chosen = rng.sample(served, args.requests + args.heldout)
        queries = [Query(r["prompt"], name, args.max_tokens) for r in chosen]
        stream += queries[: args.requests]
        heldout += queries[args.requests :]
    if args.order == "mixed":
        rng.shuffle(stream)
    return Data(examples, stream, heldout)


def answer_all(system: System, queries: list[Query], say: str) -> tuple[list[ReplayRecord], list[list[int]]]:
    """The target's greedy answers as replay records (domain: by the router), and their token ids."""
    from moedraft.system.recorder import replay_record

    kept: dict[str, ReplayRecord] = {}
    engine = system.engine
    unsubscribe = engine.subscribe(
        lambda s: kept.__setitem__(s.request_id, replay_record(s, system.recorder.target_id))
    )
    began, records = time.monotonic(), []
    for start in range(0, len(queries), 64):
        part = queries[start : start + 64]
        params_each = serve_with_capture(system, part)
        records += [kept[request_id] for request_id in params_each]
        print(f"{say}: {start + len(part)}/{len(queries)}, {time.monotonic() - began:.0f} s", flush=True)
    unsubscribe()
    return records, [r.token_ids[r.num_prompt_tokens :] for r in records]


def serve_with_capture(system: System, queries: list[Query]) -> list[str]:
    from moedraft.core import SamplingParams

    ids = [
        system.engine.add(q.prompt, SamplingParams(max_tokens=q.max_tokens), capture=True, counted=False)
        for q in queries
    ]
    while system.engine.has_work:
        system.engine.step()
    return ids


class Arm:
    """One arrangement in a home of its own. It stores the records in order, trains, and measures."""

    def __init__(self, name: str, data: Data, args: argparse.Namespace) -> None:
        self.name = name
        self.folder = tempfile.TemporaryDirectory()
        overrides = {"shared_rank": args.one_rank} if name in ("one", "offline") else {}
        self.system = build(
            load_settings(home=self.folder.name, target=args.target, draft=args.draft, **overrides)
        )
        register_all(self.system.store, self.system.router, data.examples)
        self.loop = build_loop(replace_every(self.system, args), self.system.store)
        self.data, self.args = data, args

    def feed(self, records: list[ReplayRecord]) -> None:
        """Store a window of served queries. For `one` (Online Speculative Decoding) keep only that."""
        if self.name == "one":
            self.system.store.replay.purge()
        if self.name == "oracle":
            records = [replace(r, domain=r.expert) for r in records]
        self.system.store.replay.add(records)

    def train(self) -> None:
        who = {"one": SHARED, "shared": SHARED, "offline": SHARED}.get(self.name)
        if self.name == "experts":
            who = next_expert(self.loop)
        if self.name != "static":
            self.loop.run_once(who)
            self.system.refresh()

    def measure(self, answers: list[list[int]], oracle: bool) -> dict[str, float]:
        prompts = [q.prompt for q in self.data.heldout]
        routed = [route.domain for route in self.system.router.route(prompts)]
        experts = [q.domain for q in self.data.heldout] if oracle else routed
        if self.name in ("static", "one", "shared", "offline"):
            experts = [SHARED] * len(prompts)
        shares = []
        for prompt, answer, expert in zip(prompts, answers, experts, strict=True):
            right, tried = right_guesses(self.system, prompt, answer, expert)
            shares.append(right / tried)
        return by_domain(self.data.heldout, shares)

    def close(self) -> None:
        self.system.close()
        self.folder.cleanup()


def replace_every(system: System, args: argparse.Namespace):
    """Without the gate: equal updates are compared, and each is published."""
    options = {"update_every": args.every, "update_steps": args.steps, "gate": "off"}
    return system.settings.model_copy(update=options)


def next_expert(loop: DistillLoop) -> str | None:
    """An expert that is due, but never the shared adapter."""
    before = loop.gains.get(SHARED)
    loop.gains[SHARED] = -1e9
    due = loop.due()
    if before is not None:
        loop.gains[SHARED] = before
    return due if due != SHARED else None


def run_arm(name: str, data: Data, records: list[ReplayRecord], answers: list[list[int]], args) -> dict:
    arm = Arm(name, data, args)
    curve, began = [], time.monotonic()
    windows = [records[i : i + args.window] for i in range(0, len(records), args.window)]
    if name == "offline":
        arm.feed(records)
    for number, window in enumerate(windows):
        if number % max(1, len(windows) // 5) == 0:
            curve.append(mean(arm.measure(answers, name == "oracle")))
        if name != "offline":
            arm.feed(window)
        for _ in range(args.updates_per_window):
            arm.train()
    final = arm.measure(answers, name == "oracle")
    versions = {d: arm.system.store.registry.updates(d) for d in [SHARED, *data.examples]}
    result = {
        "acceptance": round(mean(final), 4),
        "by_domain": {k: round(v, 4) for k, v in final.items()},
        "curve": [round(v, 4) for v in [*curve, mean(final)]],
        "updates": sum(versions.values()),
        "updates_by_adapter": {k: v for k, v in versions.items() if v},
        "seconds": round(time.monotonic() - began, 1),
    }
    arm.close()
    facts = (result["acceptance"], result["curve"], result["updates"], f"{result['seconds']} s")
    print(name, *facts, flush=True)
    return result


def mean(values: dict[str, float]) -> float:
    return sum(values.values()) / len(values)


def write(args: argparse.Namespace, right: float, arms: dict[str, dict]) -> None:
    result = {
        "router_accuracy": round(right, 4),
        "arms": arms,
        "settings": {k: v for k, v in vars(args).items() if not isinstance(v, Path)},
        "machine": platform.machine(),
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--target", default="mini")
    parser.add_argument("--draft", default="mini")
    parser.add_argument("--domains", type=int, default=15)
    parser.add_argument("--examples", type=int, default=40, help="router examples per domain")
    parser.add_argument("--requests", type=int, default=64, help="served queries per domain")
    parser.add_argument("--heldout", type=int, default=12, help="held-out queries per domain")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--window", type=int, default=48, help="queries between trainings")
    parser.add_argument("--updates-per-window", type=int, default=3)
    parser.add_argument("--every", type=int, default=8)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--one-rank", type=int, default=160)
    parser.add_argument("--order", choices=["mixed", "by-domain"], default="mixed")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("results/learning.json"))
    return parser.parse_args()


def main() -> None:
    args = arguments()
    if not (args.data / "stream").is_dir():
        raise SystemExit(f"bench_learning: no stream/ folder in {args.data}; name the data with --data.")
    torch.manual_seed(args.seed)
    data = load_data(args.data, args)
    with tempfile.TemporaryDirectory() as home:
        system = build(load_settings(home=home, target=args.target, draft=args.draft))
        register_all(system.store, system.router, data.examples)
        records, _ = answer_all(system, data.stream, "stream")
        _, answers = answer_all(system, data.heldout, "held-out")
        routed = [record.domain for record in records]
        system.close()
    right = sum(r == q.domain for r, q in zip(routed, data.stream, strict=True)) / len(routed)
    # `expert` holds the true domain, which only the oracle uses; the system sees nothing but `domain`.
    records = [replace(r, expert=q.domain) for r, q in zip(records, data.stream, strict=True)]
    print(f"router: {right:.3f} of the stream in its true domain", flush=True)
    arms: dict[str, dict] = {}
    for name in args.arms:
        arms[name] = run_arm(name, data, records, answers, args)
        write(args, right, arms)  # so that a run that is interrupted leaves its results so far
    if "static" in arms and "both" in arms:
        print(f"gain over the static draft: {arms['both']['acceptance'] - arms['static']['acceptance']:+.3f}")


if __name__ == "__main__":
    main()
