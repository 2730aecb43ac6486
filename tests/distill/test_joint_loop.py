"""The joint loop: due by all traffic, and every adapter that learned is published and noted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from candidates import candidate
from distill_rig import record

from moedraft.core import SHARED, Domain, GateDecision, RequestStats, StorageError, UpdateRecord
from moedraft.distill.joint.joint_loop import HOPELESS, MOST_AGAIN, JointLoop
from moedraft.distill.joint.joint_trainer import JointUpdate
from moedraft.distill.judging.gate import Verdict
from moedraft.distill.outlet import HomeOutlet
from moedraft.distill.pace.interval import PATIENCE
from moedraft.learning_state import NO_RECORDS, LearningKind
from moedraft.speculation import SpeculationStats
from moedraft.storage import changes
from moedraft.storage.store import Store
from moedraft.storage.versions.candidate import Candidate


class FakeStates:
    """Counts how often the states in memory were dropped."""

    dropped = 0

    def forget(self) -> None:
        self.dropped += 1


@dataclass
class FakeLessons:
    states: FakeStates = field(default_factory=FakeStates)


class FakeVocabularies:
    """Counts how often the counts of tokens were dropped."""

    dropped = 0

    def forget(self) -> None:
        self.dropped += 1


@dataclass
class FakeJoint:
    """Makes candidates for the shared adapter and one expert from whatever is there."""

    learned: bool = True
    learner: str | None = None
    last: int = 7  # the newest record that an update knows of
    lessons: FakeLessons = field(default_factory=FakeLessons)
    vocabularies: FakeVocabularies = field(default_factory=FakeVocabularies)
    further: FakeStates = field(default_factory=FakeStates)
    live: list[tuple[str, int]] = field(default_factory=list)
    forgotten: list[str] = field(default_factory=list)

    def update(self, *, steps: int | None = None, on_step: Any = None) -> JointUpdate | None:
        made = tuple(candidate(name) for name in (SHARED, "code"))
        return JointUpdate(made, last_id=self.last, loss=0.5) if self.learned else None

    def published(self, version: Any) -> None:
        self.live.append((version.domain, version.version))

    def forget(self, name: str) -> None:
        self.forgotten.append(name)


@pytest.fixture
def loop(store: Store) -> JointLoop:
    for name in ("code", "prose"):
        store.registry.add_domain(Domain(name, "", ("x",) * 8, 0.0))
    return JointLoop(FakeJoint(), store, HomeOutlet(store), every=4)  # type: ignore[arg-type]


def test_it_is_due_by_the_records_of_all_domains(loop: JointLoop) -> None:
    assert loop.due() is None
    assert loop.run_once() is None
    assert loop.state.kind is LearningKind.WAITING
    loop.store.replay.add([record(1), record(2), record(3, "prose")])
    assert loop.due() is None
    loop.store.replay.add([record(4, "prose")])
    assert loop.due() == SHARED


def test_after_failures_it_waits_for_more_records(loop: JointLoop) -> None:
    """Otherwise a record that the trainer dies of would be tried again and again."""
    loop.store.replay.add([record(i) for i in range(4)])
    assert loop.due() == SHARED
    loop.failures[SHARED] = 1
    assert loop.due() is None
    loop.store.replay.add([record(i) for i in range(4, 8)])
    assert loop.due() == SHARED


def test_each_adapter_that_learned_is_published(loop: JointLoop) -> None:
    update = loop.run_once("code")
    assert update is not None
    assert (update.expert, update.version.version) == ("code", 1)
    assert loop.trainer.live == [(SHARED, 1), ("code", 1)]  # type: ignore[attr-defined]
    assert loop.store.registry.live("prose") is None
    assert {one.expert for one in loop.store.updates.recent()} == {SHARED, "code"}
    other = loop.run_once("prose")  # it had no record: the shared adapter's update stands for it
    assert other is not None
    assert other.expert == SHARED


def test_nothing_to_learn_from_publishes_nothing(loop: JointLoop) -> None:
    loop.trainer.learned = False  # type: ignore[attr-defined]
    assert loop.run_once(SHARED) is None
    assert loop.store.registry.live(SHARED) is None


def test_an_update_that_taught_nobody_takes_no_records_from_others(
    loop: JointLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All records of the only learner may turn out to be another domain's."""
    loop.store.replay.add([record(i) for i in range(4)])
    monkeypatch.setattr(loop.trainer, "update", lambda **_: JointUpdate((), 7, 0.5))
    monkeypatch.setattr(loop.trainer, "learner", "code")
    assert loop.run_once("code") is None
    assert not loop.state.is_paused
    marks = [loop.store.registry.get_meta(f"trained:{name}") for name in ("code", SHARED)]
    assert marks == [str(loop.store.replay.last_id()), None]


