"""Whether there is anything to learn, and whether the engine leaves room for it. Needs no training code.

The server writes its load into the home every second; the trainer process reads it there.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass

from moedraft.config import Settings
from moedraft.core import SHARED
from moedraft.storage.registry import Registry
from moedraft.storage.store import Store

LOAD = "load"  # meta key
PAUSED = "learning_paused"  # meta key that exists while an administrator has paused learning
STALE = 15.0  # s after which a stored load is too old to be used


@dataclass(frozen=True)
class Load:
    """How busy the engine was when it last said so."""

    idle: float  # share of the last seconds that the engine had nothing to do, 0 … 1
    waiting: int  # requests without a slot
    at: float  # time.time()


def write_load(registry: Registry, load: Load) -> None:
    """Store the current load in the home. Raises StorageError."""
    registry.set_meta(LOAD, json.dumps(asdict(load)), durable=False)


def read_load(registry: Registry) -> Load | None:
    """The load that was stored last, or None where none can be read. Raises StorageError."""
    text = registry.get_meta(LOAD)
    try:
        return Load(**json.loads(text)) if text else None
    except (ValueError, TypeError):
        return None


def is_paused(registry: Registry) -> bool:
    """Whether an administrator has paused learning. Raises StorageError."""
    return registry.get_meta(PAUSED) is not None


def set_paused(registry: Registry, paused: bool) -> None:
    """Raises StorageError; nothing has changed then."""
    registry.set_meta(PAUSED, "1" if paused else None)


def why_wait(load: Load | None, settings: Settings, now: float | None = None) -> str | None:
    """Why no update may run now; None where there is room for one.

    With a share of a core for learning there always is: the server keeps the trainer to it.
    """
    if load is None or abs((time.time() if now is None else now) - load.at) > STALE:
        return "no word from the engine"
    if settings.train_cpu_share:
        return None
    if load.waiting > settings.train_max_waiting:
        return f"{load.waiting} requests are waiting"
    if load.idle < settings.train_idle_share:
        return f"the engine is busy ({load.idle:.0%} idle)"
    return None


def news(store: Store) -> dict[str, int]:
    """Records that came since the last update, for the shared adapter (of all domains) and each domain."""
    counts = {}
    for name in [SHARED, *(domain.name for domain in store.registry.domains())]:
        used = int(store.registry.get_meta(f"trained:{name}") or 0)
        counts[name] = store.replay.counts_since(None if name == SHARED else name, used)
    return counts
