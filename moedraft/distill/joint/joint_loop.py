"""The loop for drafters that learn jointly: an update teaches the shared adapter and all experts at once."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from moedraft.core import SHARED, UpdateRecord
from moedraft.distill.joint.joint_trainer import JointTrainer
from moedraft.distill.judging.judge import Judge
from moedraft.distill.loop import DistillLoop, Update
from moedraft.distill.memory.of_gate import OfGate
from moedraft.distill.memory.trainer_memory import TrainerMemory
from moedraft.distill.pace.governor import news
from moedraft.distill.pace.interval import Interval
from moedraft.distill.single.trainer import OnStep
from moedraft.learning_state import LearningKind
from moedraft.storage.changes import is_pinned
from moedraft.storage.versions.candidate import Candidate

MOST_DOUBLINGS = 5  # of the records that an update waits for, after updates that failed
MOST_AGAIN = 8  # consecutive updates without new records, at most
HOPELESS = 3  # one whose gain is not worth its time counts as so many of these


@dataclass
class JointLoop(DistillLoop):
    """As `DistillLoop`, but each update trains all adapters, and the gate judges them together.

    Requests are scarce, spare time often is not. So further updates are made from the records that are there,
    until the gate discards one, or a few brought no gain that is worth their time. The gate's held-out
    records are never trained on, so this ends when nothing more is to be learned from the others.
    """

    trainer: JointTrainer  # type: ignore[assignment]  # same outcome methods, but joint updates
    again: int = 0  # updates without new records that may still follow
    left_at: int = -1  # the registry's generation after the last update
    memory: TrainerMemory | None = None  # None: what is not published is lost at a restart
    horizon: int = 10_000  # requests over which the gain of an update is counted against its time
    most_again: int = MOST_AGAIN  # consecutive updates without new records; 0: records are used once
    interval: Interval = field(init=False)

    def __post_init__(self) -> None:
        self.interval = Interval(self.store, self.every, self.horizon)

    def resume(self) -> None:
        """As `DistillLoop.resume`, and what the trainer before had in memory; used records are not new."""
        super().resume()
        self.interval.resume()
        if self.memory is not None:
            self.purges, found = self.memory.restore(self.trainer, gated=self.judge is not None)
            if isinstance(self.judge, Judge):
                found.restore(self.judge, self.trainer.student.base_hash, self._drawn())
        self.trainer.last_id, self.trainer.drawn_id = self._trained(), self._drawn()

    def due(self) -> str | None:
        """SHARED, which stands for an update of all, when there are as many new records as `interval` wants.

        It is due without new records as well, while `again` allows it and nobody has changed what serves,
        and never while the shared adapter is pinned, since experts are trained on it as the same update
        leaves it. Each failure in a row doubles the new records that are needed.
        """
        if is_pinned(self.store.registry, SHARED):
            return None
        if self.left_at != self.store.registry.generation():
            self.again = 0  # the same records are not to undo a rollback
        found, failed = self._news(), self.failures.get(SHARED, 0)
        return SHARED if found >= self._wanted(found) or (self.again and not failed) else None

    def _wanted(self, found: int) -> int:
        """How many new records make an update due, where there are `found` of them."""
        failed = min(self.failures.get(SHARED, 0), MOST_DOUBLINGS)
        most = max(1, self.store.replay.capacity // 2)  # more may never be there
        return min(most, self.interval.wanted(found) << failed)

    def _forget_records(self) -> None:
        super()._forget_records()
        self.interval.barren = 0
        for kept in (self.trainer.lessons.states, self.trainer.further, self.trainer.vocabularies):
            kept.forget()
        if self.memory is not None:
            self.memory.remove()

    def end(self) -> None:
        """As `DistillLoop.end`. An update that was cut short has forgotten all; what was kept stays."""
        if self.state.kind is not LearningKind.TRAINING:
            self._keep(now=True)

    def _keep(self, *, now: bool = False) -> None:
        """Keep what the trainer has in memory, unless one expert alone is learning."""
        if self.memory is None or self.trainer.learner is not None:
            return
        judge = self.judge
        taken = (lambda: OfGate.taken(judge)) if isinstance(judge, Judge) else OfGate
        self.memory.keep(self.trainer, self.purges, None if judge is None else taken, now=now)

    def _dropped(self, candidates: Sequence[Candidate]) -> dict[str, Update]:
        dropped = super()._dropped(candidates)
        self.trainer.last_id = self._trained()
        return dropped

    def _trained(self) -> int:
        """The newest record that was trained on, by the home's storage."""
        return int(self.store.registry.get_meta(f"trained:{SHARED}") or 0)

    def _drawn(self) -> int:
        """The newest record that any adapter was trained on."""
        names = [name for name, _ in self.store.registry.domain_names()]
        each = [self.store.registry.get_meta(f"trained:{name}") for name in (SHARED, *names)]
        return max(int(one or 0) for one in each)

    def _news(self) -> int:
        """Records of all domains since the last update."""
        return news(self.store).get(SHARED, 0)

    def needs(self) -> str:
        """As `DistillLoop.needs`."""
        found, why = self._news(), self.interval.why_rare
        said = f"an update takes {self._wanted(found)} new records, and there are {found}"
        return f"{said}; {why}." if why else f"{said}."

    def waits(self) -> str:
        """As `DistillLoop.waits`."""
        found, why = self._news(), self.interval.why_rare
        if (wanted := self._wanted(found)) <= self.every:
            return super().waits()
        said = f"{found} of {wanted} new records are there"
        return f"{said}; {why}" if why else said

    def only(self, expert: str) -> AbstractContextManager[None]:
        """As `DistillLoop.only`."""
        return self.trainer.only(expert)

    def _is_undone(self) -> bool:
        """Whether an update without new records was due, and what serves was changed since the last one."""
        if undone := self.again > 0 and self.left_at != self.generation:
            self.again = 0
        return undone and self._news() < self.interval.wanted(self._news())

    def held_up(self) -> str | None:
        """As `DistillLoop.held_up`."""
        if self.trainer.learner or not is_pinned(self.store.registry, SHARED):
            return None
        return (
            f"The shared adapter, which every update of this draft base teaches, is pinned; "
            f"`moedraft adapter unpin {SHARED}` lets it learn."
        )

    def _update(self, expert: str, steps: int | None, on_step: OnStep | None) -> Update | None:
        """Train and publish what passes the gate; the update of `expert`, else of the shared adapter."""
        if self.held_up() or self._is_undone():
            return None
        began, computing, self.waited = time.monotonic(), time.process_time(), 0.0
        is_fresh = not self.again or self._news() >= self.interval.wanted(self._news())
        left = self.most_again if is_fresh else self.again - 1
        self.again = 0  # unless the gate says otherwise
        untaught = self.judge.untaught() if self.judge and self.trainer.learner is None else ()
        made = self.trainer.update(steps=steps, on_step=on_step)
        if made is None or not made.candidates:
            name = self.trainer.learner or SHARED  # with an only learner, others' records are still new
            self.outlet.learned(name, self.store.replay.last_id(None), None)
            return None
        taught = [one for one in made.candidates if one.expert not in untaught]
        withdrawn = len(self.outcomes)
        if withdrawn:
            self.interval.barren = 0
        updates = self._settle(taught, made.last_id, began, on_step)
        if outcomes := self.outcomes[withdrawn:]:
            # The time that the trainer was suspended is none of its own, but only the server knows it.
            seconds = min(sum(one.seconds for one in outcomes), time.process_time() - computing)
            self._pace(outcomes, seconds, is_fresh, left, published=bool(updates))
        self._keep()
        return updates.get(expert) or updates.get(SHARED)

    def _pace(
        self,
        outcomes: Sequence[UpdateRecord],
        seconds: float,
        is_fresh: bool,
        left: int,
        *,
        published: bool,
    ) -> None:
        """Decide after an update when the next one comes; `left` could still follow without new records."""
        shared = next((one for one in outcomes if one.expert == SHARED), None)
        pays = self.interval.settled(shared, seconds, published=published, is_fresh=is_fresh)
        decision = shared.decision if shared else None
        if self.judge is not None and decision in ("promote", "keep") and not self.disturbed:
            self.again = left if pays else max(0, left + 1 - HOPELESS)
            self.left_at = self.generation
