"""What a trainer has in memory outlives it: the next trainer makes the update that it would have made."""

from __future__ import annotations

import json
import logging
import math
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from feature_records import SOME, a_record, a_target
from safetensors.torch import save_file
from test_joint import PLAN, Home, a_student

from moedraft.core import SHARED, StorageError
from moedraft.distill.features.feature_lessons import FeatureLessons
from moedraft.distill.features.record_states import RecordStates
from moedraft.distill.fresh.beside_base import BesideBase
from moedraft.distill.joint.joint_loop import JointLoop
from moedraft.distill.joint.joint_trainer import JointTrainer, JointUpdate
from moedraft.distill.judging.gate import Verdict
from moedraft.distill.judging.judge import Judge
from moedraft.distill.measuring.measures import JointMeasure
from moedraft.distill.memory import snapshot
from moedraft.distill.memory.of_gate import OfGate
from moedraft.distill.memory.snapshot import _unpacked
from moedraft.distill.memory.trainer_memory import TrainerMemory
from moedraft.distill.outlet import HomeOutlet
from moedraft.distill.process import Process
from moedraft.distill.text.text_lessons import TextLessons
from moedraft.distill.text.text_student import TextStudent
from moedraft.storage import changes
from moedraft.storage.records import trainer_file
from moedraft.storage.store import Store

from random_models import random_model

NAMES = (SHARED, "code", "prose")


class Says:
    """A gate that says the same of all candidates."""

    def __init__(self, decision: Any) -> None:
        self.decision = decision

    def __call__(self, candidates: Any, on_batch: Any = None) -> dict[str, Verdict]:
        return {one.expert: Verdict(self.decision) for one in candidates}

    def untaught(self) -> frozenset[str]:
        return frozenset()

    def forget(self) -> None: ...


def a_loop(home: Home, trainer: JointTrainer, decision: Any = "promote", **options: Any) -> JointLoop:
    memory = TrainerMemory(home.store.home.path, home.store.registry, **options)
    return JointLoop(trainer, home.store, HomeOutlet(home.store), 1, Says(decision), memory=memory)


def a_trainer(home: Home, **ranks: int) -> JointTrainer:
    """As after a restart: it has read the models anew."""
    student = a_student(home.draft)
    student._ranks = {True: ranks.get("shared", 6), False: 4}
    return JointTrainer(FeatureLessons(student, RecordStates(home.target, home.draft)), home.store, PLAN)


def restarted(home: Home, **ranks: int) -> JointLoop:
    loop = a_loop(home, a_trainer(home, **ranks))
    loop.resume()
    return loop


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    found = Home(tmp_path, {"code": 16, "prose": 16})
    yield found
    found.store.close()


def same(ours: JointUpdate | None, theirs: JointUpdate | None) -> bool:
    assert ours is not None
    assert theirs is not None
    assert [one.expert for one in ours.candidates] == [one.expert for one in theirs.candidates] == [*NAMES]
    pairs = list(zip(ours.candidates, theirs.candidates, strict=True))
    return all(
        torch.equal(one.tensors[key], other.tensors[key]) for one, other in pairs for key in one.tensors
    )


@pytest.mark.parametrize("decision", ["promote", "keep"])
def test_the_next_update_is_the_same_as_without_a_restart(home: Home, decision: Any) -> None:
    loop = a_loop(home, home.trainer, decision)
    for seed in (50, 100):
        loop.run_once(SHARED)
        home.put({"code": 8, "prose": 8}, seed)
    loop.end()
    assert {name: loop.trainer.versions[name] for name in NAMES} == dict.fromkeys(
        NAMES, 2 if decision == "promote" else 0
    )
    again = restarted(home)
    assert again.trainer.versions == loop.trainer.versions
    assert same(again.trainer.update(), loop.trainer.update())


def test_without_the_file_the_next_update_is_another_one(home: Home) -> None:
    """So that the test above can fail."""
    loop = a_loop(home, home.trainer)
    loop.run_once(SHARED)
    loop.end()
    trainer_file.remove(home.store.home.path)
    again = restarted(home)
    assert again.trainer.versions == {}
    assert not same(again.trainer.update(), loop.trainer.update())


