"""A whole system over a table of logits: real engine, store, router and recorder, models without weights."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from moedraft.config import Settings, load_settings
from moedraft.core import Domain
from moedraft.drafting.drafter import NoExperts
from moedraft.drafting.model import ModelDrafter
from moedraft.engine.engine import Engine
from moedraft.routing.embedder import Floats
from moedraft.routing.router import Router
from moedraft.routing.selector import Selector
from moedraft.serve.worker.worker import Worker
from moedraft.storage.store import Store
from moedraft.system.build import ROUTER_FOLDER, System
from moedraft.system.recorder import Recorder

from tiny import NumberTokenizer, TinyLM, random_table

VOCAB = 48
DOMAINS = {
    "code": tuple(f"def function number {i}" for i in range(8)),
    "prose": tuple(f"once upon a time {i}" for i in range(8)),
}


class WordEmbedder:
    """Texts by their words: enough to tell the two domains apart."""

    id = "words"

    def embed(self, texts: Sequence[str]) -> Floats:
        vectors = np.zeros((len(texts), 64), dtype=np.float32)
        for row, text in enumerate(texts):
            for word in text.split():
                vectors[row, zlib.crc32(word.encode()) % 64] += 1
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True).clip(1e-6)


class WordTokenizer(NumberTokenizer):
    """Token 7 is the text "7 "; any other word is some token."""

    chat_template = None

    def __call__(self, text: str, **_: object) -> dict[str, list[int]]:
        return {"input_ids": [self._token(word) for word in text.split()]}

    def _token(self, word: str) -> int:
        return int(word) if word.isdecimal() and int(word) < VOCAB else zlib.crc32(word.encode()) % VOCAB


def traces_of(worker: Worker) -> dict[str, int]:
    """What requests may leave behind in a worker and its engine; nothing but their fields shows it."""
    engine, thread = worker.system.engine, worker._engine
    return {
        "sequences": len(engine.sequences),
        "texts": len(engine._texts),
        "listeners": len(engine._listeners),
        "running": len(engine.scheduler.running),
        "waiting": len(engine.scheduler.waiting),
        "ready": engine.scheduler.num_ready,
        "channels": len(thread._channels),
        "outputs": len(thread._box),
        "open": thread.open,
    }


def tiny_system(home: Path, *, slots: int = 4, max_len: int = 256, **options: Any) -> System:
    """Close it. `options` are settings; the answer to a prompt is always the same."""
    settings: Settings = load_settings(home=home, max_batch_size=slots, **options)
    store = Store.open(settings.home)
    for name, examples in DOMAINS.items():
        store.registry.add_domain(Domain(name, f"all {name}", examples, 1.0))
    router = Router(WordEmbedder(), settings.home / ROUTER_FOLDER, settings.unknown_threshold)
    router.fit({name: list(examples) for name, examples in DOMAINS.items()})
    target, draft = (TinyLM(random_table(VOCAB, seed), max_len) for seed in (1, 1))
    recorder = Recorder(store, "tiny")
    loader = SimpleNamespace(refresh=lambda *_, **__: None, load_beside=lambda: None, hurry=lambda: None)
    engine = Engine(
        target,
        WordTokenizer(),
        ModelDrafter(draft, NoExperts(), slots, VOCAB),
        Selector(router),
        adapters=loader,
        sinks=[recorder],
        closers=[recorder.close, store.close],
        max_batch_size=slots,
        prefill_chunk=settings.prefill_chunk,
    )
    bank = SimpleNamespace(version=lambda expert: 0, experts={}, base_hash="tiny")
    return System(settings, store, router, target, draft, bank, loader, recorder, engine)  # type: ignore[arg-type]
