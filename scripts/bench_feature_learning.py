#!/usr/bin/env python3
"""Measure what experts on a feature drafter learn from a target's answers, by arrangement of the adapters.

    python scripts/bench_feature_learning.py --target smollm2 --draft FOLDER --data ../shared/data \
        --answers FOLDER --out results/feature_learning.json

Every arrangement learns from the same answers, in the same batches and with as many updates. Measured is on
held-out queries, before and after: the share of the target's greedy tokens that the drafter's first guess
hits, fed with true features; and the tokens per step of the target at draft lengths 1, 2, …, which follow
from the shares at each depth.

    static      the draft base alone, nothing learns
    shared      one adapter for all domains, of twice the rank
    experts     an adapter for each domain, alone; the true domain of every query is given
    joint       both at once: each row runs through base, shared adapter and its own expert
    generic     as joint, but all guess from the draft base's list of tokens, not from lists of their own

The target's answers are computed once and kept in a folder.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from feature_answers import answers

from moedraft.core import SHARED, ReplayRecord
from moedraft.cpu.products import Product
from moedraft.distill.features.feature_batches import DraftVocabulary, FeatureBatch, collate
from moedraft.distill.features.feature_loss import loss_of
from moedraft.distill.features.feature_student import FeatureStudent
from moedraft.distill.features.record_states import RecordStates
from moedraft.distill.guessing.feature_guesses import acceptance
from moedraft.feature.checkpoint import load_draft
from moedraft.feature.model import FeatureDraft
from moedraft.feature.vocabulary import counted, own_vocabulary, ranked, union
from moedraft.models import LanguageModel, load_model

DOMAINS = "sql_en,code_python,math_en,docs_fr,docs_ja,support"
ARMS = "static,shared,experts,joint"
OF_DOMAINS = ("experts", "joint", "generic")  # arrangements with an expert for each domain
DEPTH = 5
LAST_RATE = 0.2  # of the learning rate, at the last update


@dataclass
class Bench:
    """What all arrangements have in common."""

    args: argparse.Namespace
    target: LanguageModel
    base: FeatureDraft
    states: RecordStates
    output: torch.Tensor  # [V, H], the target's output matrix
    train: dict[str, list[ReplayRecord]]
    heldout: dict[str, list[ReplayRecord]]


@dataclass
class Arm:
    """One arrangement: a student, and which of its adapters are on."""

    name: str
    student: FeatureStudent
    vocabulary: DraftVocabulary
    shared: bool

    def owner(self, record: ReplayRecord) -> str:
        return record.domain if self.name in OF_DOMAINS else SHARED


def build(args: argparse.Namespace) -> Bench:
    """The models, and the target's answers."""
    target = load_model(args.target, "target")
    embeddings = target.hf.get_input_embeddings().weight.detach()
    output = target.hf.get_output_embeddings().weight.detach()
    base = load_draft(args.draft, embeddings, output, target.num_layers)
    given = {"model": target, "data": args.data, "max_tokens": args.max_tokens, "cache": args.answers}
    names = args.domains.split(",")
    train = {d: answers(domain=d, split="stream", count=args.requests, **given) for d in names}
    heldout = {d: answers(domain=d, split="dev", count=args.heldout, **given) for d in names}
    states = RecordStates(target, base, 2**30)
    return Bench(args, target, base, states, output, train, heldout)


def arm_of(bench: Bench, name: str) -> Arm:
    """A new student without anything learned."""
    # The target's own matrices are shared by all students, everything else is copied.
    memo: dict[int, Any] = {id(bench.base.embeddings): bench.base.embeddings}
    memo[id(bench.base.lm_head.weight)] = bench.base.lm_head.weight
    memo[id(bench.base.output)] = bench.base.output
    draft = copy.deepcopy(bench.base, memo)
    own = bench.args.own and name not in ("static", "generic")
    if own:
        draft.use_vocabulary(union([draft.vocabulary, *own_lists(bench).values()]))
        draft.lm_head.requires_grad_(False)
    rank = bench.args.rank
    student = FeatureStudent(draft, "", rank=rank, shared_rank=2 * rank if name == "shared" else rank)
    if name in ("shared", "joint", "generic"):
        student.add(SHARED)
    if name in OF_DOMAINS:
        for domain in bench.train:
            student.add(domain)
        if own:
            student.use_lists(own_lists(bench))
    vocabulary = DraftVocabulary(draft.vocabulary, draft.config.vocab_size)
    return Arm(name, student, vocabulary, shared=name != "experts")


