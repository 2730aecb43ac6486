"""Runs updates one at a time: chooses the adapter, trains it, asks the gate, publishes, notes what was used.

The adapter that is trained next promises most, out of those that have enough new records. The promise is
the gain measured in its recent updates × its share of the traffic × the number of its new records. The
shared adapter counts all traffic, so it goes first in a new home; as its gains shrink the experts take over,
and an expert whose domain is new starts with the same expected gain as everybody else. Each failure in a row
halves the promise, so that an adapter whose updates always fail does not keep the others from learning.

The gate publishes a candidate, has the next update train on from it, or sends that back to the version that
serves. An adapter whose candidates do not pass still promises LEAST_GAIN, so that its new records get their
turn. Without a judge every candidate is published.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from moedraft.core import SHARED, AdapterVersion, StorageError, UpdateRecord
from moedraft.distill.gate import Verdict
from moedraft.distill.governor import news
from moedraft.distill.judge import Judge
from moedraft.distill.outlet import Outlet
from moedraft.distill.trainer import OnStep, Trainer
from moedraft.learning_state import LearningKind, LearningState, paused, waiting
from moedraft.storage.candidate import Candidate, CandidateSummary
from moedraft.storage.changes import is_pinned
from moedraft.storage.store import Store

log = logging.getLogger(__name__)

EXPECTED_GAIN = 0.05  # of acceptance, by the first update of an adapter
LEAST_GAIN = EXPECTED_GAIN / 5  # what an adapter is expected to gain at least: new records may teach more
REMEMBERED = 200  # updates of the home's log that a new loop learns from
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


@dataclass
class DistillLoop:
    """Runs updates when asked. Which records were used stands in storage, so a restart goes on from there."""

    trainer: Trainer
    store: Store
    outlet: Outlet
    every: int = 16  # new records that make an update due
    judge: Judge | None = None  # None: every candidate is published
    gains: dict[str, float] = field(default_factory=dict)
    failures: dict[str, int] = field(default_factory=dict)  # in a row; gone with a success
    state: LearningState = field(default_factory=waiting)
    waited: float = 0.0  # s of the running update in which `on_step` only waited; `on_step` adds to it
    last_fault: str = ""  # the unexpected error that is in the log already
    outcomes: list[UpdateRecord] = field(default_factory=list)  # of the last run, published or not

    def resume(self) -> None:
        """Take up what a loop before this one knew: the gains, and which draws of records were made."""
        for update in self.store.updates.recent(limit=REMEMBERED):
            if update.decision in ("keep", "discard"):
                self._remember_gain(update.expert, 0.0)
            elif update.acceptance_before is not None and update.acceptance_after is not None:
                self._remember_gain(update.expert, update.acceptance_after - update.acceptance_before)
        self.trainer.seed = self.store.updates.count()

    def due(self) -> str | None:
        """The adapter to train now, None when nobody has enough new records."""
        sizes = self.store.replay.sizes()
        total = sum(sizes.values())
        promises = {}
        for name, count in news(self.store).items():
            if count >= self.every and not is_pinned(self.store.registry, name):
                share = 1.0 if name == SHARED else sizes.get(name, 0) / total
                gain = max(self.gains.get(name, EXPECTED_GAIN), LEAST_GAIN)
                promises[name] = gain * share * count * 0.5 ** self.failures.get(name, 0)
        return max(promises, key=lambda name: promises[name]) if promises else None

    def run_once(
        self, expert: str | None = None, *, steps: int | None = None, on_step: OnStep | None = None
    ) -> Update | None:
        """Update `expert`, or whoever is due; None where nothing of it was published.

        `state` tells whether it failed, `outcomes` what was learned. Only what is no Exception, such as
        SystemExit, is raised.
        """
        self.outcomes = []
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
        """Train, publish what passes the gate, and note which records were used."""
        last_id = self.store.replay.last_id(None if expert == SHARED else expert)
        began, self.waited = time.monotonic(), 0.0
        candidate = self.trainer.update(expert, steps=steps, on_step=on_step)
        if candidate is None:
            self.outlet.learned(expert, last_id, None)
            return None
        return self._settle([candidate], last_id, began, on_step).get(expert)

    def _settle(
        self, candidates: Sequence[Candidate], last_id: int, began: float, on_step: OnStep | None
    ) -> dict[str, Update]:
        """Ask the gate, do as it says with each candidate of an update, and write it down.

        Returns what was published, by name. Whatever is raised, the next update of those that are not live
        by then starts from the live versions.
        """
        open_ones = [one.expert for one in candidates]
        try:
            verdicts = self._verdicts(candidates, on_step)
            seconds = (time.monotonic() - began - self.waited) / len(candidates)
            updates: dict[str, Update] = {}
            for candidate in candidates:
                version = self._follow(candidate, verdicts.get(candidate.expert))
                open_ones.remove(candidate.expert)
                record = self._record(candidate, version, verdicts.get(candidate.expert), seconds)
                self.outlet.learned(candidate.expert, last_id, record)
                self.outcomes.append(record)
                if version is not None:
                    updates[candidate.expert] = Update(version, candidate.summary(), seconds)
                    self._remember_gain(candidate.expert, updates[candidate.expert].gain)
                else:
                    self._remember_gain(candidate.expert, 0.0)
        except BaseException:
            for name in open_ones:
                self.trainer.forget(name)
            raise
        return updates

    def _verdicts(self, candidates: Sequence[Candidate], on_step: OnStep | None) -> dict[str, Verdict]:
        """By name; a candidate without a verdict is that of a pinned adapter."""
        if self.judge is None:
            open_ones = [one for one in candidates if not is_pinned(self.store.registry, one.expert)]
            return {one.expert: Verdict("promote") for one in open_ones}
        say = on_step or (lambda done, loss: None)
        return self.judge(candidates, lambda: say(candidates[0].steps, candidates[0].loss))

    def _follow(self, candidate: Candidate, verdict: Verdict | None) -> AdapterVersion | None:
        """Publish the candidate, leave it in memory to be trained on, or forget it."""
        if verdict is not None and verdict.decision == "promote":
            version = self.outlet.publish(candidate)
            self.trainer.published(version)
            return version
        if verdict is not None and verdict.decision == "keep":
            self.trainer.kept(candidate)
        else:
            self.trainer.forget(candidate.expert)
        return None

    def _record(
        self, made: Candidate, version: AdapterVersion | None, verdict: Verdict | None, seconds: float
    ) -> UpdateRecord:
        """What is kept of an update in the home."""
        judged = self.judge is not None and verdict is not None
        shared = self.store.registry.lineage(SHARED, made.base_hash) if made.expert != SHARED else []
        record = UpdateRecord(
            expert=made.expert,
            version=made.parent if version is None else version.version,
            records=made.records,
            steps=made.steps,
            loss=made.loss,
            seconds=seconds,
            acceptance_before=made.acceptance_before,
            acceptance_after=made.acceptance_after,
            parent=made.parent,
            stood_on=None if made.expert == SHARED else shared[0].version if shared else 0,
        )
        if not judged or verdict is None:
            return record
        return replace(
            record,
            decision=verdict.decision,
            gain=verdict.gain,
            gain_low=verdict.low,
            gain_high=verdict.high,
            gate_records=verdict.records,
        )

    def _failed_unexpectedly(self, expert: str, error: Exception) -> None:
        reason = f"{type(error).__name__}: {error}"
        if reason != self.last_fault:
            log.exception("Learning is paused.")
        self.last_fault = reason
        self._failed(expert, reason)

    def _failed(self, expert: str, reason: str) -> None:
        self.failures[expert] = self.failures.get(expert, 0) + 1
        self.state = paused(reason)

    def _remember_gain(self, expert: str, gain: float | None) -> None:
        if gain is not None:
            before = self.gains.get(expert, EXPECTED_GAIN)
            self.gains[expert] = (1 - NEWEST_WEIGHT) * before + NEWEST_WEIGHT * gain
