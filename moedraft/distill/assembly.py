"""Puts a distillation loop together, of the kind that the draft base needs."""

from __future__ import annotations

from moedraft.config import Settings
from moedraft.distill.joint import build_joint
from moedraft.distill.joint_loop import JointLoop
from moedraft.distill.loop import DistillLoop
from moedraft.distill.outlet import HomeOutlet, Outlet
from moedraft.distill.trainer import Trainer
from moedraft.drafting.base import draft_name, is_feature_checkpoint
from moedraft.models import load_by, snapshot_folder
from moedraft.storage.store import Store


def build_loop(settings: Settings, store: Store, outlet: Outlet | None = None) -> DistillLoop:
    """A loop with its own copy of the draft base, in float32. Without an outlet it writes the home itself.

    A feature drafter learns jointly, and its loop has a copy of the target as well: it reads the target's
    states anew for each record. Raises what loading a model raises.
    """
    outlet = outlet or HomeOutlet(store)
    name = draft_name(settings)
    folder = snapshot_folder(name)
    if folder is not None and is_feature_checkpoint(folder):
        return JointLoop(build_joint(settings, store), store, outlet, settings.update_every)
    trainer = Trainer(
        load_by(settings, "draft", "float32", name),
        store,
        scope=settings.adapter_scope,
        rank=settings.adapter_rank,
        shared_rank=settings.shared_rank,
        learning_rate=settings.learning_rate,
        steps=settings.update_steps,
        tokens_per_step=settings.update_tokens,
        kind=settings.distill_kind,
    )
    return DistillLoop(trainer, store, outlet, settings.update_every)
