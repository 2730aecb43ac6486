"""An expert is tried for some records: it learns from a part, is measured on the rest, and is thrown away."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from feature_records import VOCAB, a_draft, a_record, a_target

from moedraft.core import SHARED, InvalidRequest, ReplayRecord
from moedraft.distill.features.feature_lessons import FeatureLessons
from moedraft.distill.features.feature_student import FeatureStudent
from moedraft.distill.features.record_states import RecordStates
from moedraft.distill.joint.joint_trainer import JointTrainer
from moedraft.distill.joint.plan import JointPlan
from moedraft.distill.judging import trial
from moedraft.distill.judging.trial import ExpertTrials, TrialTrainer, split
from moedraft.distill.text.text_lessons import TextLessons
from moedraft.distill.text.text_student import TextStudent
from moedraft.models import LanguageModel
from moedraft.storage.store import TARGET_ID, Store

from random_models import random_model

PLAN = JointPlan(rows=8, learning_rate=3e-2, unrolled=2)


@pytest.fixture(autouse=True)
def long_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """A random target is harder to learn than a real one."""
    monkeypatch.setattr(trial, "STEPS", 96)


@pytest.fixture(scope="module")
def target() -> LanguageModel:
    return a_target()


def trials_of(store: Store, target: LanguageModel) -> ExpertTrials:
    draft = a_draft(target)
    student = FeatureStudent(draft, "base", rank=4, shared_rank=6)
    return ExpertTrials(TrialTrainer(FeatureLessons(student, RecordStates(target, draft)), store, PLAN), 2)


def alike(target: LanguageModel, count: int) -> list[ReplayRecord]:
    """Greedy answers that nobody claims, to prompts that differ in their first token."""
    rest = a_record(target, 1, prompt=6).token_ids[1:6]
    return [answered(target, [first % VOCAB, *rest]) for first in range(count)]


@torch.no_grad()
def answered(target: LanguageModel, prompt: list[int], length: int = 12) -> ReplayRecord:
    ids = list(prompt)
    for _ in range(length):
        ids.append(int(target.hf(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
    logits = target.hf(input_ids=torch.tensor([ids])).logits[0, len(prompt) - 1 : -1]
    values, best = logits.log_softmax(-1).topk(8, dim=-1)
    made = a_record(target, 1, len(prompt), length, SHARED)
    return replace(
        made,
        target_id=target.weights_hash(),
        token_ids=ids,
        topk_ids=best.tolist(),
        topk_logprobs=values.tolist(),
    )


def asked(records: list[ReplayRecord]) -> list[list[ReplayRecord]]:
    """Each to a question of its own."""
    return [[one] for one in records]


def test_what_can_be_learned_is_a_gain_and_nothing_is_left(store: Store, target: LanguageModel) -> None:
    trials = trials_of(store, target)
    parameters = sorted(trials.trainer.student.names)
    records = alike(target, 16)
    found = trials("new", asked(records))
    assert found is not None
    assert (found.learned, found.held_out) == (12, 4)
    assert found.gain == pytest.approx(found.after - found.before)
    assert found.gain > 0.05
    assert found.low > 0
    assert sorted(trials.trainer.student.names) == parameters
    assert store.registry.live("new") is None
    assert store.registry.live(SHARED) is None
    assert store.replay.count() == 0
    again = trials("other", asked(records))
    assert again is not None
    assert again.before == found.before


def test_an_independent_draft_model_is_tried_too(store: Store, target: LanguageModel) -> None:
    store.registry.set_meta(TARGET_ID, target.weights_hash())
    student = TextStudent(random_model("llama", seed=2, layers=2), rank=8, shared_rank=8)
    plan = replace(PLAN, learning_rate=1e-2)
    found = ExpertTrials(TrialTrainer(TextLessons(student), store, plan), 2)("new", asked(alike(target, 24)))
    assert found is not None
    assert found.gain > 0.1
    assert student.names == set()


def test_the_shared_adapter_is_measured_as_it_serves(store: Store, target: LanguageModel) -> None:
    records, trials = alike(target, 16), trials_of(store, target)
    untrained = trials("new", asked(records))
    store.replay.add(records)
    learner = JointTrainer(trials_of(store, target).trainer.lessons, store, PLAN)
    made = learner.update(steps=96)
    assert made is not None
    for one in made.candidates:
        store.adapters.publish(one)
    found = trials("new", asked(records))
    assert untrained is not None
    assert found is not None
    assert found.before > untrained.before + 0.05


def test_few_prompts_are_not_tried(store: Store, target: LanguageModel) -> None:
    trials = trials_of(store, target)
    assert trials("new", asked(alike(target, 8))) is None
    assert trials("new", [alike(target, 1) * 40]) is None
    foreign = [[replace(one, target_id="other")] for one in alike(target, 16)]
    assert trials("new", foreign) is None
    short = [[replace(one, topk_ids=one.topk_ids[:1])] for one in alike(target, 16)]
    assert trials("new", short) is None


def test_a_home_of_another_target_is_refused(store: Store, target: LanguageModel) -> None:
    store.registry.set_meta(TARGET_ID, "other")
    with pytest.raises(InvalidRequest, match="another target; name that one with --target"):
        trials_of(store, target)


def test_a_group_that_cannot_be_trained_is_told_and_the_next_one_tried(
    store: Store, target: LanguageModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    trials = trials_of(store, target)
    with monkeypatch.context() as broken:
        broken.setattr(trials.trainer, "_step", lambda *options: None)
        assert trials("new", asked(alike(target, 16))) is None
    assert "'new' could not be trained" in caplog.text
    assert trials("other", asked(alike(target, 16))) is not None


def test_what_was_asked_alike_stays_together(target: LanguageModel) -> None:
    groups = [[one, one] for one in alike(target, 8)]
    learn, test = split(groups)
    assert (len(learn), len(test)) == (6, 2)
    assert [*learn, *test] == [*groups[1:4], *groups[5:], groups[0], groups[4]]
