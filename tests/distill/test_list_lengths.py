"""How long an expert's list is: as long as guesses on new records say."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from feature_records import SOME, a_batch, a_draft, a_record, a_target, stir
from test_joint import Home, a_student

from moedraft.core import SHARED
from moedraft.distill.features.expert_vocabularies import Vocabularies
from moedraft.distill.features.feature_lessons import FeatureLessons
from moedraft.distill.features.feature_student import FeatureStudent
from moedraft.distill.features.list_lengths import ENOUGH, FIRST, LENGTHS, ListLengths
from moedraft.distill.guessing.feature_guesses import guessed, guessed_from
from moedraft.distill.joint.joint_trainer import JointTrainer
from moedraft.distill.measuring.measures import JointMeasure

NAMES = (SHARED, "code")


def seen(*hits: float, guesses: float = 1000, times: int = 1) -> ListLengths:
    found = ListLengths()
    for _ in range(times):
        found.observe("code", hits, guesses)
    return found


def test_the_length_that_guesses_best_is_taken_and_the_shortest_of_those_that_do_alike() -> None:
    assert seen(400, 430, 460, 470, 460).of("code") == 4096
    assert seen(400, 430, 469, 470, 470).of("code") == 2048
    assert seen(470, 470, 470, 470, 470).of("code") == 512
    assert seen(0, 0, 0, 0, 0).of("code") == 512
    assert seen(100, 100, 100, 100, 150).of("code") == 8192


def test_before_enough_is_known_it_has_a_usual_length() -> None:
    assert ListLengths().of("code") == FIRST
    assert seen(0, 0, 0, 0, 99, guesses=ENOUGH - 1).of("code") == FIRST
    assert seen(0, 0, 0, 0, 99, guesses=ENOUGH).of("code") == 8192
    assert seen(0, 0, 0, 0, 99).of("sql") == FIRST


def test_new_records_weigh_more_than_old_ones() -> None:
    found = seen(500, 400, 400, 400, 400, times=10)
    for _ in range(4):
        found.observe("code", (400, 400, 400, 400, 500), 1000)
    assert found.of("code") == 512
    for _ in range(8):
        found.observe("code", (400, 400, 400, 400, 500), 1000)
    assert found.of("code") == 8192


def test_what_was_seen_can_be_told_and_restored() -> None:
    one, other = seen(400, 430, 460, 470, 460), ListLengths()
    other.restore(one.told() | {"sql": [1.0, 2.0]})
    assert other.told() == one.told()
    assert other.of("code") == 4096
    other.forget()
    assert other.of("code") == FIRST


def test_lists_of_all_lengths_begin_with_the_commonest_tokens() -> None:
    target = a_target()
    lists = Vocabularies(torch.arange(0, 97, 2), 97, [96])
    lists.size = 40
    lists.choose({"code": [a_record(target, seed, topk=8) for seed in range(4)]})
    nested = lists.nested("code")
    assert [len(one) for one in nested] == [40] * len(LENGTHS)
    assert lists.nested("sql") == lists.nested(SHARED) == []
    own = lists.of("code")
    assert own is not None
    assert torch.equal(own, nested[LENGTHS.index(FIRST)])
    lists._ranked["code"] = [*range(96, -1, -1)]
    assert lists._first_of("code", 3).tolist() == [94, 95, 96]
    lists.restore("code", own)
    assert lists.nested("code") == [], "in which order its tokens came is not stored with a version"


def test_guesses_from_several_lists_are_those_of_each_list_alone() -> None:
    target = a_target()
    student = FeatureStudent(a_draft(target, SOME), "base", rank=4)
    for name in ("code", "sql"):
        student.add(name)
    stir(student)
    records = [a_record(target, seed, answer=9, domain=n) for seed, n in enumerate(("code", "sql", "code"))]
    lists = {"code": [SOME[:9], SOME[3:20], SOME], "sql": [SOME[5:12]]}
    batch = a_batch(target, student.draft, records)
    found = [*guessed_from(student, batch, lists)]
    assert [owner for owner, _ in found] == batch.owners == ["code", "code", "sql"]
    for i in range(3):
        student.use_lists({name: own[min(i, len(own) - 1)] for name, own in lists.items()})
        counts = guessed(student, batch, 1).counts
        for b, (owner, hits) in enumerate(found):
            assert hits[min(i, len(lists[owner]) - 1)] == counts[b, 0, 0]
            assert hits[-1] == counts[b, 0, 1] == 8


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path, {"code": 16, "prose": 16}, vocabulary=SOME)


def test_a_trainer_sees_how_long_lists_should_be_on_records_that_it_has_not_learned_from(home: Home) -> None:
    trainer = home.trainer
    trainer.vocabularies.size, trainer.vocabularies.useful = 40, True
    trainer.update()
    assert trainer.vocabularies.lengths.told() == {}, "there were no lists before"
    home.put({"code": 8}, 300)
    trainer.update()
    told = trainer.vocabularies.lengths.told()
    assert set(told) == {"code"}
    guesses = told["code"][-1]
    assert 0 < guesses <= 8 * 4
    trainer.update()
    assert trainer.vocabularies.lengths.told() == told, "nothing new came"
    home.store.close()


def test_what_one_expert_alone_has_learned_from_says_nothing_of_its_list(home: Home) -> None:
    """As in a warm start, whose updates draw the same records again and again."""
    trainer = home.trainer
    trainer.vocabularies.size, trainer.vocabularies.useful = 40, True
    with trainer.only("code"):
        for _ in range(3):
            trainer.update()
    trainer.update()
    assert trainer.vocabularies.lengths.told() == {}
    home.store.close()


def test_a_list_stays_as_long_as_it_is_where_nothing_is_known_of_it() -> None:
    target = a_target()
    lists = Vocabularies(torch.arange(97), 97)
    lists.restore("code", torch.arange(10, 50))
    lists.choose({"code": [a_record(target, 1, topk=8)]})
    assert len(lists.of("code")) == 40  # type: ignore[arg-type]
    lists.forget()
    assert lists.nested("code") == [], "what was purged leaves no ranking"


def test_after_a_start_versions_are_measured_with_all_tokens_of_their_lists(home: Home) -> None:
    trainer = home.trainer
    trainer.vocabularies.size, trainer.vocabularies.useful = 40, True
    update = trainer.update()
    assert update is not None
    home.publish(update)
    records = [one for one in home.store.replay.records(limit=64) if one.domain == "code"]
    assert records
    serving = {name: home.store.adapters.load_live(name, trainer.student.base_hash)[1] for name in NAMES}  # type: ignore[index]
    found = [JointMeasure(one, 3)(serving, "code", records, lambda: None) for one in (trainer, fresh(home))]
    assert serving["code"].vocabulary is not None
    assert not {*serving["code"].vocabulary.tolist()} <= {*SOME.tolist()}
    assert np.array_equal(found[0].counts, found[1].counts)
    assert found[0].chances == pytest.approx(found[1].chances, abs=1e-5)
    home.store.close()


def fresh(home: Home) -> JointTrainer:
    """One that was just started and has loaded nothing."""
    lessons = FeatureLessons(a_student(home.draft), home.trainer.lessons.states)
    assert torch.equal(lessons.student.vocabulary, SOME)
    return JointTrainer(lessons, home.store, home.trainer.plan)
