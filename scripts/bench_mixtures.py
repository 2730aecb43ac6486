#!/usr/bin/env python3
"""Measure what mixing the guesses of experts, or weakening what they add, would bring.

    python scripts/bench_mixtures.py --data ../shared/data --out results/mixtures.json

Joint learning with the gate, one update a window, learns from a stream as in `scripts/evidence.py`, but
publishes what it learned at full strength. When all is learned, the held-out prompts' answers are read once
for each way of guessing: the routed expert as it serves, the shared adapter alone, the draft base, expert and
shared adapter multiplied by smaller factors, both with the general list beside the expert's own tokens, and
means of the probabilities of several of them. Given is the share of the target's tokens that is the likeliest
one of each. A mean of two would cost a second pass of the drafter.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import torch
from evidence import benches
from evidence.arrangements import GATED, at_full_strength
from evidence.running import Run, Served
from evidence.tokens import first_guesses, list_of

from moedraft.core import SHARED, ReplayRecord
from moedraft.distill.measuring.measures import Serving
from moedraft.storage.versions.adapters import LoadedAdapter
from moedraft.storage.versions.candidate import Weights

FACTORS = ((0.8, 1.0), (0.65, 1.0), (0.5, 1.0), (1.0, 0.8), (0.8, 0.8))  # of expert and shared
MEANS = {
    "mean of expert and shared": ("expert", "shared"),
    "mean of expert and base": ("expert", "base"),
    "mean of expert, shared and base": ("expert", "shared", "base"),
    "mean of expert and shared, both lists for both": ("expert, both lists", "shared, both lists"),
}


def mixtures(one: Run, held: Sequence[Served]) -> dict[str, float]:
    """First guesses on the answers to these prompts, by way of guessing."""
    right, tokens = Counter[str](), 0
    for served in held:
        chances, said = _chances(one, one.owner(served), served.record)
        tokens += len(said)
        right.update({name: int((found.argmax(-1) == said).sum()) for name, found in chances.items()})
    counts = one.counts(held)  # as the evidence counts what serves
    assert abs(sum(row[1] for row in counts) - right["expert"]) <= 0.002 * tokens, "not as it serves"
    return {name: round(number / tokens, 4) for name, number in right.items()}


def _chances(one: Run, domain: str, record: ReplayRecord) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """By way of guessing, the probabilities [T, V] at each token of the answer; and the tokens [T]."""
    general, usual = one.measure.general, one.serving(domain)
    own = list_of(usual, domain, general)
    wide = torch.unique(torch.cat([own, general]))
    weaker = {
        f"expert × {expert}, shared × {shared}": _read(
            one, scaled(usual, domain, expert, shared), domain, own, record
        )
        for expert, shared in FACTORS
    }
    alone = one.serving(SHARED)
    parts = {
        "expert": _read(one, usual, domain, own, record),
        "shared": _read(one, alone, SHARED, list_of(alone, SHARED, general), record),
        "base": _read(one, {SHARED: None}, SHARED, general, record),
        "expert, both lists": _read(one, usual, domain, wide, record),
        "shared, both lists": _read(one, alone, SHARED, wide, record),
    }
    means = {name: torch.stack([parts[part][0] for part in of]).mean(0) for name, of in MEANS.items()}
    return {name: each[0] for name, each in {**parts, **weaker}.items()} | means, parts["base"][1]


def scaled(serving: Serving, domain: str, expert: float, shared: float) -> Serving:
    """The same adapters, what they add multiplied by these factors."""
    return {
        name: one and _times(one, expert if name == domain and name != SHARED else shared)
        for name, one in serving.items()
    }


def _times(one: Weights, factor: float) -> Weights:
    tensors = {name: t * factor if ".lora_B." in name else t for name, t in one.tensors.items()}
    return LoadedAdapter(dict(one.config), tensors, {}, one.vocabulary)


def _read(
    one: Run, serving: Serving, owner: str, vocabulary: torch.Tensor, record: ReplayRecord
) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities [T, V] of first guesses from this list of tokens, and the target's tokens [T]."""
    parts = list[torch.Tensor]()
    tokens = list[torch.Tensor]()
    for said, ids, logits in first_guesses(one.trainer, serving, owner, [record], vocabulary):
        chances = torch.zeros(len(said), one.trainer.student.vocab_size)
        chances[:, ids] = logits.float().softmax(-1)
        parts.append(chances)
        tokens.append(said)
    return torch.cat(parts), torch.cat(tokens)


def show(pattern: str, seed: int, found: Mapping[str, float]) -> None:
    for name, share in found.items():
        print(f"{pattern}, seed {seed}: {name:44} {share:.4f}", flush=True)


def main() -> None:
    args = benches.parser(__doc__, "steady,crossed,reworded").parse_args()
    workplace = benches.workplace(args)
    report: dict[str, Any] = {"date": datetime.now(UTC).date().isoformat(), "requests": args.requests}
    for pattern in args.patterns.split(","):
        for seed in range(args.seeds):
            found = workplace.run(pattern, at_full_strength(GATED), seed, mixtures)["at_end"]
            show(pattern, seed, found)
            report.setdefault(pattern, []).append(found)
            args.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
