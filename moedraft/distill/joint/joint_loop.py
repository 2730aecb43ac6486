"""The loop for drafters that learn jointly: an update teaches the shared adapter and all experts at once."""

from __future__ import annotations

import time
from dataclasses import dataclass

from moedraft.core import SHARED
from moedraft.distill.governor import news
from moedraft.distill.joint.joint_trainer import JointTrainer
from moedraft.distill.loop import DistillLoop, Update
from moedraft.distill.trainer import OnStep
from moedraft.storage.changes import is_pinned

MOST_DOUBLINGS = 5  # of the records that an update waits for, after updates that failed


@dataclass
class JointLoop(DistillLoop):
    """As `DistillLoop`, but an update belongs to nobody: the gate judges all that learned together."""

    trainer: JointTrainer  # type: ignore[assignment]  # published and forgotten alike, updated jointly

    def resume(self) -> None:
        """As `DistillLoop.resume`; records that were used before are not new."""
        super().resume()
        self.trainer.last_id = int(self.store.registry.get_meta(f"trained:{SHARED}") or 0)

    def due(self) -> str | None:
        """The shared adapter, which every update teaches, when there are enough new records of any domain.

        Nobody while it is pinned: experts are trained on the shared adapter as the same update leaves it.
        Each failure in a row doubles the records that it takes.
        """
        if is_pinned(self.store.registry, SHARED):
            return None
        wanted = self.every * 2 ** min(self.failures.get(SHARED, 0), MOST_DOUBLINGS)
        return SHARED if news(self.store).get(SHARED, 0) >= wanted else None

    def held_up(self) -> str | None:
        """As `DistillLoop.held_up`."""
        if not is_pinned(self.store.registry, SHARED):
            return None
        return (
            f"The shared adapter, which every update of this draft base teaches, is pinned; "
            f"`moedraft adapter unpin {SHARED}` lets it learn."
        )

    def _update(self, expert: str, steps: int | None, on_step: OnStep | None) -> Update | None:
        """Train, publish what passes the gate, and note which records were used; the update of `expert`.

        Where that one's was not published, the shared adapter's.
        """
        if is_pinned(self.store.registry, SHARED):
            return None
        began, self.waited = time.monotonic(), 0.0
        made = self.trainer.update(steps=steps, on_step=on_step)
        if made is None:
            self.outlet.learned(SHARED, self.store.replay.last_id(None), None)
            return None
        updates = self._settle(made.candidates, made.last_id, began, on_step)
        return updates.get(expert) or updates.get(SHARED)
