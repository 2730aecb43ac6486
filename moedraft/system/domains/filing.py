"""Files records anew when a domain was registered: what was asked of it before belongs to its expert.

Until then the router knew no domain for such prompts, so their records lie under the shared adapter. Looked
at are the newest of those that no expert and no client claimed. One is moved where the examples or the router
give its prompt to a domain that was registered after it was answered. Whether an update may be trained on it
depends on its prompt alone, so that does not change.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from moedraft.chat import asked_text
from moedraft.core import SHARED, ReplayRecord
from moedraft.routing.router import Router
from moedraft.storage.changes import file_under
from moedraft.storage.store import Store

LOOKED_AT = 400  # of the newest records; embedding their prompts takes some seconds
FILED = "filed_until"  # meta key: when the last domain was registered that records were filed for


def is_due(store: Store) -> bool:
    """Whether a domain was registered since records were filed."""
    return _newest(store) > float(store.registry.get_meta(FILED) or 0)


def file_anew(store: Store, router: Router, tokenizer: Any) -> dict[str, int]:
    """Move records of "shared" to domains that were registered later. Returns how many, by domain.

    A router that does not know all domains yet moves none, and it stays due.
    """
    registered, newest = dict(store.registry.domain_names()), _newest(store)
    if not registered.keys() <= {*router.domains}:
        return {}
    asked: dict[str, list[ReplayRecord]] = {}
    for record in store.replay.unclaimed(LOOKED_AT):
        if record.created_at < newest:
            text = asked_text(tokenizer, record.token_ids[: record.num_prompt_tokens])
            asked.setdefault(text, []).append(record)
    moved = Counter[str]()
    for text, name in owners(store, router, list(asked)).items():
        earlier = [one.id for one in asked[text] if one.created_at < registered.get(name, 0)]
        moved[name] += file_under(store, name, earlier)
    store.registry.set_meta(FILED, repr(newest))
    return {name: count for name, count in moved.items() if count}


def owners(store: Store, router: Router, texts: list[str]) -> dict[str, str]:
    """Whose each of these prompts is today, by the examples and the router; without those of no domain."""
    examples = {one.strip(): domain.name for domain in store.registry.domains() for one in domain.examples}
    routes = zip(texts, router.route(texts), strict=True)
    found = {text: examples.get(text.strip(), route.domain) for text, route in routes}
    return {text: name for text, name in found.items() if name != SHARED}


def _newest(store: Store) -> float:
    return max((created for _, created in store.registry.domain_names()), default=0.0)
