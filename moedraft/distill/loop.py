"""When to train, and whom: the adapter whose next update promises the most, out of those that have news.

Beside a server there must be room for it: what the engine says of its load, against what the settings allow.

Promise = measured gain of its recent updates × its share of the traffic. The shared adapter counts all
traffic, so it goes first on a fresh home; as its gains shrink the experts take over, and an expert whose
domain is new starts with the same hope as everybody else. Each failure in a row halves the promise, so that
an adapter whose updates fail for ever goes behind the others.
"""

from __future__ import annotations

import json
import logging
import time
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from moedraft.config import Settings
from moedraft.core import SHARED, StorageError, UpdateRecord
from moedraft.storage.registry import Registry
from moedraft.storage.store import Store

if TYPE_CHECKING:  # so that `news` can be asked for without loading PyTorch's and PEFT's training parts
    from moedraft.distill.trainer import OnStep, Trainer, Update

log = logging.getLogger(__name__)

HOPE = 0.05  # acceptance an adapter is thought to gain by its first update
FORGET = 0.5  # weight of the newest measured gain
LOAD = "load"  # meta key
STALE = 15.0  # s after which a load says nothing any more


@dataclass
class DistillLoop:
    """Runs updates one at a time, when asked. What it has used stands in storage, so a restart goes on."""

    trainer: Trainer
    store: Store
    every: int = 16  # new records that make an update due
    gains: dict[str, float] = field(default_factory=dict)
    failures: dict[str, int] = field(default_factory=dict)  # in a row; gone with a success
    updates: int = 0
    waited: float = 0.0  # s of the running update that `on_step` let pass unused; it says so itself
    status: str = "waiting for records"  # or "training <expert>", "paused: <reason>"
    failure: str = ""  # the unexpected one that stands in the log already

    def due(self) -> str | None:
        """The adapter to train now, None when nobody has enough news."""
        sizes = self.store.replay.sizes()
        total = sum(sizes.values())
        candidates = {}
        for name, count in news(self.store).items():
            if count >= self.every:
                share = 1.0 if name == SHARED else sizes.get(name, 0) / total
                gain = max(self.gains.get(name, HOPE), 1e-3)
                candidates[name] = gain * share * count * 0.5 ** self.failures.get(name, 0)
        return max(candidates, key=lambda name: candidates[name]) if candidates else None

    def run_once(
        self,
        expert: str | None = None,
        *,
        steps: int | None = None,
        on_step: OnStep | None = None,
    ) -> Update | None:
        """Train `expert`, or whoever is due; None when nobody is or nothing can be stored now."""
        expert = expert or self.due()
        if expert is None:
            self.status = "waiting for records"
            return None
        self.status = f"training {expert}"
        try:
            last = self.store.replay.last_id(None if expert == SHARED else expert)
            began, self.waited = time.monotonic(), 0.0
            update = self.trainer.update(expert, steps=steps, on_step=on_step)
            record = None if update is None else _record(update, time.monotonic() - began - self.waited)
            self.trainer.outlet.learned(expert, last, record)
        except StorageError as error:
            self._failed(expert, str(error))
            return None
        except Exception as error:  # whatever goes wrong in learning, serving goes on
            reason = f"{type(error).__name__}: {error}"
            if reason != self.failure:
                log.exception("Learning is paused.")
            self.failure = reason
            self._failed(expert, reason)
            return None
        self.failure = ""
        self.failures.pop(expert, None)
        self.status = "waiting for records"
        if update is not None:
            self.updates += 1
            self._learn_gain(update)
        return update

    def _failed(self, expert: str, reason: str) -> None:
        self.failures[expert] = self.failures.get(expert, 0) + 1
        self.status = f"paused: {reason}"

    def _learn_gain(self, update: Update) -> None:
        if update.acceptance_before is None or update.acceptance_after is None:
            return
        gain = update.acceptance_after - update.acceptance_before
        before = self.gains.get(update.expert, HOPE)
        self.gains[update.expert] = (1 - FORGET) * before + FORGET * gain


def _record(update: Update, seconds: float) -> UpdateRecord:
    return UpdateRecord(
        expert=update.expert,
        version=update.version.version,
        records=update.records,
        steps=update.steps,
        loss=update.loss,
        seconds=seconds,
        acceptance_before=update.acceptance_before,
        acceptance_after=update.acceptance_after,
    )


def news(store: Store) -> dict[str, int]:
    """Records that came since the last update, for the shared adapter (of all domains) and each domain."""
    counts = {}
    for name in [SHARED, *(domain.name for domain in store.registry.domains())]:
        used = int(store.registry.get_meta(f"trained:{name}") or 0)
        counts[name] = store.replay.counts_since(None if name == SHARED else name, used)
    return counts


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
