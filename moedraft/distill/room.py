"""Whether there is room to learn: what the engine says of its load, against what the settings allow."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass

from moedraft.config import Settings
from moedraft.storage.registry import Registry

LOAD = "load"  # meta key
STALE = 15.0  # s after which a load says nothing any more


@dataclass(frozen=True)
class Load:
    idle: float  # share of the last seconds that the engine had nothing to do, 0 … 1
    waiting: int  # requests without a slot
    at: float  # time.time()


def write_load(registry: Registry, load: Load) -> None:
    """Raises StorageError."""
    registry.set_meta(LOAD, json.dumps(asdict(load)), durable=False)


def read_load(registry: Registry) -> Load | None:
    """What was last written, None without any. Raises StorageError."""
    text = registry.get_meta(LOAD)
    try:
        return Load(**json.loads(text)) if text else None
    except (ValueError, TypeError):
        return None


def why_wait(load: Load | None, settings: Settings, now: float | None = None) -> str | None:
    """Why an update must not run now; None where there is room."""
    if load is None or abs((time.time() if now is None else now) - load.at) > STALE:
        return "no word from the engine"
    if load.waiting > settings.train_max_waiting:
        return f"{load.waiting} requests are waiting"
    if load.idle < settings.train_idle_share:
        return f"the engine is busy ({load.idle:.0%} idle)"
    return None
