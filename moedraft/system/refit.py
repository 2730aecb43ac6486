"""Refits the router on labels from the traffic: prompts whose answers showed whose expert guesses them best.

A label comes from the evidence of one answer, without the router's prior, so that the router does not confirm
itself. The prompts are read from the replay: only requests that may be learned from are used, none whose
expert the client chose, no client gives more than half of a domain's labels where others give some, and what
a purge deletes is gone with the next refit. Whether a refit serves is decided by the registered examples.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from moedraft.chat import asked_text
from moedraft.core import SHARED
from moedraft.routing.labels import MOST_LABELS, Label, Refit
from moedraft.routing.router import Router
from moedraft.storage.changes import PURGED, REFIT
from moedraft.storage.registry import Registry
from moedraft.storage.shares import Held, within_shares
from moedraft.storage.store import Store

EVERY = 32  # new compared answers that make a refit due
LOOKED_AT = 2000  # the newest compared answers, of which labels are taken
SURE = 0.9  # the evidence for one arm that makes a label


def is_due(store: Store) -> bool:
    """Whether enough answers were compared since the last refit, or prompts that it used were deleted."""
    last, newest = last_refit(store.registry), store.replay.compared(EVERY)
    return PURGED in last or (len(newest) == EVERY and newest[-1].id > last.get("last_id", 0))


def refit_by_traffic(
    store: Store, router: Router, tokenizer: Any, still: Callable[[], bool] = lambda: True
) -> Refit | None:
    """Refit the router on the registered examples and the traffic, and note what came of it.

    still: asked before anything is fitted; False ends it. None: there was nothing to try.
    """
    newest = store.replay.compared(1)
    labels = traffic_labels(store, tokenizer)
    examples = {one.name: list(one.examples) for one in store.registry.domains()}
    if not still():
        return None
    found, before = router.refit(examples, labels), last_refit(store.registry)
    state = {**(asdict(found) if found else {}), "last_id": newest[0].id if newest else 0}
    if (
        found is None or not found.taken
    ):  # what served goes on serving, unless it was fitted on deleted prompts
        state["labels"] = {} if before.get(PURGED) else before.get("labels", {})
        if before.get(PURGED):
            router.fit(examples)
    store.registry.set_meta(REFIT, json.dumps(state))
    return found


def traffic_labels(store: Store, tokenizer: Any) -> list[Label]:
    """The newest sure labels of each registered domain, MOST_LABELS at most; each prompt once."""
    held: dict[str, list[Held]] = {name: [] for name, _ in store.registry.domain_names()}
    sure: dict[int, tuple[str, float]] = {}
    for one in store.replay.compared(LOOKED_AT):
        best = max(one.heard, key=lambda arm: one.heard[arm], default=SHARED)
        if best in held and one.heard[best] >= SURE:
            held[best].append(Held(one.id, one.source, False))
            sure[one.id] = best, one.heard[best]
    chosen = [number for some in held.values() for number in within_shares(some, MOST_LABELS)]
    labels: dict[str, Label] = {}
    for number in chosen:
        for record in store.replay.by_ids([number]):
            text = asked_text(tokenizer, record.token_ids[: record.num_prompt_tokens])
            labels.setdefault(text, Label(text, *sure[number]))
    return list(labels.values())


def last_refit(registry: Registry) -> dict[str, Any]:
    """What the last refit came to; empty where there was none since the router was fitted on examples alone.

    "labels": by domain, on how many prompts of the traffic the router is fitted now.
    """
    found: dict[str, Any] = json.loads(registry.get_meta(REFIT) or "{}")
    return found
