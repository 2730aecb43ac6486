#!/usr/bin/env python3
"""Measure which share of held-out answers' tokens an expert's list holds, by what counts for the list.

    python scripts/bench_lists.py --data ../shared/data --out results/lists.json

Lists are chosen as a trainer does, update after update, from the records of a steady mix. What counts is the
tokens that came, or those that the target held possible as well. Nothing is learned. The target answers the
prompts first, which takes a quarter of an hour on two slow cores unless scripts/evidence.py has kept them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from evidence import benches
from evidence.command import Workplace, commit
from evidence.streams import traffic

from moedraft.core import SHARED, ReplayRecord
from moedraft.distill.features.expert_vocabularies import Vocabularies
from moedraft.feature.model import FeatureDraft

PATTERN = "steady"
CAME, POSSIBLE = "came", "possible"  # what counts


def as_it_came(record: ReplayRecord) -> ReplayRecord:
    """The record without what the target might have said instead."""
    said = record.token_ids[record.num_prompt_tokens :]
    return replace(record, topk_ids=[[token] for token in said], topk_logprobs=[[0.0]] * len(said))


def chosen(workplace: Workplace, records: Sequence[ReplayRecord], size: int) -> Vocabularies:
    """The lists after an update for each window of these records; each reads all that came until then."""
    draft, target = workplace.bench.draft, workplace.bench.target
    assert isinstance(draft, FeatureDraft)
    found = Vocabularies(draft.vocabulary, target.vocab_size, target.eos_token_ids)
    found.size = size
    for end in range(workplace.plan.every, len(records) + 1, workplace.plan.every):
        by_domain: dict[str, list[ReplayRecord]] = {}
        for record in records[:end]:
            by_domain.setdefault(record.domain, []).append(record)
        found.choose(by_domain)
    return found


def shares(lists: Vocabularies, held: Sequence[ReplayRecord]) -> dict[str, Any]:
    """By domain, how many tokens the answers have, and how many of them its list and the shared one hold."""
    found = {}
    for domain in sorted({record.domain for record in held}):
        answers = [one.token_ids[one.num_prompt_tokens :] for one in held if one.domain == domain]
        tokens = [token for answer in answers for token in answer]
        own, all_of_them = (set(_ids(lists, name)) for name in (domain, SHARED))
        found[domain] = [len(tokens), sum(t in own for t in tokens), sum(t in all_of_them for t in tokens)]
    return {"domains": found, "lengths": {name: len(_ids(lists, name)) for name in (*found, SHARED)}}


def _ids(lists: Vocabularies, name: str) -> list[int]:
    found = lists.of(name)
    return (lists.general if found is None else found).tolist()


def measured(workplace: Workplace, seed: int, sizes: Sequence[int]) -> Iterator[dict[str, Any]]:
    stream = traffic(PATTERN, workplace.domains, workplace.args.requests, seed)
    records = workplace.bench.answers.records(stream.queries)
    held = [one.record for one in workplace.held_out(PATTERN, stream, workplace.domains)]
    for counts, read in ((CAME, [as_it_came(one) for one in records]), (POSSIBLE, records)):
        for size in sizes:
            found = {"seed": seed, "counts": counts, "size": size}
            yield found | shares(chosen(workplace, read, size), held)


def main() -> None:
    parser = benches.parser(__doc__)
    parser.add_argument("--sizes", default="2048,4096,8192", help="tokens of an expert's list")
    args = parser.parse_args()
    if not (args.data / "stream").is_dir():
        parser.error(f"no stream/ folder in {args.data}; name the data with --data.")
    workplace = benches.workplace(args)
    if not isinstance(workplace.bench.draft, FeatureDraft):
        parser.error("only a feature drafter has lists; name another --target.")
    sizes = [int(size) for size in args.sizes.split(",")]
    runs = [run for seed in range(args.seeds) for run in measured(workplace, seed, sizes)]
    report = {
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit(),
        "target": Path(args.target).name,
        "requests": args.requests,
        "runs": runs,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(report, separators=(",", ":")) + "\n", encoding="utf-8")
    for run in runs:
        print({key: run[key] for key in ("seed", "counts", "size")}, run["domains"])


if __name__ == "__main__":
    main()
