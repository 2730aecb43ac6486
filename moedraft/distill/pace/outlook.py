"""What the updates of a home wait for, read without its trainer."""

from __future__ import annotations

from typing import Any

from moedraft.config import Settings
from moedraft.core import SHARED
from moedraft.distill.pace.governor import is_paused, news
from moedraft.distill.pace.interval import Interval
from moedraft.learning_state import NO_RECORDS
from moedraft.storage.changes import is_pinned
from moedraft.storage.store import Store


def outlook(store: Store, settings: Settings) -> dict[str, Any]:
    """How many new records each adapter has, and which have enough for an update, or `shared` for all.

    A trainer that runs may know better what its last updates were worth. Raises StorageError.
    """
    new_records, every = news(store), settings.update_every
    due, status, wanted = [name for name, count in new_records.items() if count >= every], NO_RECORDS, every
    if settings.model_updates == "joint":
        found, interval = new_records.get(SHARED, 0), Interval(store, every, settings.train_horizon)
        interval.resume()
        wanted = interval.wanted(found)
        due = [SHARED] if found >= wanted else []
        if is_pinned(store.registry, SHARED):
            due, status = [], f"no update comes while '{SHARED}' is pinned"
        elif interval.why_rare:
            status = f"{found} of {wanted} new records are there; {interval.why_rare}"
    status = f"due: {', '.join(due)}" if due else status
    return {
        "status": f"paused; {status}" if is_paused(store.registry) else status,
        "due": due,
        "records": store.replay.count(),
        "new_records": new_records,
        "update_every": every,
        "wanted": wanted,
    }
