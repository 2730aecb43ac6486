"""The loop for drafters that learn jointly: an update teaches the shared adapter and all experts at once."""

from __future__ import annotations

import time
from dataclasses import dataclass

from moedraft.core import SHARED
from moedraft.distill.governor import news
from moedraft.distill.joint import JointTrainer
from moedraft.distill.loop import DistillLoop, Update
from moedraft.distill.trainer import OnStep


@dataclass
class JointLoop(DistillLoop):
    """As `DistillLoop`, but an update belongs to nobody: it publishes each adapter that learned."""

    trainer: JointTrainer  # type: ignore[assignment]  # published and forgotten alike, updated jointly

    def due(self) -> str | None:
        """The shared adapter, which every update teaches, when there are enough new records of any domain."""
        return SHARED if news(self.store).get(SHARED, 0) >= self.every else None

    def _update(self, expert: str, steps: int | None, on_step: OnStep | None) -> Update | None:
        """Train, publish each candidate, and note which records were used; the update of `expert`.

        Where that one did not learn, the shared adapter's.
        """
        began, self.waited = time.monotonic(), 0.0
        made = self.trainer.update(steps=steps, on_step=on_step)
        if made is None:
            self.outlet.learned(SHARED, self.store.replay.last_id(None), None)
            return None
        updates: dict[str, Update] = {}
        for candidate in made.candidates:
            version = self._publish(candidate)
            seconds = (time.monotonic() - began - self.waited) / len(made.candidates)
            update = updates[candidate.expert] = Update(version, candidate.summary(), seconds)
            self.outlet.learned(candidate.expert, made.last_id, update.record())
            self._remember_gain(update)
        return updates.get(expert) or updates.get(SHARED)