def test_an_independent_draft_goes_on_as_well(tmp_path: Path) -> None:
    target, store = a_target(), Store.open(tmp_path)
    home = SimpleNamespace(store=store)
    store.registry.set_meta("target_id", "tiny")
    store.replay.add([a_record(target, i, domain="code", topk=8) for i in range(16)])

    def trainer() -> JointTrainer:
        student = TextStudent(random_model("llama", 1, layers=2), rank=4, shared_rank=6)
        return JointTrainer(TextLessons(student), store, PLAN)

    loop = a_loop(home, trainer())  # type: ignore[arg-type]
    loop.run_once(SHARED)
    loop.end()
    again = a_loop(home, trainer())  # type: ignore[arg-type]
    again.resume()
    ours, theirs = again.trainer.update(), loop.trainer.update()
    assert ours is not None
    assert theirs is not None
    for one, other in zip(ours.candidates, theirs.candidates, strict=True):
        assert all(torch.equal(one.tensors[key], other.tensors[key]) for key in one.tensors)
    store.close()


def test_rows_that_nobody_learned_are_left_out(tmp_path: Path) -> None:
    home = Home(tmp_path, {"code": 16, "prose": 16}, vocabulary=SOME)
    loop = a_loop(home, home.trainer)
    loop.run_once(SHARED)
    loop.end()
    found = trainer_file.read(home.store.home.path)
    assert found is not None
    rows = {name: tensor for name, tensor in found[1].items() if name.endswith("/rows")}
    assert rows
    whole = sum(p.numel() for name in NAMES for p in loop.trainer.student.parameters(name))
    kept = sum(t.numel() for name, t in found[1].items() if name.endswith("/weight"))
    assert kept < whole
    again = restarted(home)
    assert same(again.trainer.update(), loop.trainer.update())
    home.store.close()


def test_tokens_that_earlier_records_held_are_remembered(tmp_path: Path) -> None:
    home = Home(tmp_path, {"code": 16}, vocabulary=SOME)
    loop = a_loop(home, home.trainer)
    loop.run_once(SHARED)
    loop.end()
    counts = loop.trainer.vocabularies.counts("code")
    assert counts is not None
    again = restarted(home).trainer.vocabularies.counts("code")
    assert again is not None
    assert again.tolist() == counts.tolist()
    home.store.close()


@pytest.mark.parametrize(
    "counts", [torch.ones(2, 2), torch.ones(2, dtype=torch.int64), torch.tensor([[3, 3], [1, 1]])]
)
def test_counts_that_are_none_are_refused(tmp_path: Path, counts: torch.Tensor) -> None:
    home = Home(tmp_path, {"code": 16}, vocabulary=SOME)
    learned(home)
    found = trainer_file.read(home.store.home.path)
    assert found is not None
    words, tensors = snapshot.Words.model_validate_json(found[0]), found[1]
    assert f"{snapshot.COUNTS}/code" in tensors
    with pytest.raises(snapshot.Unfit):
        snapshot.restore(home.trainer, words, {**tensors, f"{snapshot.COUNTS}/code": counts})
    assert home.trainer.versions == {}
    home.store.close()


# -- what is not used any more ---------------------------------------------------------------------


def learned(home: Home) -> None:
    loop = a_loop(home, home.trainer)
    loop.run_once(SHARED)
    loop.end()


def test_nothing_is_used_where_another_shared_adapter_serves(home: Home) -> None:
    learned(home)
    changes.rollback(home.store, SHARED)
    assert restarted(home).trainer.versions == {}


def test_an_expert_of_which_another_version_serves_is_loaded_from_storage(home: Home) -> None:
    learned(home)
    changes.rollback(home.store, "code")
    assert restarted(home).trainer.versions == {SHARED: 1, "prose": 1}


@pytest.mark.parametrize(
    "forget",
    [
        lambda store: changes.purge(store, "code"),
        lambda store: changes.purge(store, None),
        lambda store: store.registry.remove_domain("prose"),
    ],
)
def test_who_deletes_records_deletes_what_was_learned_from_them_here(
    home: Home, forget: Callable[[Store], Any]
) -> None:
    learned(home)
    path, copy = home.store.home.path / trainer_file.NAME, home.store.home.path / "copy"
    shutil.copy(path, copy)
    forget(home.store)
    assert not path.exists()
    shutil.copy(copy, path)  # as if a trainer had been writing it meanwhile
    assert restarted(home).trainer.versions == {}
    assert not path.exists()


def test_a_running_trainer_removes_it_after_a_purge(home: Home) -> None:
    loop = a_loop(home, home.trainer)
    loop.purges = home.store.registry.purges()
    loop.run_once(SHARED)
    loop.end()
    path = home.store.home.path / trainer_file.NAME
    copy = path.read_bytes()
    changes.purge(home.store, "code")
    path.write_bytes(copy)
    loop.forget_purged()
    assert not path.exists()