def own_lists(bench: Bench) -> dict[str, torch.Tensor]:
    """The tokens that each domain's own traffic holds, filled up with general ones."""
    together = counted(record for records in bench.train.values() for record in records)
    general = ranked(bench.base.vocabulary, together)
    return {
        d: own_vocabulary(counted(records), bench.args.own, general) for d, records in bench.train.items()
    }


def batch_of(bench: Bench, arm: Arm, records: list[ReplayRecord]) -> FeatureBatch:
    owners = [arm.owner(record) for record in records]
    return collate(records, owners, bench.states, arm.vocabulary, torch.device("cpu"))


def learn(bench: Bench, arm: Arm, seed: int, watch: Callable[[int, float], None] = lambda *_: None) -> float:
    """All updates of one arrangement; the loss of the last tenth. `watch` is told each update and its loss.

    The learning rate falls over all updates, or over every `--period` of them, as it does within each joint
    update of a server.
    """
    args, rng = bench.args, random.Random(seed)
    pool = [record for records in bench.train.values() for record in records if len(record.topk_ids) > 1]
    parameters = [p for name in arm.student.names for p in arm.student.parameters(name)]
    optimiser = torch.optim.AdamW(parameters, weight_decay=args.weight_decay)
    order: list[ReplayRecord] = []
    losses = []
    for number in range(args.updates):
        while len(order) < args.rows:
            order += rng.sample(pool, len(pool))
        chosen, order = order[: args.rows], order[args.rows :]
        for group in optimiser.param_groups:
            period = args.period or args.updates
            group["lr"] = args.learning_rate * (1 - (1 - LAST_RATE) * (number % period) / period)
        with arm.student.precision():
            loss = loss_of(
                arm.student,
                batch_of(bench, arm, chosen),
                arm.vocabulary,
                steps=args.unrolled,
                emitted=args.emitted,
                kind=args.kind,
                shared=arm.shared,
            )
        optimiser.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimiser.step()
        losses.append(loss.item())
        watch(number + 1, losses[-1])
    last = losses[-max(1, len(losses) // 10) :]
    return sum(last) / len(last)


def measured(bench: Bench, arm: Arm, domain: str) -> torch.Tensor:
    """Hits and tries by record and depth, [records, DEPTH, 2]."""
    records = [record for record in bench.heldout[domain] if len(record.topk_ids) > 1]
    parts = []
    for first in range(0, len(records), 16):
        batch = batch_of(bench, arm, records[first : first + 16])
        with arm.student.precision():
            parts.append(acceptance(arm.student, batch, DEPTH, shared=arm.shared))
    return torch.cat(parts)


def summary(counted: torch.Tensor, static: torch.Tensor) -> dict[str, Any]:
    """First-step acceptance, tokens per step by depth, and the gain on static with its 95 % interval."""
    shares = [hits / max(tries, 1) for hits, tries in counted.sum(0).tolist()]
    reached, tokens, by_depth = 1.0, 1.0, []
    for share in shares:
        reached *= share
        tokens += reached
        by_depth.append(tokens)
    picks = torch.randint(len(counted), (1000, len(counted)), generator=torch.Generator().manual_seed(0))
    ours, theirs = counted[picks, 0].sum(1).double(), static[picks, 0].sum(1).double()
    gains = (ours[:, 0] / ours[:, 1] - theirs[:, 0] / theirs[:, 1]).sort().values
    return {
        "first_step": shares[0],
        "by_depth": shares,
        "tokens_per_step": by_depth,
        "gain_low": gains[25].item(),
        "gain_high": gains[974].item(),
    }


def product_ms(bench: Bench, lists: dict[str, torch.Tensor]) -> dict[str, float]:
    """Milliseconds of one row's product with the output rows of each list, as in a draft step; in turns."""
    products = {name: Product(bench.base.rows(tokens), small=True) for name, tokens in lists.items()}
    x = torch.ones(1, 1, bench.base.config.hidden_size)
    taken: dict[str, list[float]] = {name: [] for name in products}
    for _ in range(200):
        for name, product in products.items():
            began = time.perf_counter()
            product(x)
            taken[name].append(1e3 * (time.perf_counter() - began))
    return {name: round(median(each), 4) for name, each in taken.items()}


def coverage(bench: Bench, vocabulary: torch.Tensor, domain: str) -> float:
    """Share of the held-out answers' tokens that can be drafted."""
    tokens = [token for r in bench.heldout[domain] for token in r.token_ids[r.num_prompt_tokens :]]
    return torch.isin(torch.tensor(tokens), vocabulary).float().mean().item()


def run(bench: Bench) -> dict[str, Any]:
    """All arrangements, all seeds; the figures of one arrangement are means over the seeds' counts."""
    found: dict[str, Any] = {}
    static: dict[str, torch.Tensor] = {}
    found["coverage"] = {domain: coverage(bench, bench.base.vocabulary, domain) for domain in bench.train}
    own = own_lists(bench) if bench.args.own else {}
    found["own_coverage"] = {domain: coverage(bench, own[domain], domain) for domain in own}
    print("covered", found["coverage"], found["own_coverage"], flush=True)
    found["product_ms"] = product_ms(bench, {"generic": bench.base.vocabulary, **own})
    for name in bench.args.arms.split(","):
        free: dict[str, list[torch.Tensor]] = {domain: [] for domain in bench.train}
        began, loss = time.process_time(), 0.0
        for seed in range(bench.args.seeds if name != "static" else 1):
            torch.manual_seed(seed)
            arm = arm_of(bench, name)
            if name != "static":
                loss = learn(bench, arm, seed, partial(look, bench, arm, static, found))
            for domain in bench.train:
                free[domain].append(measured(bench, arm, domain))
        if name == "static":
            static = {domain: one[0] for domain, one in free.items()}
        whole = {domain: torch.stack(each).sum(0) for domain, each in free.items()}
        found[name] = {domain: summary(whole[domain], static[domain]) for domain in whole}
        found[name]["cpu_seconds"], found[name]["loss"] = time.process_time() - began, loss
        show(name, found[name], list(bench.train))
    return found


def look(
    bench: Bench, arm: Arm, static: dict[str, torch.Tensor], found: dict[str, Any], number: int, loss: float
) -> None:
    """Measure in between, after the numbers of updates that `--curve` names."""
    if number in bench.args.curve and number < bench.args.updates:
        name = f"{arm.name}, {number} updates"
        figures = {domain: summary(measured(bench, arm, domain), static[domain]) for domain in bench.train}
        found[name] = figures | {"cpu_seconds": time.process_time(), "loss": loss}
        show(name, found[name], list(bench.train))


def show(name: str, figures: dict[str, Any], domains: list[str]) -> None:
    firsts = [figures[d]["first_step"] for d in domains]
    tokens = [figures[d]["tokens_per_step"][2] for d in domains]
    row = "  ".join(f"{d[:8]} {a:.3f}/{t:.2f}" for d, a, t in zip(domains, firsts, tokens, strict=True))
    mean = f"mean {sum(firsts) / len(firsts):.3f}/{sum(tokens) / len(tokens):.2f}"
    print(f"{name:12} {mean}  {row}  loss {figures['loss']:.3f}  {figures['cpu_seconds']:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--draft", type=Path, required=True, help="folder of a feature drafter")
    parser.add_argument("--data", type=Path, required=True, help="folder with stream/ and dev/")
    parser.add_argument("--answers", type=Path, required=True, help="folder that keeps the target's answers")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--domains", default=DOMAINS)
    parser.add_argument("--arms", default=ARMS)
    parser.add_argument("--requests", type=int, default=100, help="a domain")
    parser.add_argument("--heldout", type=int, default=24, help="queries a domain to measure with")
    parser.add_argument("--max-tokens", type=int, default=56)
    parser.add_argument("--updates", type=int, default=120)
    parser.add_argument(
        "--period", type=int, default=0, help="updates over which the rate falls; 0: over all"
    )
    parser.add_argument(
        "--curve", type=int, nargs="*", default=[], help="numbers of updates to measure after too"
    )
    parser.add_argument("--rows", type=int, default=12, help="records of one update")
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--learning-rate", type=float, default=4e-3)
    parser.add_argument("--weight-decay", type=float, default=0.0)
    parser.add_argument("--unrolled", type=int, default=2)
    parser.add_argument("--emitted", type=float, default=0.0, help="weight of the emitted token's own loss")
    parser.add_argument("--kind", default="fkl")
    parser.add_argument(
        "--own", type=int, default=4096, help="tokens of each domain's own vocabulary; 0: none"
    )
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    bench = build(args)
    found = run(bench)
    if args.out:
        folders = ("draft", "data", "answers", "out")
        settings = {key: str(value) for key, value in vars(args).items() if key not in folders}
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps({"settings": settings} | found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
