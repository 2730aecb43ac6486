"""Keeps what a joint trainer has in memory in a file of its home, for the trainer that is started next.

It is written after updates, seldom enough to spare the disk, and when the process ends between two updates.
What is lost otherwise is what was learned since, beside the published versions. What the gate has seen of
candidates that it kept is not part of it, only how many it kept: the next one is judged by held-out records.
How adapters stood beside the draft base is, since a domain is left to the base by it (`of_gate`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from moedraft.core import SHARED, InvalidRequest, StorageError
from moedraft.distill.joint.joint_trainer import JointTrainer
from moedraft.distill.memory.of_gate import OfGate
from moedraft.distill.memory.snapshot import Stamp, Tensors, Unfit, Words, restore, taken
from moedraft.storage.records import trainer_file
from moedraft.storage.registry import Registry
from moedraft.storage.store import TARGET_ID

log = logging.getLogger(__name__)

BYTES_PER_SECOND = 3e5  # that are written, on average: 26 GB a day where updates never pause


@dataclass
class TrainerMemory:
    """The memory of the trainer of one home."""

    home: Path
    registry: Registry
    rest_until: float = 0.0  # monotonic time before which nothing is written
    written: frozenset[str] = frozenset()  # the adapters that the file holds
    complained: bool = False

    def restore(self, trainer: JointTrainer, *, gated: bool = True) -> tuple[int, OfGate]:
        """Give a trainer that has nothing in memory what the one before it had.

        Returns `Registry.purges` and what the gate had in memory. An adapter of which another version serves
        by now, or was published since, is left to be loaded from storage. A file that cannot be used is
        logged and removed, and learning goes on without it. Raises StorageError for the database.

        gated: whether a gate decides on what is published. Where none does, what was trained under a gate is
        not used, since it may hold candidates that the gate has kept back.
        """
        purges = self.registry.purges()
        try:
            if (found := trainer_file.read(self.home)) is not None:
                return purges, self._restored(trainer, *found, purges, gated)
        except (StorageError, Unfit, ValidationError) as error:
            why = "it is no snapshot" if isinstance(error, ValidationError) else str(error)
            log.warning("What the last trainer had in memory is not used: %s.", why.removesuffix("."))
            self.remove()
        return purges, OfGate()

    def _restored(
        self, trainer: JointTrainer, text: str, tensors: Tensors, purges: int, gated: bool
    ) -> OfGate:
        words, base_hash = Words.model_validate_json(text), trainer.student.base_hash
        if words.purges != purges:
            raise Unfit("records were deleted since")
        fits = words.base_hash == base_hash and words.target == self.registry.get_meta(TARGET_ID)
        names = [name for name, stamp in words.adapters.items() if stamp == self._serving(name, base_hash)]
        # Experts mean nothing above another shared adapter.
        if not fits or SHARED not in names or (words.gated and not gated):
            return OfGate()
        others = words.adapters.keys() - set(names)
        words.adapters = {name: words.adapters[name] for name in names}
        restore(trainer, words, tensors)
        self.written = frozenset(names)
        return words.of_same(names, others)

    def keep(
        self,
        trainer: JointTrainer,
        purges: int,
        gate: Callable[[], OfGate] | None = None,
        *,
        now: bool = False,
    ) -> None:
        """Write what `trainer` has in memory, or remove the file where it has nothing to go on from.

        purges: `Registry.purges` when its records were drawn. gate: tells what it has in memory; None: there
        is none. now: although it was written just before, as where something written was forgotten since.
        Raises nothing: learning goes on without the file.
        """
        if not now and time.monotonic() < self.rest_until and self.written <= trainer.versions.keys():
            return
        try:
            self._keep(trainer, purges, gate)
            self.complained = False
        except (StorageError, RuntimeError, MemoryError, ValueError) as error:
            if not self.complained:
                log.warning("What the trainer has in memory is not kept: %s", error or type(error).__name__)
            self.complained = True
            self.remove()  # it is older than what serves, or will be soon

    def _keep(self, trainer: JointTrainer, purges: int, gate: Callable[[], OfGate] | None) -> None:
        base_hash = trainer.student.base_hash
        stamps = {name: self._serving(name, base_hash) for name in trainer.versions}
        stamps = {name: one for name, one in stamps.items() if one.version == trainer.versions[name]}
        if SHARED not in stamps or self.registry.purges() != purges:
            if self.written or SHARED in stamps:  # else the file is of another draft, target or setting
                self.remove()
            return
        told = {} if gate is None else dict(gate())
        words = Words(base_hash=base_hash, purges=purges, seed=trainer.seed, adapters=stamps, **told)
        words.target = self.registry.get_meta(TARGET_ID)
        words.gated, words.lengths = gate is not None, trainer.vocabularies.lengths.told()
        words.settled = {name: one.settled for name, one in trainer.optimisers.items() if name in stamps}
        tensors = taken(trainer, stamps)
        size = sum(tensor.nbytes for tensor in tensors.values())
        self.rest_until = time.monotonic() + size / BYTES_PER_SECOND
        trainer_file.write(self.home, words.model_dump_json(), tensors)
        self.written = frozenset(stamps)
        if self.registry.purges() != purges:  # while it was written
            self.remove()

    def remove(self) -> None:
        """Have nothing to give back: records were deleted, or an update came to nothing."""
        self.written = frozenset()
        try:
            trainer_file.remove(self.home)
        except StorageError as error:
            log.warning("What the last trainer had in memory is still in the home: %s", error)

    def _serving(self, name: str, base_hash: str) -> Stamp:
        line = self.registry.lineage(name, base_hash)
        try:
            following = self.registry.next_version(name)
        except InvalidRequest:  # the domain was removed
            following = 0
        created = line[0].created_at if line else None
        return Stamp(version=line[0].version if line else 0, created_at=created, following=following)
