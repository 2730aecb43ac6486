"""Runs updates one at a time: chooses the adapter, trains it, publishes the result, notes what was used.

The adapter that is trained next promises most, out of those that have enough new records. The promise is
the gain measured in its recent updates × its share of the traffic × the number of its new records. The
shared adapter counts all traffic, so it goes first in a new home; as its gains shrink the experts take over,
and an expert whose domain is new starts with the same expected gain as everybody else. Each failure in a row
halves the promise, so that an adapter whose updates always fail does not keep the others from learning.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field

from moedraft.core import SHARED, AdapterVersion, StorageError, UpdateRecord
from moedraft.distill.governor import news
from moedraft.distill.outlet import Outlet
from moedraft.distill.trainer import OnStep, Trainer
from moedraft.learning_state import LearningKind, LearningState, paused, waiting
from moedraft.storage.candidate import Candidate, CandidateSummary
from moedraft.storage.store import Store

log = logging.getLogger(__name__)

EXPECTED_GAIN = 0.05  # of acceptance, by the first update of an adapter
LEAST_GAIN = 1e-3  # what an adapter is expected to gain at least, so that it is still trained now and then
NEWEST_WEIGHT = 0.5  # of the last measured gain in the running mean


@dataclass(frozen=True)
class Update:
    """A candidate that was published."""

    version: AdapterVersion
    summary: CandidateSummary
    seconds: float  # of training and publishing, without the waiting in between

    @property
    def expert(self) -> str:
        return self.summary.expert

    @property
    def gain(self) -> float | None:
        """Acceptance on held-out records after the update less that before."""
        before, after = self.summary.acceptance_before, self.summary.acceptance_after
        return None if before is None or after is None else after - before

    def record(self) -> UpdateRecord:
        """What is kept of it in the home."""
        return UpdateRecord(
            expert=self.expert,
            version=self.version.version,
            records=self.summary.records,
            steps=self.summary.steps,
            loss=self.summary.loss,
            seconds=self.seconds,
            acceptance_before=self.summary.acceptance_before,
            acceptance_after=self.summary.acceptance_after,
        )


@dataclass
class DistillLoop:
    """Runs updates when asked. Which records were used stands in storage, so a restart goes on from there."""

    trainer: Trainer
    store: Store
    outlet: Outlet
    every: int = 16  # new records that make an update due
    gains: dict[str, float] = field(default_factory=dict)
    failures: dict[str, int] = field(default_factory=dict)  # in a row; gone with a success
    state: LearningState = field(default_factory=waiting)
    waited: float = 0.0  # s of the running update in which `on_step` only waited; `on_step` adds to it
    last_fault: str = ""  # the unexpected error that is in the log already

    def due(self) -> str | None:
        """The adapter to train now, None when nobody has enough new records."""
        sizes = self.store.replay.sizes()
        total = sum(sizes.values())
        promises = {}
        for name, count in news(self.store).items():
            if count >= self.every:
                share = 1.0 if name == SHARED else sizes.get(name, 0) / total
                gain = max(self.gains.get(name, EXPECTED_GAIN), LEAST_GAIN)
                promises[name] = gain * share * count * 0.5 ** self.failures.get(name, 0)
        return max(promises, key=lambda name: promises[name]) if promises else None

    def run_once(
        self, expert: str | None = None, *, steps: int | None = None, on_step: OnStep | None = None
    ) -> Update | None:
        """Update `expert`, or whoever is due; None when nobody is, nothing was learned or it failed.

        `state` tells these apart. Only what is no Exception, such as SystemExit, is raised.
        """
        expert = expert or self.due()
        if expert is None:
            self.state = waiting()
            return None
        self.state = LearningState(LearningKind.TRAINING, expert=expert)
        try:
            update = self._update(expert, steps, on_step)
        except StorageError as error:
            self._failed(expert, str(error))
            return None
        except Exception as error:  # whatever goes wrong in learning, serving goes on
            self._failed_unexpectedly(expert, error)
            return None
        self.last_fault = ""
        self.failures.pop(expert, None)
        self.state = waiting()
        return update

    def _update(self, expert: str, steps: int | None, on_step: OnStep | None) -> Update | None:
        """Train, publish, and note which records were used."""
        last_id = self.store.replay.last_id(None if expert == SHARED else expert)
        began, self.waited = time.monotonic(), 0.0
        candidate = self.trainer.update(expert, steps=steps, on_step=on_step)
        if candidate is None:
            self.outlet.learned(expert, last_id, None)
            return None
        version = self._publish(candidate)
        update = Update(version, candidate.summary(), time.monotonic() - began - self.waited)
        self.outlet.learned(expert, last_id, update.record())
        self._remember_gain(update)
        return update

    def _publish(self, candidate: Candidate) -> AdapterVersion:
        """Every candidate is published. This is the place for a gate that refuses those that gain nothing."""
        try:
            version = self.outlet.publish(candidate)
        except BaseException:
            self.trainer.forget(candidate.expert)
            raise
        self.trainer.published(version)
        return version

    def _failed_unexpectedly(self, expert: str, error: Exception) -> None:
        reason = f"{type(error).__name__}: {error}"
        if reason != self.last_fault:
            log.exception("Learning is paused.")
        self.last_fault = reason
        self._failed(expert, reason)

    def _failed(self, expert: str, reason: str) -> None:
        self.failures[expert] = self.failures.get(expert, 0) + 1
        self.state = paused(reason)

    def _remember_gain(self, update: Update) -> None:
        if update.gain is not None:
            before = self.gains.get(update.expert, EXPECTED_GAIN)
            self.gains[update.expert] = (1 - NEWEST_WEIGHT) * before + NEWEST_WEIGHT * update.gain
