"""Refits the router on labels from the traffic: prompts whose answers showed whose expert guesses them best.

A label comes from the evidence of one answer, without the router's prior, so that the router does not confirm
itself. The prompts are read from the replay: only requests that may be learned from are used, none whose
expert the client chose, no client gives more of a domain's labels than all others together (or four) where
others give some, and what a purge deletes is forgotten with it. Whether a refit serves is decided by the
registered examples.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from typing import Any

from moedraft.chat import asked_text
from moedraft.core import SHARED
from moedraft.routing.labels import LEAST_LABELS, MOST_LABELS, Label, Refit
from moedraft.routing.router import Router, TriedFit
from moedraft.storage.changes import PURGES_SEEN, REFIT, knows_deleted, last_refit
from moedraft.storage.retention.shares import Held, of_many
from moedraft.storage.store import Store
from moedraft.system.domains.registering import refit

EVERY = 32  # new compared answers that make a refit due
SURE = 0.9  # the evidence for one arm that makes a label


def is_due(store: Store) -> bool:
    """Whether enough answers were compared since the last refit, or prompts that it used were deleted."""
    last, newest = last_refit(store.registry), store.replay.compared(EVERY)
    enough = len(newest) == EVERY and newest[-1].id > last.get("last_id", 0)
    return enough or knows_deleted(store.registry)


def refit_by_traffic(
    store: Store,
    router: Router,
    tokenizer: Any,
    still: Callable[[], bool] = lambda: True,
    changing: AbstractContextManager[Any] | None = None,
) -> Refit | None:
    """Refit the router on the registered examples and the traffic, and note what came of it.

    still: asked before anything is fitted; False ends it. changing: held while the router or what it is
    fitted on may not change, so not during the fit. None: there was nothing to try, or domains or records
    were changed meanwhile; what was fitted is dropped then.
    """
    changing = changing or nullcontext()
    with changing:
        _unlearn(store, router)
        purges, newest = store.registry.purges(), store.replay.compared(1)
        examples = _registered(store)
    labels = traffic_labels(store, tokenizer)
    if not still():
        return None
    trial = router.try_labels(examples, labels)
    with changing:
        _unlearn(store, router)
        if store.registry.purges() != purges or _registered(store) != examples:
            return None
        _take(store, router, trial, {"last_id": newest[0].id if newest else 0, PURGES_SEEN: purges})
    return trial.outcome if trial else None


def _unlearn(store: Store, router: Router) -> None:
    """Fit the router on the examples alone where it may know prompts that were deleted."""
    if knows_deleted(store.registry):
        refit(store, router)


def _registered(store: Store) -> dict[str, list[str]]:
    return {one.name: list(one.examples) for one in store.registry.domains()}


def _take(store: Store, router: Router, trial: TriedFit | None, seen: dict[str, int]) -> None:
    """Have the router use what was tried, if it is better, and note that. seen: what it was made from."""
    before = last_refit(store.registry)
    state: dict[str, Any] = {**(asdict(trial.outcome) if trial else {}), **seen}
    if trial is None or not trial.outcome.taken:  # what served goes on serving
        state["labels"] = before.get("labels", {})
    else:
        if not before:  # so that a deletion finds what is written now, whenever this process ends
            store.registry.set_meta(REFIT, json.dumps({PURGES_SEEN: seen[PURGES_SEEN]}))
        router.take(trial)
    store.registry.set_meta(REFIT, json.dumps(state))


def traffic_labels(store: Store, tokenizer: Any) -> list[Label]:
    """The newest sure labels of each registered domain, MOST_LABELS at most; each prompt once."""
    held: dict[str, list[Held]] = {name: [] for name, _ in store.registry.domain_names()}
    sure: dict[int, tuple[str, float]] = {}
    for one in store.replay.compared():  # all of them: a flood of one client hides no other's
        best = max(one.heard, key=lambda arm: one.heard[arm], default=SHARED)
        if best in held and one.heard[best] >= SURE:
            held[best].append(Held(one.id, one.source, False))
            sure[one.id] = best, one.heard[best]
    chosen = [number for some in held.values() for number in of_many(some, MOST_LABELS, LEAST_LABELS)]
    labels: dict[str, Label] = {}
    for number in chosen:
        for record in store.replay.by_ids([number]):
            text = asked_text(tokenizer, record.token_ids[: record.num_prompt_tokens])
            labels.setdefault(text, Label(text, *sure[number]))
    return list(labels.values())