def test_what_the_gate_has_thrown_away_does_not_come_back(home: Home) -> None:
    """Though it was written just before, and would not be written again for a while."""
    loop = a_loop(home, home.trainer, "keep")
    assert loop.memory is not None
    loop.run_once(SHARED)
    assert (home.store.home.path / trainer_file.NAME).exists()
    loop.memory.rest_until += 1000
    loop.judge = Says("discard")
    loop.run_once(SHARED)
    assert not (home.store.home.path / trainer_file.NAME).exists()
    loop.end()
    assert not (home.store.home.path / trainer_file.NAME).exists()


@pytest.mark.parametrize("by", ["watch", "person"])
def test_a_version_that_was_taken_back_does_not_come_back_by_an_older_file(home: Home, by: str) -> None:
    loop = a_loop(home, home.trainer)
    assert loop.memory is not None
    loop.run_once(SHARED)
    loop.memory.rest_until += 1000  # version 2 is not written any more
    loop.run_once(SHARED)
    if by == "watch":
        loop.outlet.withdraw(SHARED, 2)
        loop.trainer.forget(SHARED)
    else:
        changes.rollback(home.store, SHARED)
    assert restarted(home).trainer.versions == {}


def test_a_purge_right_before_the_end_is_final(home: Home) -> None:
    """The loop has not noticed it yet."""
    loop = a_loop(home, home.trainer)
    loop.purges = home.store.registry.purges()
    loop.run_once(SHARED)
    changes.purge(home.store, None)
    loop.end()
    assert not (home.store.home.path / trainer_file.NAME).exists()


