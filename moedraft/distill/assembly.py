"""Puts a distillation loop together, of the kind that the draft base needs."""

from __future__ import annotations

from typing import TypeVar

from moedraft.config import Settings
from moedraft.distill.features.feature_lessons import FeatureLessons
from moedraft.distill.features.feature_student import FeatureStudent
from moedraft.distill.features.record_states import RecordStates, kept_in
from moedraft.distill.joint.joint_loop import MOST_AGAIN, JointLoop
from moedraft.distill.joint.joint_trainer import JointTrainer
from moedraft.distill.joint.plan import JointPlan, kinds_for
from moedraft.distill.judging.judge import Judge
from moedraft.distill.judging.watch import Watch
from moedraft.distill.loop import DistillLoop
from moedraft.distill.lora.ranks import LEADING, MOST, Kept
from moedraft.distill.measuring.measures import JointMeasure, Measure, TextMeasure
from moedraft.distill.memory.trainer_memory import TrainerMemory
from moedraft.distill.outlet import HomeOutlet, Outlet
from moedraft.distill.resampling.further import FurtherAnswers
from moedraft.distill.single.trainer import Trainer
from moedraft.distill.text.text_lessons import TextLessons
from moedraft.distill.text.text_student import TextStudent
from moedraft.drafting.base import FeatureBase, draft_name, feature_folder, load_base
from moedraft.models import LanguageModel, load_by
from moedraft.storage.last_target import check_target, check_tokenizer
from moedraft.storage.store import Store

Joint = TypeVar("Joint", bound=JointTrainer)
TEXT_RATE, TURNS_RATE = 1.5e-4, 1e-3  # of an independent draft model's updates, joint and in turns
TEXT_AGAIN = 0  # of an independent draft model's updates without new records: it has read much, and overfits
WHOLE = 1.0  # strength of an independent draft model's adapters: as they were learned


def build_loop(settings: Settings, store: Store, outlet: Outlet | None = None) -> DistillLoop:
    """Build a loop with its own float32 copy of the draft base. Without an outlet it writes the home itself.

    The loop of a feature drafter has a copy of the target as well: it reads the target's states anew for each
    record, and answers its prompt again (`resampled_answers`). Raises InvalidRequest where the home was last
    opened with another target, and what loading a model raises.
    """
    outlet, name = outlet or HomeOutlet(store), draft_name(settings)
    if feature_folder(name) is not None or settings.model_updates == "joint":
        joint = joint_trainer(settings, store, JointTrainer)
        file, horizon = TrainerMemory(store.home.path, store.registry), settings.train_horizon
        loop = JointLoop(joint, store, outlet, settings.update_every, memory=file, horizon=horizon)
        loop.most_again = MOST_AGAIN if isinstance(joint.student, FeatureStudent) else TEXT_AGAIN
        return _resumed(loop, settings)
    trainer = Trainer(
        _draft_model(settings, store, name),
        store,
        scope=settings.adapter_scope,
        rank=settings.adapter_rank,
        shared_rank=settings.shared_rank,
        learning_rate=settings.learning_rate or TURNS_RATE,
        steps=settings.update_steps,
        tokens_per_step=settings.update_tokens,
        kind=kinds_for(settings.distill_kind)[0],
    )
    return _resumed(DistillLoop(trainer, store, outlet, settings.update_every), settings)


def joint_trainer(settings: Settings, store: Store, kind: type[Joint]) -> Joint:
    """A joint trainer with its own copies of the models. Raises as `build_loop` does."""
    name = draft_name(settings)
    ranks = {"rank": settings.adapter_rank, "shared_rank": settings.shared_rank}
    if feature_folder(name) is None:
        draft = _draft_model(settings, store, name)
        lessons = TextLessons(
            TextStudent(draft, scope=settings.adapter_scope, **ranks), settings.update_tokens
        )
        return kind(lessons, store, _plan(settings, TEXT_RATE, LEADING, WHOLE))
    target = load_by(settings, "target")
    check_target(store.registry, target.weights_hash())
    base = load_base(settings, target, learns=True)
    assert isinstance(base, FeatureBase)
    student = FeatureStudent(base.hf, base.weights_hash(), name=base.name, **ranks)
    kept = kept_in(store.replay, student.base_hash) if settings.states_bytes else None
    states = RecordStates(target, base.hf, kept=kept)
    plan = _plan(settings, JointPlan.learning_rate, MOST, JointPlan.strength)
    tries = kind is not JointTrainer  # whether an expert pays at all, which is to be told soon
    count = 0 if tries else settings.resampled_answers
    further = FurtherAnswers(target, count, states) if count else None
    return kind(FeatureLessons(student, states), store, plan, target.eos_token_ids, further)


def _draft_model(settings: Settings, store: Store, name: str) -> LanguageModel:
    """A copy that learns, of a draft model that has the tokenizer of the target which made the records."""
    draft = load_by(settings, "draft", "float32", name)
    check_tokenizer(store.registry, draft.tokenizer)
    return draft


def _plan(settings: Settings, rate: float, kept: Kept, strength: float) -> JointPlan:
    greedy, sampled = kinds_for(settings.distill_kind)
    return JointPlan(
        steps=settings.update_steps,
        learning_rate=settings.learning_rate or rate,
        kind=greedy,
        sampled=sampled,
        kept=kept,
        strength=strength,
    )


def _resumed(loop: DistillLoop, settings: Settings) -> DistillLoop:
    """Attach the gate, unless it is off, and restore what earlier loops have recorded."""
    if settings.gate == "on":
        measure, alone = _measure(loop, max(1, settings.num_speculative_tokens))
        loop.judge = judge = Judge(measure, loop.store, base_serves=alone)
        loop.second_look, loop.beside_base = judge.second_look, judge.beside_base
        loop.watch = Watch(measure, loop.store)
    loop.resume()
    return loop


def _measure(loop: DistillLoop, depth: int) -> tuple[Measure, bool]:
    """What the gate measures with, and whether the base alone can draft for rows of single domains."""
    if not isinstance(loop, JointLoop):
        return TextMeasure(loop.trainer, depth), False
    return JointMeasure(loop.trainer, depth), isinstance(loop.trainer.student, FeatureStudent)
