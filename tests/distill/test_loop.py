"""Who learns next, what becomes of the candidate, and the settings that reach trainer and store."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from candidates import candidate
from distill_rig import record
from slow_cases import slow

from moedraft.config import load_settings
from moedraft.core import SHARED, AdapterVersion, Domain, InvalidRequest, StorageError
from moedraft.distill.assembly import TEXT_RATE, build_loop
from moedraft.distill.joint.joint_loop import JointLoop
from moedraft.distill.judging.gate import Verdict
from moedraft.distill.loop import LOOK_AGAIN, DistillLoop, Update
from moedraft.distill.outlet import HomeOutlet
from moedraft.learning_state import waiting
from moedraft.storage import changes
from moedraft.storage.store import Store
from moedraft.storage.versions.candidate import Candidate
from moedraft.system.build import open_store

from random_models import random_model

EVERY = 16


@dataclass
class FakeTrainer:
    """Learns at once, unless `fault` names an error for the adapter; keeps the outcomes it was told."""

    fault: Callable[[str], Exception | None] = lambda expert: None
    tried: list[str] = field(default_factory=list)
    outcomes: list[str] = field(default_factory=list)

    def update(self, expert: str, **_: object) -> Candidate:
        self.tried.append(expert)
        if (error := self.fault(expert)) is not None:
            raise error
        return candidate(expert)

    def published(self, version: AdapterVersion) -> None:
        self.outcomes.append(f"{version.domain} v{version.version}")

    def forget(self, expert: str) -> None:
        self.outcomes.append(f"{expert} forgotten")


@pytest.fixture
def store(store: Store) -> Store:
    """With two domains."""
    for name in ("code", "prose"):
        store.registry.add_domain(Domain(name, "", ("x",) * 8, 0.0))
    return store


def loop_of(store: Store) -> tuple[DistillLoop, Any]:
    trainer = FakeTrainer()
    return DistillLoop(trainer, store, HomeOutlet(store), EVERY), trainer  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("broken", "error"),
    [
        (SHARED, RuntimeError("out of memory")),
        slow(SHARED, StorageError("not finite")),
        slow("code", RuntimeError("out of memory")),
        ("code", StorageError("not finite")),
    ],
)
def test_one_whose_updates_fail_does_not_starve_the_others(
    store: Store, broken: str, error: Exception
) -> None:
    loop, trainer = loop_of(store)
    trainer.fault = lambda expert: error if expert == broken else None
    for start in range(0, 50 * EVERY, EVERY):
        store.replay.add([record(start + n, name) for n in range(EVERY) for name in ("code", "prose")])
        loop.run_once()
    for name in {SHARED, "code", "prose"} - {broken}:
        assert trainer.tried.count(name) >= 5
    assert trainer.tried.count(broken) >= 2  # it is not given up


def test_a_success_restores_what_failures_took(store: Store) -> None:
    loop, trainer = loop_of(store)
    store.replay.add([record(n) for n in range(2 * EVERY)])
    trainer.fault = lambda expert: RuntimeError("out of memory")
    assert loop.due() == SHARED
    for _ in range(3):
        loop.run_once(SHARED)
    assert loop.due() == "code"
    trainer.fault = lambda expert: None
    loop.run_once(SHARED)
    store.replay.add([record(100 + n) for n in range(2 * EVERY)])
    loop.run_once("code")
    store.replay.add([record(200 + n) for n in range(2 * EVERY)])
    assert loop.due() == SHARED


def test_what_was_broken_off_is_no_failure(store: Store) -> None:
    loop, trainer = loop_of(store)

    def stop(expert: str) -> Exception | None:
        raise SystemExit(0)

    store.replay.add([record(n) for n in range(EVERY)])
    trainer.fault = stop
    for _ in range(3):
        with pytest.raises(SystemExit):
            loop.run_once(SHARED)
    assert loop.due() == SHARED


# -- from the candidate to the version -----------------------------------------------------------


def test_a_candidate_is_published_and_the_trainer_told(store: Store) -> None:
    loop, trainer = loop_of(store)
    store.replay.add([record(n) for n in range(EVERY)])
    update = loop.run_once("code")
    assert update is not None
    assert (update.version, update.gain) == (store.registry.live("code"), pytest.approx(0.05))
    assert trainer.outcomes == ["code v1"]
    assert [one.version for one in store.updates.recent("code")] == [1]
    assert loop.state == waiting()


def test_a_candidate_that_is_refused_is_forgotten(store: Store) -> None:
    loop, trainer = loop_of(store)
    trainer.update = lambda expert, **_: candidate(expert, float("nan"))
    assert loop.run_once("code") is None
    assert loop.state.is_paused
    assert "not finite" in loop.state.reason
    assert trainer.outcomes == ["code forgotten"]
    assert store.registry.versions() == []
    assert store.registry.get_meta("trained:code") is None


@pytest.mark.parametrize("change", ["pin", "promote"])
def test_what_a_person_changes_during_an_update_is_no_failure(store: Store, change: str) -> None:
    """The server refuses the candidate then, in whichever words."""
    loop, trainer = loop_of(store)
    store.adapters.publish(candidate("code"))
    trainer.update = lambda expert, **_: candidate(expert, parent=1)
    store.replay.add([record(n) for n in range(EVERY)])

    def refused(*_: Any) -> list[AdapterVersion]:
        changes.pin(store, "code") if change == "pin" else changes.promote(store, "code", 0)
        raise StorageError("the live version of 'code' was changed meanwhile.")

    loop.outlet.publish = refused  # type: ignore[method-assign]
    assert loop.run_once("code") is None
    assert (loop.state, loop.failures, loop.outcomes) == (waiting(), {}, [])
    assert trainer.outcomes == ["code forgotten"]
    assert store.registry.get_meta("trained:code") is None  # its records are new still


def test_records_without_a_candidate_are_noted_as_used(store: Store) -> None:
    loop, trainer = loop_of(store)
    store.replay.add([record(n) for n in range(EVERY)])
    trainer.update = lambda expert, **_: None
    assert loop.run_once("code") is None
    assert (loop.state, trainer.outcomes) == (waiting(), [])
    assert store.registry.get_meta("trained:code") == str(EVERY)


# -- settings that reach the trainer and the store -----------------------------------------------


@pytest.fixture
def learned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Update]:
    """Makes one update of "code" with a loop of these settings, from a home with the same records."""
    monkeypatch.setattr("moedraft.distill.assembly.load_by", lambda *_: random_model("llama", 1, layers=2))

    def learn(**options: object) -> Update:
        home = tmp_path / f"home{len(list(tmp_path.iterdir()))}"
        small = {"update_steps": 2, "update_tokens": 128, "adapter_rank": 4, "shared_rank": 4}
        settings = load_settings(home=home, gate="off", **small, **options)
        with closing(open_store(settings)) as store:
            store.registry.add_domain(Domain("code", "", ("x",) * 8, 0.0))
            store.replay.add([record(n) for n in range(20)])
            update = build_loop(settings, store).run_once("code")
        assert update is not None
        return update

    return learn


def test_the_divergence_is_a_setting(learned: Callable[..., Update], monkeypatch: pytest.MonkeyPatch) -> None:
    losses = {kind: learned(distill_kind=kind).summary.loss for kind in ("fkl", "rkl", "jsd", "tvd")}
    assert len({round(loss, 4) for loss in losses.values()}) == 4
    assert 0 < losses["tvd"] < 1 < losses["fkl"]
    assert learned().summary.loss == losses["fkl"]
    monkeypatch.setenv("MOEDRAFT_DISTILL_KIND", "tvd")
    assert learned().summary.loss == losses["tvd"]


@pytest.mark.parametrize("updates", ["joint", "turns"])
def test_a_draft_model_learns_jointly_or_in_turns(
    learned: Callable[..., Update], tmp_path: Path, updates: str
) -> None:
    """An update of all adapters publishes the shared one with the expert, one in turns the expert alone."""
    assert learned(model_updates=updates).summary.expert == "code"
    with closing(open_store(load_settings(home=tmp_path / "home0"))) as store:
        loop = build_loop(load_settings(home=tmp_path / "home0", model_updates=updates), store)
        assert isinstance(loop, JointLoop) == (updates == "joint")
        if isinstance(loop, JointLoop):
            assert loop.trainer.plan.strength == 1
            assert loop.trainer.plan.learning_rate == TEXT_RATE
            assert loop.most_again == 0, "further updates overfit"
        assert {one.domain for one in store.registry.versions()} == (
            {"code", SHARED} if updates == "joint" else {"code"}
        )


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("model_updates", "'joint' or 'turns'"),
        ("distill_kind", "'auto', 'fkl', 'rkl', 'jsd' or 'tvd'"),
        ("replay_policy", "'fifo', 'reservoir', 'hardest' or 'stratified'"),
    ],
)
def test_a_value_that_does_not_exist_is_refused_in_a_sentence(name: str, words: str) -> None:
    with pytest.raises(InvalidRequest, match=f"setting '{name}': Input should be {words}"):
        load_settings(**{name: "newest"})


def test_what_a_full_buffer_keeps_is_a_setting(tmp_path: Path) -> None:
    def kept(policy: str) -> list[int]:
        settings = load_settings(home=tmp_path / policy, replay_policy=policy, replay_capacity=8)
        with closing(open_store(settings)) as store:
            rows = [replace(record(n), domain=SHARED, drafted=100, accepted=n) for n in range(40)]
            store.replay.add(rows)
            return sorted(one.accepted for one in store.replay.records())

    assert kept("fifo") == list(range(32, 40))
    assert kept("hardest") == list(range(8))
    sample = kept("reservoir")
    assert len(sample) == 8
    assert sample not in (kept("fifo"), kept("hardest"))


def test_candidates_of_an_update_during_which_records_were_purged_are_dropped(store: Store) -> None:
    loop, trainer = loop_of(store)
    store.replay.add([record(i) for i in range(EVERY)])

    def purge(_: str) -> None:
        store.replay.purge("prose")

    trainer.fault = purge
    assert loop.run_once("code") is None
    assert store.registry.live("code") is None
    assert not loop.state.is_paused
    assert loop.due() == "code" or loop.due() == SHARED
    trainer.fault = lambda expert: None
    assert loop.run_once("code") is not None


def test_after_a_purge_nothing_goes_on_from_what_was_only_kept_in_memory(store: Store) -> None:
    loop, trainer = loop_of(store)
    loop.run_once("code")
    trainer.outcomes.clear()
    store.replay.purge("code")
    loop.forget_purged()
    assert trainer.outcomes == ["shared forgotten", "code forgotten", "prose forgotten"]


def test_records_that_are_purged_while_the_gate_decides_are_in_no_version(store: Store) -> None:
    loop, trainer = loop_of(store)
    store.replay.add([record(i) for i in range(EVERY)])

    class Purges:
        def __call__(self, candidates: Sequence[Candidate], on_batch: object) -> dict[str, Verdict]:
            store.replay.purge("prose")
            return {one.expert: Verdict("promote") for one in candidates}

        def untaught(self) -> frozenset[str]:
            return frozenset()

        def forget(self) -> None:
            pass

    loop.judge = Purges()
    assert loop.run_once("code") is None
    assert store.registry.versions() == []
    assert (loop.state, loop.failures, trainer.outcomes) == (waiting(), {}, ["code forgotten"])
    loop.judge = None
    assert loop.run_once("code") is not None


def test_one_domain_in_a_small_buffer_still_learns(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "small", replay_capacity=16)
    store.registry.add_domain(Domain("code", "", ("x",) * 8, 0.0))
    loop, _ = loop_of(store)
    store.replay.add([record(i) for i in range(200)])
    assert loop.due() is not None
    store.close()


def test_published_versions_are_looked_at_though_no_update_is_due(store: Store) -> None:
    loop, _ = loop_of(store)
    looks: list[str] = []
    loop.watch = lambda base_hash, on_batch: looks.append(base_hash)  # type: ignore[assignment, func-returns-value]
    loop.trainer.student = SimpleNamespace(base_hash="base")  # type: ignore[assignment]
    loop.tend()
    assert looks == []
    store.replay.add([record(i) for i in range(LOOK_AGAIN)])
    loop.tend()
    loop.tend()
    assert looks == ["base"]
