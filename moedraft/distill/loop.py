"""Runs updates one at a time: chooses the adapter, trains it, asks the gate, publishes, notes what was used.

Of the adapters that have enough new records, the one that promises most is trained next. The promise is the
gain measured in its recent updates × its share of the traffic × the number of its new records. The shared
adapter counts all traffic, so it goes first in a new home; as its gains shrink the experts take over, and an
expert whose domain is new starts with the same expected gain as everybody else. Each failure in a row halves
the promise, so that an adapter whose updates always fail does not keep the others from learning.

The gate has a candidate published, kept in memory for the next update to continue, or discarded, so that the
next update starts from the live version. The candidates of one update are published all at once or not at
all. An adapter whose candidates do not pass still promises LEAST_GAIN, so that its new records get their
turn. Without a judge every candidate is published.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

from moedraft.core import SHARED, AdapterVersion, MoedraftError, StorageError, UpdateRecord
from moedraft.distill.entries import live_numbers, reset_entry, update_entry, withdrawal_entry
from moedraft.distill.fresh.beside_base import BesideBase
from moedraft.distill.fresh.second_look import SecondLook
from moedraft.distill.judging.gate import Verdict
from moedraft.distill.judging.judge import JudgeLike
from moedraft.distill.judging.watch import Watch, followers
from moedraft.distill.outlet import Outlet
from moedraft.distill.pace.governor import news
from moedraft.distill.single.trainer import OnStep, Trainer
from moedraft.learning_state import NO_RECORDS, LearningKind, LearningState, paused, waiting
from moedraft.storage.changes import is_pinned
from moedraft.storage.store import Store
from moedraft.storage.versions.candidate import Candidate, CandidateSummary
from moedraft.storage.versions.version_rows import Also

log = logging.getLogger(__name__)

EXPECTED_GAIN = 0.05  # rise of the acceptance rate that is expected of an adapter's first update
LEAST_GAIN = EXPECTED_GAIN / 5  # what every adapter is expected to gain at least: new records may teach more
REMEMBERED = 200  # updates of the home's log that a new loop learns from
LOOK_AGAIN = 16  # new records after which published versions are looked at, though no update is due
NEWEST_WEIGHT = 0.5  # weight of the newest measured gain in the running mean


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
    judge: JudgeLike | None = None  # None: every candidate is published
    watch: Watch | None = None  # None: no published version is ever withdrawn
    second_look: SecondLook | None = None  # None: a kept candidate is only trained on
    beside_base: BesideBase | None = None  # None: the gate sees what adapters do on held-out records alone
    gains: dict[str, float] = field(default_factory=dict)
    failures: dict[str, int] = field(default_factory=dict)  # in a row, by adapter; a success resets them
    state: LearningState = field(default_factory=waiting)
    waited: float = 0.0  # s of the running update in which `on_step` only waited; `on_step` adds to it
    last_fault: str = ""  # the unexpected error that was logged last
    outcomes: list[UpdateRecord] = field(default_factory=list)  # of the last run, published or not
    purges: int = 0  # of the home, when this loop last looked; records that it remembers may be gone since
    generation: int = 0  # of what served when the running update began, or when it had published
    disturbed: bool = False  # somebody else changed what serves while the last update ran
    watched: int = 0  # the newest record when published versions were last looked at

    def resume(self) -> None:
        """Restore what earlier loops have recorded: the gains, and the seed of the next draw of records."""
        for update in self.store.updates.recent(limit=REMEMBERED):
            if update.decision in ("keep", "discard", "reset", "withdraw"):
                self._remember_gain(update.expert, 0.0)
            elif update.acceptance_before is not None and update.acceptance_after is not None:
                self._remember_gain(update.expert, update.acceptance_after - update.acceptance_before)
        self.trainer.seed = self.store.updates.count()

    def due(self) -> str | None:
        """The adapter to train now; None when none has enough new records."""
        sizes = self.store.replay.sizes()
        wanted = min(self.every, max(1, self.store.replay.capacity // 2))  # more may never be there
        total = sum(sizes.values())
        promises = {}
        for name, count in news(self.store).items():
            if count >= wanted and not is_pinned(self.store.registry, name):
                share = 1.0 if name == SHARED else sizes.get(name, 0) / total
                gain = max(self.gains.get(name, EXPECTED_GAIN), LEAST_GAIN)
                promises[name] = gain * share * count * 0.5 ** self.failures.get(name, 0)
        return max(promises, key=lambda name: promises[name]) if promises else None

    def needs(self) -> str:
        """How many new records make an update due, in words."""
        return f"an update takes {self.every} new records of a domain."

    def waits(self) -> str:
        """What it waits for while no update is due, in words."""
        return NO_RECORDS

    def only(self, expert: str) -> AbstractContextManager[None]:
        """A context in which updates teach `expert` and no other adapter."""
        return nullcontext()

    def held_up(self) -> str | None:
        """What a person must change before an update can run; None where it only waits for new records."""
        return None

    def run_once(
        self, expert: str | None = None, *, steps: int | None = None, on_step: OnStep | None = None
    ) -> Update | None:
        """Update `expert`, or the adapter that is due; None where no new version was published.

        Afterwards `state` tells whether it failed, and `outcomes` what was learned. Errors are caught; only
        a BaseException that is no Exception, such as SystemExit, is raised.
        """
        self.outcomes = []
        expert = expert or self.due()
        if expert is None:
            self.state = waiting()
            return None
        self.state = LearningState(LearningKind.TRAINING, expert=expert)
        try:
            self.forget_purged()
            self._look_again(on_step)
            self._gather(on_step)
            self.generation = self.store.registry.generation()
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

    def tend(self, on_step: OnStep | None = None) -> None:
        """While no update is due, look at published versions again; errors are caught as in `run_once`."""
        try:
            newest = self.store.replay.last_id()
            if self.watch is not None and newest - self.watched >= LOOK_AGAIN:
                self._look_again(on_step)
        except StorageError as error:
            self.state = paused(str(error))
        except Exception as error:
            self._failed_unexpectedly(SHARED, error)

    def forget_purged(self) -> None:
        """Drop what is in memory of replay records if some were purged. Raises StorageError."""
        if (purges := self.store.registry.purges()) != self.purges:
            self.purges = purges
            self._forget_records()

    def _forget_records(self) -> None:
        """Forget replay records, and all candidates that may have learned from them."""
        for name in (SHARED, *(name for name, _ in self.store.registry.domain_names())):
            self.trainer.forget(name)
        if self.judge is not None:
            self.judge.forget()

    def end(self) -> None:
        """Keep what the next trainer of this home can go on from, since this process ends."""

    def _look_again(self, on_step: OnStep | None) -> None:
        """Withdraw versions that do worse than their predecessors on requests since their publication."""
        if self.watch is None:
            return
        self.watched = self.store.replay.last_id()
        say = on_step or (lambda done, loss: None)
        base_hash, registry = self.trainer.student.base_hash, self.store.registry
        while (found := self.watch(base_hash, lambda: say(0, None))) is not None:
            live = [one for one in registry.versions() if one.state == "live"]
            now = self.outlet.withdraw(found.version.domain, found.version.version)
            self.trainer.forget(found.version.domain)
            name, verdict = found.version.domain, found.verdict
            log.warning(
                "Version %d of %s was taken back: on %d later requests it gave %.3f tokens per step less.",
                *(found.version.version, name, verdict.records, -(verdict.gain or 0.0)),
            )
            for one, serves in [(found, now), *followers(registry, found, live)]:
                used = int(registry.get_meta(f"trained:{one.version.domain}") or 0)
                self._write_down(withdrawal_entry(one, serves), used)

    def _gather(self, on_step: OnStep | None) -> None:
        """Measure what serves, and kept candidates, on new records, before these are trained on."""
        say = on_step or (lambda done, loss: None)
        for look in (self.beside_base, self.second_look):
            if look is not None:
                look.gather(lambda: say(0, None))

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
        """Ask the gate, publish or drop each candidate of an update as it says, and log the outcome.

        Returns what was published, by name. If anything is raised, all candidates are forgotten, and the
        next update starts from the live versions. So it is where a person has changed meanwhile what serves.
        """
        verdicts, registry = dict[str, Verdict](), self.store.registry
        try:
            if registry.purges() != self.purges:
                return self._dropped(candidates)
            verdicts = self._verdicts(candidates, on_step)
            if self.second_look is not None:
                self.second_look.settled(candidates, verdicts, last_id)
            seconds = (time.monotonic() - began - self.waited) / len(candidates)
            before, versions = live_numbers(registry, verdicts), self._publish(candidates, verdicts)
            if self.beside_base is not None and SHARED in versions:
                self.beside_base.published(last_id)
        except BaseException as error:
            self._dropped(candidates)
            if not isinstance(error, MoedraftError) or not self._is_overtaken(verdicts):
                raise
            return {}
        updates: dict[str, Update] = {}
        for candidate in candidates:
            name, version = candidate.expert, versions.get(candidate.expert)
            if version is not None:
                updates[name] = Update(version, candidate.summary(), seconds)
            verdict = verdicts.get(name) if self.judge else None
            self._write_down(update_entry(registry, candidate, version, verdict, seconds), last_id)
            self._remember_gain(name, updates[name].gain if version else 0.0)
        for name in sorted(verdicts.keys() - {one.expert for one in candidates}):
            entry = reset_entry(registry, name, candidates[0], verdicts[name], before[name])
            self._write_down(entry, last_id)
        return updates

    def _dropped(self, candidates: Sequence[Candidate]) -> dict[str, Update]:
        """Forget the candidates of an update that came to nothing; its records are new still."""
        for one in candidates:
            self.trainer.forget(one.expert)
        if self.second_look is not None:
            self.second_look.forget()
        return {}

    def _is_overtaken(self, judged: Iterable[str]) -> bool:
        """Whether a person has since pinned one of these, changed what serves, or purged records."""
        registry = self.store.registry
        changed = (registry.generation(), registry.purges()) != (self.generation, self.purges)
        return changed or any(is_pinned(registry, name) for name in judged)

    def _write_down(self, record: UpdateRecord, last_id: int) -> None:
        self.outlet.learned(record.expert, last_id, record)
        self.outcomes.append(record)

    def _verdicts(self, candidates: Sequence[Candidate], on_step: OnStep | None) -> dict[str, Verdict]:
        """The gate's verdicts by name; candidates of pinned adapters get none."""
        if self.judge is None:
            open_ones = [one for one in candidates if not is_pinned(self.store.registry, one.expert)]
            return {one.expert: Verdict("promote") for one in open_ones}
        say = on_step or (lambda done, loss: None)
        return self.judge(candidates, lambda: say(candidates[0].steps, candidates[0].loss))

    def _publish(
        self, candidates: Sequence[Candidate], verdicts: Mapping[str, Verdict]
    ) -> dict[str, AdapterVersion]:
        """Do as the gate says: publish candidates, leave them in memory to be trained on, or forget them.

        Everything is published in one step, together with the experts that are reset to untrained and with
        the domains that are left to the draft base alone.
        """
        self.disturbed = self.store.registry.generation() != self.generation
        going = [one for one in candidates if one.expert in verdicts and verdicts[one.expert].is_published]
        untrained, aside = self._untrained(verdicts, candidates[0].base_hash), self._aside(verdicts)
        made: list[AdapterVersion] = []
        if going or untrained:
            made = self.outlet.publish(going, Also(untrained, aside, self.purges))
        elif aside is not None:
            self.outlet.stand_aside(aside)
        self.generation = self.store.registry.generation()
        versions = {version.domain: version for version in made}
        for name in untrained:
            self.trainer.forget(name)
        for one in candidates:
            verdict = verdicts.get(one.expert)
            if one.expert in versions:
                self.trainer.published(versions[one.expert])
            elif verdict is not None and verdict.decision == "keep":
                self.trainer.kept(one)
            elif one.expert not in untrained:
                self.trainer.forget(one.expert)
        return versions

    def _aside(self, verdicts: Mapping[str, Verdict]) -> frozenset[str] | None:
        """For which domains the draft base alone is to draft, as the gate says; None: for the same as now.

        For none without a gate.
        """
        before, now = self.store.registry.unadapted(), {n for n, one in verdicts.items() if one.unadapted}
        if self.judge and SHARED in verdicts and verdicts[SHARED].is_published:
            now |= self.judge.untaught()  # all domains are decided anew
        elif self.judge:
            now |= {name for name in before if name not in verdicts or verdicts[name].unadapted is None}
        return frozenset(now) if now != before else None

    def _untrained(self, verdicts: Mapping[str, Verdict], base_hash: str) -> dict[str, int]:
        """The experts that the gate resets to untrained, with the live version of each."""
        names = [name for name, verdict in verdicts.items() if verdict.decision == "reset"]
        lines = {name: self.store.registry.lineage(name, base_hash) for name in names}
        return {name: line[0].version for name, line in lines.items() if line}

    def _failed_unexpectedly(self, expert: str, error: Exception) -> None:
        reason = f"{type(error).__name__}: {error}"
        if reason != self.last_fault:
            log.exception("Learning is paused.")
        self.last_fault = reason
        self._failed(expert, reason)

    def _failed(self, expert: str, reason: str) -> None:
        if self.second_look is not None:
            self.second_look.forget()
        self.failures[expert] = self.failures.get(expert, 0) + 1
        self.state = paused(reason)

    def _remember_gain(self, expert: str, gain: float | None) -> None:
        if gain is not None:
            before = self.gains.get(expert, EXPECTED_GAIN)
            self.gains[expert] = (1 - NEWEST_WEIGHT) * before + NEWEST_WEIGHT * gain
