"""Updates from features that were kept while serving: the same as those from features computed again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from sqlalchemy import delete

from moedraft.config import Settings, load_settings
from moedraft.core import SHARED, InvalidRequest, SamplingParams
from moedraft.distill.assembly import build_loop
from moedraft.distill.features.feature_lessons import FeatureLessons
from moedraft.distill.features.record_states import RecordStates, kept_in
from moedraft.distill.joint.joint_loop import MOST_AGAIN, JointLoop
from moedraft.distill.joint.plan import JointPlan
from moedraft.feature.checkpoint import save_draft
from moedraft.feature.config import config_for
from moedraft.feature.model import FeatureDraft
from moedraft.models import load_model
from moedraft.storage.last_target import VOCABULARY
from moedraft.storage.store import TARGET_ID, Store
from moedraft.storage.tables import replay_states
from moedraft.system.build import System, build

PROMPTS = [f"SELECT name, {n} FROM people WHERE age > {7 * n}" for n in range(6)]


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A feature drafter with random weights, on the embedded target."""
    target = load_model("mini", "target")
    layers = (target.hf.get_input_embeddings(), target.hf.get_output_embeddings())
    vocabulary = torch.arange(0, target.vocab_size, 2)
    config = config_for(target.hf.config, feature_layers=(1, 2, 3), draft_vocab_size=len(vocabulary))
    folder = tmp_path_factory.mktemp("drafter")
    save_draft(FeatureDraft(config, vocabulary, *(layer.weight.detach() for layer in layers)), folder)
    return folder


def settings_of(home: Path, drafter: Path, **options: Any) -> Settings:
    return load_settings(home=home, draft=str(drafter), gate="off", adapter_rank=4, shared_rank=4, **options)


def served(settings: Settings) -> System:
    system = build(settings)
    system.engine.generate(PROMPTS, SamplingParams(max_tokens=24, ignore_eos=True), learn=True)
    system.recorder.flush()
    return system


@pytest.fixture(scope="module")
def keeping(drafter: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """A system that has served some requests and kept their features."""
    system = served(settings_of(tmp_path_factory.mktemp("keeping") / "home", drafter, features="keep"))
    yield system
    system.close()


def loop_of(system: System) -> JointLoop:
    loop = build_loop(system.settings, system.store)
    assert isinstance(loop, JointLoop)
    return loop


def test_records_of_another_target_are_not_learned_from(keeping: System) -> None:
    """Neither with another target's drafter, nor with a draft model that has other tokens."""
    registry, settings = keeping.store.registry, keeping.settings
    known = {key: registry.get_meta(key) for key in (TARGET_ID, VOCABULARY)}
    assert all(known.values())
    try:
        registry.set_meta(TARGET_ID, "another")
        with pytest.raises(InvalidRequest, match="made by another target"):
            build_loop(settings, keeping.store)
        registry.set_meta(TARGET_ID, known[TARGET_ID])
        registry.set_meta(VOCABULARY, "other tokens")
        for updates in ("joint", "turns"):
            toy = load_settings(home=settings.home, model_updates=updates)
            with pytest.raises(InvalidRequest, match="made by another target"):
                build_loop(toy, keeping.store)
    finally:
        for key, value in known.items():
            registry.set_meta(key, value)


def test_what_is_kept_is_what_would_be_computed(keeping: System) -> None:
    loop = loop_of(keeping)
    assert loop.most_again == MOST_AGAIN
    trainer = loop.trainer
    states = trainer.lessons.states
    assert isinstance(states, RecordStates)
    assert trainer.plan.strength == JointPlan.strength < 1
    records = keeping.store.replay.records()
    assert len(records) == len(PROMPTS)
    kept = states.of(records)
    assert states.tokens_read == 0, "the target was not asked"
    computed = RecordStates(states.target, states.draft).of(records)
    for ours, theirs in zip(kept, computed, strict=True):
        assert len(ours) == len(theirs) - 1
        torch.testing.assert_close(ours.float(), theirs[:-1].float(), rtol=2e-2, atol=2e-2)


def test_an_update_has_the_same_loss(keeping: System) -> None:
    """Up to half precision. Control: with the states of other records the loss is another one."""
    trainer = loop_of(keeping).trainer
    lessons = trainer.lessons
    assert isinstance(lessons, FeatureLessons)
    records = keeping.store.replay.records()
    kept = lessons.states
    assert isinstance(kept, RecordStates)
    trainer.student.add(SHARED)

    def loss() -> float:
        return lessons.loss(records, [one.domain for one in records], trainer.plan)

    ours = loss()
    lessons.states = RecordStates(kept.target, kept.draft)
    computed = loss()
    assert ours == pytest.approx(computed, rel=1e-3)
    found = dict(zip([one.id for one in records], kept.of(records), strict=True))
    turned = {tuple(one.token_ids): found[one.id].flip(0) for one in records}
    lessons.states = RecordStates(kept.target, kept.draft, kept=lambda records: turned)
    assert loss() != pytest.approx(computed, rel=1e-3)


def test_whole_updates_make_the_same_adapter(keeping: System, drafter: Path, tmp_path: Path) -> None:
    one = loop_of(keeping).trainer.update(steps=3)
    again = loop_of(keeping).trainer
    assert isinstance(again.lessons.states, RecordStates)
    again.lessons.states.kept = None
    other = again.update(steps=3)
    assert one is not None
    assert other is not None
    assert one.loss == pytest.approx(other.loss, rel=2e-3)
    assert again.lessons.states.tokens_read > 0


def test_where_some_are_missing_they_are_computed(keeping: System) -> None:
    records = keeping.store.replay.records()
    states = loop_of(keeping).trainer.lessons.states
    assert isinstance(states, RecordStates)
    find = kept_in(keeping.store.replay, keeping.bank.base_hash)
    gone, short = (tuple(one.token_ids) for one in records[:2])
    states.kept = lambda wanted: {
        key: found[1:] if key == short else found for key, found in find(wanted).items() if key != gone
    }
    found = states.of(records)
    assert states.tokens_read == len(gone) + len(short)
    assert all(len(one) >= len(record.token_ids) - 1 for one, record in zip(found, records, strict=True))
    assert kept_in(keeping.store.replay, "another base")(records) == {}


def test_by_default_nothing_is_kept_and_the_target_is_asked(drafter: Path, tmp_path: Path) -> None:
    system = served(settings_of(tmp_path / "home", drafter))
    try:
        assert system.store.replay.count() == len(PROMPTS)
        assert system.store.replay.states_size() == 0
        states = loop_of(system).trainer.lessons.states
        assert isinstance(states, RecordStates)
        states.of(system.store.replay.records())
        assert states.tokens_read > 0
    finally:
        system.close()


def test_a_trainer_reads_them_from_a_home_that_a_server_writes(keeping: System) -> None:
    """They are found by whoever opens the home, and no longer once they are deleted."""

    reader = Store.open(keeping.settings.home, write=False)
    records = reader.replay.records()
    try:
        assert len(reader.replay.states(records, keeping.bank.base_hash)) == len(PROMPTS)
        with keeping.store.home.write() as connection:
            connection.execute(delete(replay_states))
        assert reader.replay.states(records, keeping.bank.base_hash) == {}
    finally:
        reader.close()
