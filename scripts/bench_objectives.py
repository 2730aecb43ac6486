#!/usr/bin/env python3
"""Measure what adapters that learn from sampled answers by one divergence or another bring.

    python scripts/bench_objectives.py --data ../shared/data --out results/smollm2/objectives.json

Arrangements learn from a stream as in `scripts/evidence.py`, whose answers are drawn at `--temperature`, and
publish what they learned as a trainer does. When all is learned, the answers to the held-out prompts are
read. At each of their tokens a first drafted token is accepted with the probability Σ min(p, q), of the
target's distribution p and the drafter's q. That sum is given over all tokens, and over the `--topk`
likeliest ones, which are what a record keeps and the gate knows. The target's whole distributions, computed
for it, take memory: 2 bytes for each token of its vocabulary, at each token of the held-out answers. What the
file of the results holds already is not measured again.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from evidence import benches
from evidence.arrangements import ARRANGEMENTS
from evidence.command import Workplace
from evidence.running import Run, Served
from evidence.tokens import first_guesses, list_of
from feature_answers import TOPK

from moedraft.core import ReplayRecord
from moedraft.models import LanguageModel

USUAL = "static,joint,joint:rkl,joint:tvd,joint:jsd,joint+gate:jsd,mixed-replay,mixed-replay:jsd"
Known = dict[tuple[int, ...], torch.Tensor]  # bfloat16 [N, V] by an answer's token ids
Row = tuple[int, float, list[int]]  # tokens, first ones accepted by all tokens, and drafts by kept ones


@torch.no_grad()
def accepted(one: Run, held: Sequence[Served], temperature: float, known: Known) -> list[Row]:
    """By prompt: the answer's tokens but the first, and how many first drafted tokens are accepted there.

    The last are the tokens of drafts that are accepted, by what a record keeps, as in `Run.counts`. known:
    what the answers were drawn from, for the next run; missing ones are added.
    """
    kept = one.counts(held)
    rows = list[Row]()
    for served, (tokens, *drafts) in zip(held, kept, strict=True):
        ids = tuple(served.record.token_ids)
        if ids not in known:  # halved, each is rounded by a 512th at most
            known[ids] = distributions(one.bench.target, served.record, temperature).bfloat16()
        wanted = known[ids].float()
        share = torch.minimum(wanted, drawn(one, served, temperature)).sum()
        assert len(wanted) == tokens
        rows.append((tokens, round(float(share), 4), drafts))
    return rows


def distributions(target: LanguageModel, record: ReplayRecord, temperature: float) -> torch.Tensor:
    """What the answer's tokens but the first were drawn from, [N, V]."""
    ids = torch.tensor([record.token_ids], device=target.device)
    logits = target.forward(target.new_cache(1), 0, ids, [0])[0, record.num_prompt_tokens : -1]
    return (logits.float() / temperature).softmax(-1)


def drawn(one: Run, served: Served, temperature: float) -> torch.Tensor:
    """What first drafted tokens are drawn from at the same places, [N, V]; 0 where none is drafted."""
    owner = one.owner(served)
    serving = one.serving(owner)
    tokens, found = list_of(serving, owner, one.measure.general), list[torch.Tensor]()
    for _, ids, logits in first_guesses(one.trainer, serving, owner, [served.record], tokens):
        part = torch.zeros(len(logits), one.trainer.student.vocab_size)
        part[:, ids] = (logits.float() / temperature).softmax(-1)
        found.append(part)
    return torch.cat(found)


def main() -> None:
    parser = benches.parser(__doc__, "steady", samples=True)
    parser.add_argument("--arrangements", default=USUAL)
    parser.add_argument("--topk", type=int, default=TOPK, help="probabilities of a token that records keep")
    parser.set_defaults(temperature=1.0)
    args = parser.parse_args()
    if unknown := sorted({*args.arrangements.split(",")} - {*ARRANGEMENTS}):
        parser.error(f"there is no arrangement {', '.join(unknown)}.")
    if not args.temperature:
        parser.error("--temperature is above 0; scripts/evidence.py measures greedy answers.")
    if args.topk < 1:
        parser.error("--topk is 1 at least.")
    workplace, known = benches.workplace(args), Known()
    how = {"temperature": args.temperature, "topk": args.topk, "resampled": args.resampled}
    for which in benches.runs(args, workplace):
        measure(workplace, which | how, args.out, known)


def measure(workplace: Workplace, which: dict[str, Any], out: Path, known: Known) -> None:
    """Add the run `which` to the results, unless it is there."""
    report = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {"runs": []}
    if any(which.items() <= run.items() for run in report["runs"]):
        return
    warm = which["temperature"]

    def at_end(one: Run, held: Sequence[Served]) -> list[Row]:
        return accepted(one, held, warm, known)

    rows = workplace.run(which["pattern"], which["arrangement"], which["seed"], at_end)["at_end"]
    tokens = sum(row[0] for row in rows)
    whole, kept = sum(row[1] for row in rows) / tokens, sum(row[2][0] for row in rows) / tokens
    print(*which.values(), f"accepted {whole:.4f}, by kept tokens {kept:.4f}", flush=True)
    report["runs"].append(which | {"rows": rows})
    report["date"] = datetime.now(UTC).date().isoformat()
    out.write_text(json.dumps(report, separators=(",", ":")) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
