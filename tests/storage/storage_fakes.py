"""Small domains, records, request statistics and adapters for the storage tests."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import candidates

from moedraft.core import AdapterVersion, Domain, ReplayRecord, RequestStats
from moedraft.speculation import SpeculationStats
from moedraft.storage import AdapterStore, Candidate

BASE = "sha256:base"


def domain(name: str = "sql", created_at: float = 1.0) -> Domain:
    return Domain(name, f"all about {name}", ("SELECT 1", "größer ≥ 3"), created_at)


def record(name: str = "sql", token: int = 7, **changes: Any) -> ReplayRecord:
    """Two prompt tokens, three answer tokens, top-2; `token` is the first prompt token."""
    plain = ReplayRecord(
        domain=name,
        expert=name,
        adapter_version=1,
        target_id="tiny",
        token_ids=[token, 2, 3, 4, 5],
        num_prompt_tokens=2,
        topk_ids=[[3, 9], [4, 70000], [5, 1]],
        topk_logprobs=[[-0.125, -3.5], [-0.25, -2.0], [0.0, float("-inf")]],
        rejected=[1],
        drafted=4,
        accepted=2,
        created_at=12.5,
        temperature=0.75,
    )
    return replace(plain, **changes)


def stats(expert: str = "sql", drafted: int = 10, accepted: int = 5, **changes: Any) -> RequestStats:
    plain = RequestStats(
        request_id="r",
        expert=expert,
        adapter_version=1,
        lang="en",
        num_prompt_tokens=3,
        num_tokens=8,
        seconds=0.5,
        finish_reason="stop",
        created_at=1.0,
        speculation=SpeculationStats(
            num_steps=4,
            num_drafts=2 if drafted else 0,
            num_draft_tokens=drafted,
            num_accepted_tokens=accepted,
        ),
    )
    speculation = {name: changes.pop(name) for name in asdict(plain.speculation) if name in changes}
    return replace(plain, speculation=replace(plain.speculation, **speculation), **changes)


def candidate(value: float = 1.0, parent: int = 0, name: str = "sql", **changes: Any) -> Candidate:
    """An adapter whose only tensor is filled with `value`."""
    facts = {"base_hash": BASE, "modules": ("q_proj",), "acceptance_after": 0.5}
    return candidates.candidate(name, value, parent=parent, **{**facts, **changes})


def publish(store: AdapterStore, value: float, parent: int, name: str = "sql") -> AdapterVersion:
    return store.publish(candidate(value, parent, name))
