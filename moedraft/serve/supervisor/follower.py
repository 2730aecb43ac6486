"""What a server that does not learn knows of a trainer that follows it (`moedraft distill --follow`)."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from moedraft.core import StorageError
from moedraft.distill.claim import learner
from moedraft.distill.pace.governor import is_paused, set_paused
from moedraft.serve.supervisor.supervisor import TrainerState, TrainerSupervisor
from moedraft.storage.registry import Registry


class TrainerBeside:
    """Stands where a server that learns has its `TrainerSupervisor`; there may be no such trainer."""

    def __init__(self, home: Path, registry: Registry) -> None:
        self._home, self._registry = home, registry

    def state(self) -> TrainerState:
        paused = False
        with suppress(StorageError):  # what else there is to see is shown
            paused = is_paused(self._registry)
        return TrainerState(own=False, paused=paused, pid=learner(self._home))

    def pause(self) -> None:
        """Have the trainer wait, now or once there is one, until `resume`. Raises StorageError."""
        set_paused(self._registry, True)

    def resume(self) -> None:
        """Raises StorageError."""
        set_paused(self._registry, False)


Trainer = TrainerSupervisor | TrainerBeside
