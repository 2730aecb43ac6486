"""Keeps a joint trainer's memory in its home, and gives it back to the trainer that is started next.

It is written after updates, seldom enough to spare the disk, and when the process ends in order. What is lost
where a process is killed is what was learned since, beside the published versions. The gate's evidence about
candidates that it has kept is not part of it: the next update of these is judged by held-out records again.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from moedraft.core import SHARED, StorageError
from moedraft.distill.joint.joint_trainer import JointTrainer
from moedraft.distill.memory.snapshot import Stamp, Unfit, Words, restore, taken
from moedraft.storage.records import trainer_file
from moedraft.storage.registry import Registry

log = logging.getLogger(__name__)

BYTES_PER_SECOND = 1e6  # that are written, on average: 86 GB a day where updates never pause


@dataclass
class TrainerMemory:
    """The memory of the trainer of one home."""

    home: Path
    registry: Registry
    rest_until: float = 0.0  # monotonic time before which nothing is written
    complained: bool = False

    def restore(self, trainer: JointTrainer) -> int:
        """Give a trainer that has nothing in memory what the one before it had. Returns `Registry.purges`.

        An adapter of which another version serves by now is left to be loaded from storage. A file that
        cannot be used is logged, and learning goes on without it. Raises StorageError for the database.
        """
        purges = self.registry.purges()
        try:
            if (found := trainer_file.read(self.home)) is None:
                return purges
            words = Words.model_validate_json(found[0])
            words.adapters = {
                name: stamp
                for name, stamp in words.adapters.items()
                if stamp == self._serving(name, trainer.student.base_hash)
            }
            if words.purges != purges or words.base_hash != trainer.student.base_hash:
                self.remove()
            elif SHARED in words.adapters:  # experts mean nothing above another one
                restore(trainer, words, found[1])
        except (StorageError, Unfit, ValidationError) as error:
            why = "it is no snapshot" if isinstance(error, ValidationError) else str(error)
            log.warning("What the last trainer had in memory is not used: %s.", why.removesuffix("."))
        return purges

    def keep(self, trainer: JointTrainer, purges: int, *, now: bool = False) -> None:
        """Write what `trainer` has in memory, or remove the file where it has nothing to go on from.

        purges: `Registry.purges` when its records were drawn. now: although it was written just before.
        Raises nothing: learning goes on without the file.
        """
        if not now and time.monotonic() < self.rest_until:
            return
        try:
            self._keep(trainer, purges)
            self.complained = False
        except StorageError as error:
            if not self.complained:
                log.warning("What the trainer has in memory is not kept: %s", error)
            self.complained = True

    def _keep(self, trainer: JointTrainer, purges: int) -> None:
        base_hash = trainer.student.base_hash
        stamps = {name: self._serving(name, base_hash) for name in trainer.versions}
        stamps = {name: one for name, one in stamps.items() if one.version == trainer.versions[name]}
        if SHARED not in stamps:
            trainer_file.remove(self.home)
            return
        words = Words(base_hash=base_hash, purges=purges, seed=trainer.seed, adapters=stamps)
        words.settled = {name: one.settled for name, one in trainer.optimisers.items() if name in stamps}
        tensors = taken(trainer, stamps)
        size = sum(tensor.nbytes for tensor in tensors.values())
        self.rest_until = time.monotonic() + size / BYTES_PER_SECOND
        trainer_file.write(self.home, words.model_dump_json(), tensors)

    def remove(self) -> None:
        """Have nothing to give back: records were deleted, or an update came to nothing."""
        try:
            trainer_file.remove(self.home)
        except StorageError as error:
            log.warning("What the last trainer had in memory is still in the home: %s", error)

    def _serving(self, name: str, base_hash: str) -> Stamp:
        line = self.registry.lineage(name, base_hash)
        return Stamp(version=line[0].version if line else 0, created_at=line[0].created_at if line else None)
