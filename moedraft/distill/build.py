"""Put a trainer together from the same settings and store as the engine; they share nothing else."""

from __future__ import annotations

from moedraft.config import Settings
from moedraft.distill.loop import DistillLoop
from moedraft.distill.publish import Outlet
from moedraft.distill.trainer import Trainer
from moedraft.models import load_model
from moedraft.storage.store import Store


def build_loop(settings: Settings, store: Store, outlet: Outlet | None = None) -> DistillLoop:
    """A distillation loop with its own copy of the draft base, in float32; results go to `outlet`."""
    draft = load_model(settings.draft, "draft", settings.device, "float32", settings.cache_dir)
    trainer = Trainer(
        draft,
        store,
        outlet=outlet,
        scope=settings.adapter_scope,
        rank=settings.adapter_rank,
        shared_rank=settings.shared_rank,
        learning_rate=settings.learning_rate,
        steps=settings.update_steps,
        tokens_per_step=settings.update_tokens,
    )
    return DistillLoop(trainer, store, settings.update_every)
