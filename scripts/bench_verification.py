#!/usr/bin/env python3
"""Measure how many tokens each rule of verification keeps of drafts that are sampled at temperature 1.

    python scripts/bench_verification.py --out results
    python scripts/bench_verification.py --out results/smollm2 --target smollm2 --prompts 12

Two engines, one with chain verification and one with block verification, answer the same prompts with the
same seeds, with drafts of a fixed length by the draft model alone. Reported are tokens per step of the
target, with the difference by prompt and its 95 % interval (a bootstrap over prompts). In the chain's rounds
both rules are also asked for the tokens that they keep of the same draft on average: without chance in it,
and never fewer for the block. In some of the rounds it is computed as well how likely the first position
keeps a token by coupled sampling, and by the two rules for several drafts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from moedraft.core import SamplingParams
from moedraft.engine.engine import Engine
from moedraft.evidence import Proposal, Rows
from moedraft.kernels import reference_several as several
from moedraft.sampling import filter_logits
from moedraft.system.build import load

ROOT = Path(__file__).resolve().parents[1]
RULES = ("chain", "block")


def kept_on_average(rows: Rows, proposal: Proposal, logits: torch.Tensor) -> tuple[float, float]:
    """Tokens that a chain and a block keep of these drafts on average, summed over the rows."""
    assert proposal.logits is not None
    assert proposal.lse is not None
    temperature = rows.sampling.temperature[:, None]
    index = proposal.token_ids.clamp_min(0)[..., None]
    target = (filter_logits(logits, rows.sampling) / temperature[..., None]).log_softmax(-1)
    wanted = target[:, :-1].gather(-1, index)[..., 0]
    offered = proposal.logits.gather(-1, index)[..., 0] / temperature - proposal.lse
    ratio = (wanted - offered).exp()
    chain = ratio.clamp(max=1).cumprod(1)
    block, share = torch.empty_like(chain), torch.ones(len(ratio))
    for step in range(ratio.shape[1]):
        share = (share * ratio[:, step]).clamp(max=1)
        block[:, step] = share
    drafted = proposal.token_ids >= 0
    return float((chain * drafted).sum()), float((block * drafted).sum())


def first_accepted(rows: Rows, proposal: Proposal, logits: torch.Tensor) -> dict[str, float]:
    """The probability that the first position of the first row keeps a drafted token, by rule, exactly."""
    assert proposal.logits is not None
    temperature = rows.sampling.temperature[0].double()
    target = (filter_logits(logits, rows.sampling)[0, 0].double() / temperature).softmax(-1)
    draft = (proposal.logits[0, 0].double() / temperature).softmax(-1)
    found = {"chain": several.accepted_share(target, draft, 1, "kseq"), "coupled": coupled(target, draft)}
    for drafts in (2, 4, 8):
        found[f"k-SEQ, {drafts} drafts"] = several.accepted_share(target, draft, drafts, "kseq")
        found[f"multi-round, {drafts} drafts"] = several.accepted_share(target, draft, drafts, "multi_round")
    return found


def coupled(target: torch.Tensor, draft: torch.Tensor, chunk: int = 256) -> float:
    """How likely both choose the same token: Σ over x of 1 / Σ over y of max(t_y / t_x, d_y / d_x)."""
    found = 0.0
    for tokens in torch.split(((target > 0) & (draft > 0)).nonzero()[:, 0], chunk):
        ratio = torch.maximum(target / target[tokens, None], draft / draft[tokens, None])
        found += float((1 / ratio.sum(1)).sum())
    return found


class Watched:
    """An engine's verification, asked for the rules' averages in rounds that draft."""

    EVERY = 24  # rounds of which one is asked for what the rules for several drafts would keep

    def __init__(self, engine: Engine) -> None:
        self.rounds: list[tuple[float, float]] = []
        self.first: list[dict[str, float]] = []
        self._count = 0
        self._verify = engine.round.verify
        engine.round.verify = self

    def __call__(self, rows: Rows, proposal: Proposal, logits: torch.Tensor) -> Any:
        if proposal.logits is not None and proposal.drafted:
            self.rounds.append(kept_on_average(rows, proposal, logits))
            self._count += 1
            if self._count % self.EVERY == 0:
                self.first.append(first_accepted(rows, proposal, logits))
        return self._verify(rows, proposal, logits)


def engine(rule: str, tokens: int, home: str, models: dict[str, str]) -> Engine:
    return load(
        **models, home=home, verification=rule, num_speculative_tokens=tokens, adaptive_budget=False,
        draft_source="model", max_batch_size=1, capture=False,
    )  # fmt: skip


def answer(engine: Engine, prompt: str, seed: int, length: int) -> tuple[int, int]:
    """Tokens, and steps of the target."""
    params = SamplingParams(temperature=1.0, max_tokens=length, seed=seed, ignore_eos=True)
    output = engine.generate([prompt], params)[0]
    return len(output.token_ids), output.speculation.num_steps


def interval(values: list[float]) -> list[float]:
    """The mean, and its 95 % interval by a bootstrap."""
    data, gen = np.array(values), np.random.default_rng(0)
    means = gen.choice(data, (4000, len(data))).mean(axis=1)
    return [round(float(x), 4) for x in (data.mean(), *np.quantile(means, [0.025, 0.975]))]


def compare(
    tokens: int, prompts: list[str], seeds: int, length: int, models: dict[str, str]
) -> dict[str, Any]:
    found: dict[str, list[list[tuple[int, int]]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        engines = {rule: engine(rule, tokens, f"{folder}/{rule}", models) for rule in RULES}
        watched = Watched(engines["chain"])
        for rule in RULES:
            answer(engines[rule], prompts[0], 0, length)
        watched.rounds.clear()
        watched.first.clear()
        kept: list[list[float]] = []
        for number, prompt in enumerate(prompts):
            for rule in RULES if number % 2 else RULES[::-1]:
                runs = [answer(engines[rule], prompt, 1000 + seed, length) for seed in range(seeds)]
                found.setdefault(rule, []).append(runs)
            kept.append([statistics.fmean(c) for c in zip(*watched.rounds, strict=True)])
            watched.rounds.clear()
        for one in engines.values():
            one.close()
    per_step = {
        rule: [sum(r[0] for r in runs) / sum(r[1] for r in runs) for runs in found[rule]] for rule in RULES
    }
    return {
        "num_speculative_tokens": tokens,
        "tokens_per_step": {rule: interval(per_step[rule]) for rule in RULES},
        "tokens_per_step_gain": interval([b - a for a, b in zip(*per_step.values(), strict=True)]),
        "kept_of_the_same_draft": {rule: interval([k[i] for k in kept]) for i, rule in enumerate(RULES)},
        "first_position_accepted": {
            name: interval([one[name] for one in watched.first]) for name in watched.first[0]
        },
        "kept_gain": interval([block - chain for chain, block in kept]),
        "least_kept_gain_of_a_prompt": round(min(block - chain for chain, block in kept), 6),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "results")
    parser.add_argument("--target", default="mini")
    parser.add_argument("--draft", default="auto", help="default: the one that is shipped for the target")
    parser.add_argument("--prompts", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64, help="length of an answer")
    parser.add_argument("--drafts", type=int, nargs="+", default=[4, 8])
    args = parser.parse_args()
    lines = (ROOT / "data" / "heldout.jsonl").read_text(encoding="utf-8").splitlines()
    prompts = [json.loads(line)["prompt"] for line in lines[: args.prompts]]
    cases, models = [], {"target": args.target, "draft": args.draft}
    for tokens in args.drafts:
        cases.append(compare(tokens, prompts, args.seeds, args.tokens, models))
        print(json.dumps(cases[-1], indent=1), flush=True)
    report = {
        "pair": Path(args.target).name, "temperature": 1.0, "prompts": len(prompts), "seeds": args.seeds,
        "tokens": args.tokens, "threads": torch.get_num_threads(), "cases": cases,
    }  # fmt: skip
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "verification.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