def test_a_purge_while_it_is_written_is_final(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    loop, write = a_loop(home, home.trainer), trainer_file.write
    loop.purges = home.store.registry.purges()

    def slow(*args: Any) -> None:
        changes.purge(home.store, None)
        write(*args)

    monkeypatch.setattr(trainer_file, "write", slow)
    loop.run_once(SHARED)
    assert not (home.store.home.path / trainer_file.NAME).exists()


def test_the_gate_goes_on_counting_what_it_has_kept(home: Home) -> None:
    """So that a line which shows nothing ends, however often the trainer is started again."""
    home.trainer.update()
    memory = TrainerMemory(home.store.home.path, home.store.registry)
    memory.keep(home.trainer, 0, lambda: OfGate(kept={SHARED: (0, 4), "sql": (0, 3)}))
    loop = a_loop(home, a_trainer(home))
    loop.judge = judge = Judge(JointMeasure(loop.trainer, 3), home.store)
    loop.resume()
    assert judge.kept == {SHARED: (0, 4)}


def test_how_long_lists_should_be_is_known_after_a_restart(home: Home) -> None:
    home.trainer.update()
    home.trainer.vocabularies.lengths.observe("code", (1, 2, 3, 4, 5), 300)
    memory = TrainerMemory(home.store.home.path, home.store.registry)
    memory.keep(home.trainer, 0)
    trainer = a_trainer(home)
    memory.restore(trainer)
    assert trainer.vocabularies.lengths.told() == {"code": [1, 2, 3, 4, 5, 300]}


def judged(home: Home, decision: Any = "promote", depth: int = 3) -> tuple[JointLoop, BesideBase]:
    """A loop after a restart whose gate measures adapters beside the base, but decides as is said here."""
    loop = a_loop(home, a_trainer(home))
    judge = OneDecision(JointMeasure(loop.trainer, depth), home.store, base_serves=True)
    judge.decision = decision
    loop.judge, loop.beside_base = judge, judge.beside_base
    loop.resume()
    assert loop.beside_base is not None
    return loop, loop.beside_base


class OneDecision(Judge):
    decision: Any

    def __call__(self, candidates: Any, on_batch: Any = None) -> dict[str, Verdict]:
        assert self.beside_base is not None
        self.beside_base.base_hash = candidates[0].base_hash
        return {one.expert: Verdict(self.decision) for one in candidates}


def figures_of(beside: BesideBase, depth: int | None = None) -> dict[str, Any]:
    found = {name: beside.seen(name, depth) for name in ("code", "prose")}
    return {
        name: [(one.counts.tolist(), one.chances.tolist()) for one in (seen.before, seen.after)]
        for name, seen in found.items()
        if seen is not None and seen.before.chances is not None and seen.after.chances is not None
    }


def seen_beside(home: Home) -> BesideBase:
    """What a trainer has seen that has ended: two updates, and between them new records of both domains."""
    loop, beside = judged(home)
    loop.run_once(SHARED)
    home.put({"code": 8, "prose": 8}, 300)
    loop.run_once(SHARED)
    assert set(figures_of(beside)) == {"code", "prose"}
    loop.end()
    return beside


def test_how_adapters_stood_beside_the_base_is_known_after_a_restart(home: Home) -> None:
    before = seen_beside(home)
    loop, after = judged(home)
    assert figures_of(after) == figures_of(before)
    assert after.learned == before.learned == {"code", "prose"}
    ids = {row.record.id for rows in after.rows.values() for row in rows}
    home.put({"code": 8, "prose": 8}, 500)
    loop.run_once(SHARED)
    assert {row.record.id for rows in after.rows.values() for row in rows} > ids, "and it goes on at once"
    assert all(len({row.record.id for row in rows}) == len(rows) for rows in after.rows.values())


def test_without_a_file_new_records_are_measured_at_once(home: Home) -> None:
    seen_beside(home)
    trainer_file.remove(home.store.home.path)
    loop, beside = judged(home)
    assert not beside.rows
    home.put({"code": 8}, 500)
    loop.run_once(SHARED)
    assert set(figures_of(beside)) == {"code"}


def test_records_that_are_measured_anew_count_once(home: Home) -> None:
    """As where an update failed after they were measured, and the process ended."""
    loop, beside = judged(home)
    loop.run_once(SHARED)
    home.put({"code": 8}, 300)
    beside.gather()
    loop.end()
    count = len(beside.rows["code"])
    loop, beside = judged(home)
    assert not beside.rows["code"]
    beside.gather()
    assert len(beside.rows["code"]) == count > 0


def test_what_was_seen_of_an_expert_that_was_taken_back_is_dropped(home: Home) -> None:
    seen_beside(home)
    changes.rollback(home.store, "code")
    _, beside = judged(home)
    assert set(figures_of(beside)) == {"prose"}


def test_figures_of_another_draft_length_do_not_count(home: Home) -> None:
    """They cannot be added to those that the gate measures now."""
    seen_beside(home)
    _, beside = judged(home, depth=2)
    assert figures_of(beside, 3)
    assert not figures_of(beside, 2)


@pytest.mark.parametrize("other", ["target", "gate"])
def test_what_another_target_or_gate_left_is_not_gone_on_from(home: Home, other: str) -> None:
    loop = a_loop(home, home.trainer, "keep")
    loop.run_once(SHARED)
    loop.end()
    again = a_loop(home, a_trainer(home))
    if other == "target":
        home.store.registry.set_meta("target_id", "other")
    else:
        again.judge = None
    again.resume()
    assert again.trainer.versions == {}
    again.end()
    assert (home.store.home.path / trainer_file.NAME).exists()  # for who comes back to what was


def test_an_expert_that_has_made_no_step_begins_as_it_would_have(home: Home) -> None:
    home.trainer.update()
    home.trainer._follow("sql")  # which is no domain any more
    assert "sql" not in home.trainer.optimisers
    memory = TrainerMemory(home.store.home.path, home.store.registry)
    memory.keep(home.trainer, 0)
    trainer = a_trainer(home)
    memory.restore(trainer)
    assert "sql" in trainer.versions
    assert "sql" not in trainer.optimisers
    assert not trainer.optimiser("code").settled


@pytest.mark.parametrize("wrong", [-1, 10_000])
def test_a_row_that_is_none_is_refused(wrong: int) -> None:
    like, found = torch.zeros(3, 2), {"x/weight": torch.ones(1, 2), "x/rows": torch.tensor([wrong])}
    with pytest.raises((RuntimeError, IndexError)):
        _unpacked("x", "weight", found, like)


def spoilt(path: Path, how: str) -> None:
    if how == "cut":
        path.write_bytes(path.read_bytes()[:-100])
    elif how == "words":
        save_file({"x": torch.zeros(1)}, path, metadata={"words": "[1]"})
    elif how == "no words":
        save_file({"x": torch.zeros(1)}, path)
    elif how == "noise":
        path.write_bytes(b"\0" * 1000)
    else:
        words, tensors = trainer_file.read(path.parent) or ("", {})
        if how == "missing":
            tensors = {name: t for name, t in tensors.items() if not name.endswith("exp_avg")}
        elif how == "infinite":
            next(t for name, t in tensors.items() if name.endswith("weight")).fill_(torch.inf)
        elif how == "another layer":
            tensors["code/elsewhere/a/weight"] = torch.zeros(1)
        elif how == "figures":
            counts = {"counts": [[1.0, math.nan]]}
            row = {"id": 1, "source": "", "pinned": False, "versions": (1, 1)}
            words = json.dumps(
                json.loads(words) | {"beside": {"code": [row | {"before": counts, "after": counts}]}}
            )
        elif how == "its own list":
            tensors["vocabulary/code"] = torch.tensor([3, 10**6])
        else:
            tensors["vocabulary"] = torch.tensor([-1, *range(97)] if how == "below" else [0, 10**6])
        save_file(tensors, path, metadata={"words": words})


@pytest.mark.parametrize(
    "how",
    [
        *("cut", "words", "no words", "noise", "missing", "infinite"),
        *("vocabulary", "below", "its own list", "another layer", "figures"),
    ],
)
def test_a_file_that_is_no_good_is_said_and_not_used(
    home: Home, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    learned(home)
    spoilt(home.store.home.path / trainer_file.NAME, how)
    loop = restarted(home)
    assert loop.trainer.versions == {}
    assert not loop.trainer.student.names
    assert "is not used" in caplog.text
    assert not (home.store.home.path / trainer_file.NAME).exists()
    assert loop.run_once(SHARED) is not None  # from the live versions


def test_with_other_ranks_it_begins_with_what_serves(home: Home, caplog: pytest.LogCaptureFixture) -> None:
    learned(home)
    loop = restarted(home, shared=3)
    assert loop.trainer.versions == {}
    assert "another shape" in caplog.text


# -- when it is written ----------------------------------------------------------------------------


def test_it_is_for_its_owner_only_and_not_written_at_each_update(home: Home) -> None:
    loop = a_loop(home, home.trainer)
    path = home.store.home.path / trainer_file.NAME
    loop.run_once(SHARED)
    first = path.read_bytes()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert loop.memory is not None
    loop.memory.rest_until += 1000
    loop.run_once(SHARED)
    assert path.read_bytes() == first
    loop.end()
    assert path.read_bytes() != first


def test_a_disk_without_room_is_left_alone(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    learned(home)
    assert not list(home.store.home.path.glob("trainer*"))


def test_a_failure_is_said_once_and_learning_goes_on(
    home: Home, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    learned(home)
    path = home.store.home.path / trainer_file.NAME
    assert path.exists()

    def broken(*_: Any, **__: Any) -> None:
        raise OSError(5, "broken")

    monkeypatch.setattr(trainer_file, "save_file", broken)
    loop = restarted(home)
    caplog.set_level(logging.WARNING)
    for seed in (300, 400):
        home.put({"code": 8}, seed)
        assert loop.run_once(SHARED) is not None
    loop.end()
    assert caplog.text.count("is not kept") == 1
    assert not list(path.parent.glob("trainer*"))  # nor one that is older than what serves


def test_what_a_killed_trainer_had_begun_to_write_is_removed(home: Home) -> None:
    scratch = home.store.home.path / trainer_file.SCRATCH.format(4711)
    scratch.write_bytes(b"half")
    restarted(home)
    assert not scratch.exists()
    scratch.write_bytes(b"half")
    changes.purge(home.store, None)
    assert not scratch.exists()


def test_a_process_that_ends_in_order_keeps_it(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = a_loop(home, home.trainer)
    loop.run_once(SHARED)
    path = home.store.home.path / trainer_file.NAME
    path.unlink()
    process = Process(None, home.store, loop, None)  # type: ignore[arg-type]
    monkeypatch.setattr(process, "turn", lambda: (_ for _ in ()).throw(SystemExit(0)))
    with pytest.raises(SystemExit):
        process.run()
    assert path.exists()


def test_an_update_that_is_cut_short_leaves_what_was_kept_before(home: Home) -> None:
    loop = a_loop(home, home.trainer)
    loop.run_once(SHARED)
    path = home.store.home.path / trainer_file.NAME
    before = path.read_bytes()

    def stop(done: int, loss: float | None) -> None:
        if done == 2:
            raise SystemExit(0)

    with pytest.raises(SystemExit):
        loop.run_once(SHARED, on_step=stop)
    loop.end()
    assert path.read_bytes() == before


def test_a_warm_start_leaves_it_alone(home: Home) -> None:
    learned(home)
    path = home.store.home.path / trainer_file.NAME
    before = path.read_bytes()
    loop = restarted(home)
    home.put({"code": 8}, 500)
    with loop.only("code"):
        loop.run_once("code")
    assert path.read_bytes() == before


def test_a_file_that_cannot_be_removed_is_an_error(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "unlink", lambda *_, **__: (_ for _ in ()).throw(PermissionError(13, "no")))
    (home.store.home.path / trainer_file.NAME).touch()
    with pytest.raises(StorageError):
        trainer_file.remove(home.store.home.path)