def test_a_failed_publication_pauses_and_is_forgotten(
    loop: JointLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise StorageError("the disk is full")

    monkeypatch.setattr(loop.outlet, "publish", full)
    assert loop.run_once(SHARED) is None
    assert loop.state.is_paused
    assert loop.trainer.forgotten == [SHARED, "code"]  # type: ignore[attr-defined]


def test_a_promotion_during_an_update_makes_nobody_wait(
    loop: JointLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop.store.adapters.publish(candidate(SHARED))
    loop.store.replay.add([record(i) for i in range(4)])

    def refused(*_: Any) -> None:
        changes.promote(loop.store, SHARED, 0)
        raise StorageError("the live version of 'shared' was changed meanwhile.")

    monkeypatch.setattr(loop.outlet, "publish", refused)
    loop.trainer.last_id = 4  # as after an update
    for _ in range(4):
        changes.promote(loop.store, SHARED, 1)
        assert loop.run_once(SHARED) is None
        assert not loop.state.is_paused
    assert loop.interval.wanted(0) == 4
    assert loop.due() == SHARED
    assert loop.trainer.last_id == 0  # the records are new to the next update


def test_the_same_records_do_not_undo_what_a_person_has_changed(loop: JointLoop) -> None:
    """A rollback is not followed by an update at once, though more were allowed."""
    loop.judge = Says(Verdict("promote", gain=0.1))
    loop.store.replay.add([record(i) for i in range(4)])
    assert loop.run_once() is not None
    loop.store.registry.set_meta(f"trained:{SHARED}", str(loop.store.replay.last_id()))
    assert loop.again
    assert loop.due() == SHARED
    changes.rollback(loop.store, SHARED)
    assert loop.run_once(SHARED) is None, "as if it had been due before the rollback"
    assert loop.due() is None
    loop.store.replay.add([record(i) for i in range(4, 8)])
    assert loop.due() == SHARED


def test_a_rollback_while_the_gate_decides_is_not_undone_either(loop: JointLoop) -> None:
    loop.store.adapters.publish(candidate(SHARED))
    loop.store.replay.add([record(i) for i in range(4)])
    loop.trainer.last = loop.store.replay.last_id()  # type: ignore[attr-defined]
    loop.trainer.kept = lambda candidate: None  # type: ignore[method-assign]

    class RolledBack(Says):
        def __call__(self, candidates: Sequence[Candidate], on_batch: Any = None) -> dict[str, Verdict]:
            changes.rollback(loop.store, SHARED)
            return super().__call__(candidates)

    loop.judge = RolledBack(Verdict("keep"))
    loop.run_once()
    assert loop.again == 0
    assert loop.due() is None


class Says:
    """A gate with the same verdict for everybody."""

    def __init__(self, verdict: Verdict) -> None:
        self.verdict = verdict

    def __call__(
        self, candidates: Sequence[Candidate], on_batch: Callable[[], None] = lambda: None
    ) -> dict[str, Verdict]:
        return {one.expert: self.verdict for one in candidates}

    def untaught(self) -> frozenset[str]:
        return frozenset()

    def forget(self) -> None:
        pass


@pytest.mark.parametrize(("decision", "follows"), [("promote", True), ("keep", True), ("discard", False)])
def test_records_are_used_again_unless_the_gate_throws_the_update_away(
    loop: JointLoop, decision: GateDecision, follows: bool
) -> None:
    loop.judge = Says(Verdict(decision))
    loop.trainer.kept = lambda candidate: None  # type: ignore[method-assign]
    loop.store.replay.add([record(i) for i in range(4)])
    loop.trainer.last = loop.store.replay.last_id()  # type: ignore[attr-defined]
    loop.run_once()
    assert (loop.due() == SHARED) is follows


@pytest.mark.parametrize("most", [0, 3, MOST_AGAIN])
def test_records_are_not_used_again_for_ever_nor_without_a_gate(loop: JointLoop, most: int) -> None:
    loop.most_again = most
    loop.store.replay.add([record(i) for i in range(4)])
    loop.trainer.last = loop.store.replay.last_id()  # type: ignore[attr-defined]
    loop.run_once()
    assert loop.due() is None
    loop.judge = Says(Verdict("promote"))
    loop.store.replay.add([record(i) for i in range(4, 8)])
    loop.trainer.last = loop.store.replay.last_id()  # type: ignore[attr-defined]
    updates = 0
    while loop.due() is not None:
        loop.run_once()
        updates += 1
    assert updates == 1 + most


def test_updates_without_a_visible_gain_follow_each_other_less_often(loop: JointLoop) -> None:
    """What was kept is not thrown away; the next update from new records goes on with it."""
    loop.trainer.kept = lambda candidate: None  # type: ignore[method-assign]
    counts = []
    for added in (0.1, 0.0):
        gain = 0.1
        loop.store.replay.add([record(len(counts) * 10 + i) for i in range(4)])
        loop.trainer.last = loop.store.replay.last_id()  # type: ignore[attr-defined]
        counts.append(0)
        while loop.due() is not None:
            loop.judge = Says(Verdict("keep", 8, gain))
            loop.run_once()
            counts[-1] += 1
            gain += added
    assert counts == [1 + MOST_AGAIN, 1 + MOST_AGAIN // HOPELESS]
    assert loop.trainer.forgotten == []  # type: ignore[attr-defined]


def test_further_updates_must_be_worth_their_time_as_soon_as_requests_tell_it(loop: JointLoop) -> None:
    stats = SpeculationStats(num_steps=10)
    loop.store.requests.add([RequestStats("r", "code", 1, "", 8, 10, stats, 1e-9, "length")])
    loop.judge = Says(Verdict("promote", 8, gain=0.1))
    loop.store.replay.add([record(i) for i in range(4)])
    loop.trainer.last = loop.store.replay.last_id()  # type: ignore[attr-defined]
    updates = 0
    while loop.due() is not None:
        loop.run_once()
        updates += 1
    assert updates == 1 + MOST_AGAIN // HOPELESS
    assert loop.interval.barren == 1


def test_updates_that_do_not_pay_become_rare_under_traffic_that_never_stops(loop: JointLoop) -> None:
    """Neither do new records that come in the meantime begin a series before its time."""
    stats = SpeculationStats(num_steps=10)
    loop.store.requests.add([RequestStats("r", "code", 1, "", 8, 10, stats, 1e-9, "length")])
    loop.judge = Says(Verdict("promote", 8, gain=0.1))
    updates = []
    for number in range(200):
        loop.store.replay.add([record(10 * number + i) for i in range(4)])
        loop.trainer.last = loop.store.replay.last_id()  # type: ignore[attr-defined]
        updates.append(loop.due() is not None)
        loop.run_once()
    assert all(updates[:4])
    assert sum(updates[-64:]) <= 2 * (1 + MOST_AGAIN // HOPELESS), "one series for 32 times the records"


def test_a_version_that_was_taken_back_is_not_taken_for_the_updates_result(loop: JointLoop) -> None:
    back = UpdateRecord(SHARED, 1, 0, 0, 0.0, 0.0, None, None, decision="withdraw", gain=-0.5, gate_records=9)
    loop._look_again = lambda on_step: loop.outcomes.append(back)  # type: ignore[method-assign]
    loop.judge = Says(Verdict("promote", 8, gain=0.1))
    loop.interval.barren = 6
    loop.store.replay.add([record(i) for i in range(4)])
    loop.run_once(SHARED)
    assert loop.again == MOST_AGAIN
    assert loop.interval.barren == 0


def test_a_pinned_expert_that_learns_is_not_taken_for_a_published_one(loop: JointLoop) -> None:
    """Otherwise updates of which nothing is published would never become rare."""

    class SaysOfShared(Says):
        def __call__(
            self, candidates: Sequence[Candidate], on_batch: Callable[[], None] = lambda: None
        ) -> dict[str, Verdict]:
            return {SHARED: self.verdict}

    loop.trainer.kept = lambda candidate: None  # type: ignore[method-assign]
    loop.store.registry.set_meta("pinned:code", "1")
    loop.judge = SaysOfShared(Verdict("keep", 8, 0.1))
    loop.interval.payback.is_paid = lambda gain, seconds: True  # type: ignore[method-assign, assignment]
    for number in range(1, 4):
        loop.again = 0
        loop.store.replay.add([record(10 * number + i) for i in range(8)])
        loop.trainer.last = loop.store.replay.last_id()  # type: ignore[attr-defined]
        loop.run_once(SHARED)
        assert loop.interval.barren == number
        assert [one.expert for one in loop.outcomes] == [SHARED, "code"]
        loop.outcomes.clear()


def test_what_an_expert_was_reset_from_is_written_down(loop: JointLoop) -> None:
    """The version that served, and not a newer one that had been taken back."""
    for parent in (0, 1, 2):
        loop.store.adapters.publish_together([candidate("prose", parent=parent)])
    loop.store.registry.change("prose", None)
    assert loop.store.registry.live("prose").version == 2  # type: ignore[union-attr]

    class Resets(Says):
        def __call__(
            self, candidates: Sequence[Candidate], on_batch: Callable[[], None] = lambda: None
        ) -> dict[str, Verdict]:
            return {SHARED: self.verdict, "prose": Verdict("reset")}

    loop.judge = Resets(Verdict("promote", 8, 0.1))
    loop.run_once(SHARED)
    [entry] = loop.store.updates.recent("prose")
    assert (entry.decision, entry.parent, entry.version) == ("reset", 2, 0)


def test_it_says_why_updates_have_become_rare(loop: JointLoop) -> None:
    assert loop.waits() == NO_RECORDS
    assert loop.needs() == "an update takes 4 new records, and there are 0."
    loop.interval.barren = PATIENCE
    loop.store.replay.add([record(1)])
    why = "updates are rare now, since the last ones saved less time than they took (`train_horizon`)"
    assert loop.waits() == f"1 of 8 new records are there; {why}"
    assert loop.needs() == f"an update takes 8 new records, and there are 1; {why}."
    loop.interval.barren, loop.failures[SHARED] = 0, 1
    assert loop.waits() == "1 of 8 new records are there"


def test_after_a_purge_no_record_stays_in_memory(loop: JointLoop) -> None:
    loop.store.replay.add([record(1)])
    loop.forget_purged()
    assert loop.trainer.lessons.states.dropped == 0  # type: ignore[attr-defined]
    loop.store.replay.purge("code")
    loop.forget_purged()
    loop.forget_purged()
    assert loop.trainer.forgotten == [SHARED, "code", "prose"]  # type: ignore[attr-defined]
    assert loop.trainer.lessons.states.dropped == 1  # type: ignore[attr-defined]
    assert loop.trainer.vocabularies.dropped == 1  # type: ignore[attr-defined]
    assert loop.trainer.further.dropped == 1  # type: ignore[attr-defined]
