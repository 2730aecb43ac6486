"""Builds a System: the only place where models, home, router, experts and engine are put together."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from moedraft.config import Settings, check_home, load_settings
from moedraft.cpu.threads import set_threads
from moedraft.drafting.arms.judges import judge_of
from moedraft.drafting.base import DraftBase, drafter_of, load_base
from moedraft.drafting.drafter import ExpertDrafter
from moedraft.drafting.experts.lora import ExpertBank
from moedraft.drafting.glances import glances_of
from moedraft.drafting.lookup.past_answers import PastAnswers
from moedraft.drafting.model import ModelDrafter
from moedraft.engine.engine import Engine
from moedraft.engine.port import Sources
from moedraft.models import LanguageModel, load_by
from moedraft.routing.bert import BertRouter
from moedraft.routing.embedder import Embedder
from moedraft.routing.router import Router, forget
from moedraft.routing.selector import BackgroundSelector, ExpertSelector, UnaskedSelector
from moedraft.selecting.selector import EvidenceSelector
from moedraft.storage.changes import REFIT, knows_deleted, last_refit
from moedraft.storage.db import DATABASE
from moedraft.storage.last_target import note_target
from moedraft.storage.store import GENERAL_LIST, Store
from moedraft.system.domains.registering import refit
from moedraft.system.recorder import Recorder
from moedraft.system.sources.loader import AdapterLoader
from moedraft.system.sources.past_answers import PastAnswersKeeper

ROUTER_FOLDER = "router"
UNCOMPARED = (
    "The setting selector = evidence does nothing here: with adapter_scope = full each expert has keys and "
    "values of its own, so comparing experts would mean reading the text again. The router alone decides who "
    "drafts."
)
FITTING = "The router's BERT is fitted on the examples of all domains now, which takes minutes."
NO_BERT = "The setting router_model does nothing here: the router is a BERT only with router = bert."

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class System:
    """A running engine with everything around it. `close` releases the home."""

    settings: Settings
    store: Store
    router: Router
    target: LanguageModel
    draft: DraftBase
    bank: ExpertBank
    loader: AdapterLoader
    recorder: Recorder
    engine: Engine
    # held while what the router is fitted on changes: domains, and prompts of the traffic
    changing: threading.Lock = field(default_factory=threading.Lock)

    def refresh(self) -> None:
        """Load new adapter versions now."""
        self.engine.refresh(now=True)

    def close(self) -> None:
        self.engine.close()


def open_store(settings: Settings, *, write: bool = True) -> Store:
    """Open the store of the home. Raises StorageError as `Home.open` does, and for a file in its place."""
    check_home(settings.home)
    return Store.open(
        settings.home,
        write=write,
        replay_capacity=settings.replay_capacity,
        replay_policy=settings.replay_policy,
        states_bytes=settings.states_bytes,
    )


def open_router(settings: Settings, store: Store, *, fit: bool = True) -> Router:
    """The home's router, refitted where it knows other domains than are registered, or deleted prompts.

    fit: False where the caller will fit it at once. Raises InvalidRequest where the model of a BERT router
    cannot be loaded.
    """
    embedder = Embedder(settings.embedder, cpu_fast_paths=settings.cpu_fast_paths)
    folder, threshold = settings.home / ROUTER_FOLDER, settings.unknown_threshold
    if settings.router == "bert":
        router: Router = BertRouter(embedder, folder, threshold, source=settings.router_model)
        if store.home.writable:  # no purge would reach what the other router has learned from the traffic
            forget(folder)
            if last_refit(store.registry):
                store.registry.set_meta(REFIT, None)
    else:
        router = Router(embedder, folder, threshold)
    registered = {domain.name: list(domain.examples) for domain in store.registry.domains()}
    outdated = not router.matches(registered) or knows_deleted(store.registry)
    if fit and store.home.writable and outdated:
        if settings.router == "bert" and registered:
            log.warning(FITTING)
        refit(store, router)
    return router


def build(settings: Settings, *, keeps: bool = True) -> System:
    """Models, home, router, experts and engine of these settings.

    keeps: whether records of this target are to be learned from, so that the home's trainers take no others;
    else that is so from the first record on that is kept.
    """
    # A home that is there is claimed before the models are loaded, a new one is made only after they fit.
    check_home(settings.home)
    if settings.router != "bert" and "router_model" in settings.model_fields_set:
        log.warning(NO_BERT)
    store = open_store(settings) if (settings.home / DATABASE).exists() else None
    try:
        target, draft = load_pair(settings)
        store = store or open_store(settings)
        return assemble(settings, store, target, draft, keeps=keeps)
    except BaseException:
        if store is not None:
            store.close()
        raise


def load_pair(settings: Settings) -> tuple[LanguageModel, DraftBase]:
    """Target and draft base. Raises InvalidRequest or UnsupportedModel."""
    target = load_by(settings, "target")
    draft = load_base(settings, target)
    set_threads(settings.threads, target)
    return target, draft


def assemble(
    settings: Settings, store: Store, target: LanguageModel, draft: DraftBase, *, keeps: bool = True
) -> System:
    bank = ExpertBank(draft, settings.merged_cache_mb)
    bank.measure(settings.max_batch_size)
    router = open_router(settings, store)
    drafter = drafter_of(draft, bank, settings, target.vocab_size)
    selector = selector_of(settings, router, drafter, bank)
    loader = AdapterLoader(store, bank, tend_memory=settings.cpu_fast_paths)
    recorder = Recorder(store, target.weights_hash(), bank.base_hash, target.tokenizer)
    # What is drafted with a fixed length is never looked up in earlier answers.
    past = PastAnswers(settings.lookup_answers if settings.adaptive_budget else 0)
    keeper = PastAnswersKeeper(store, past, recorder.target_id)
    if keeps:
        note_target(store.registry, recorder.target_id, target.tokenizer)
    store.registry.set_meta(GENERAL_LIST, general_list(bank))
    engine = Engine(
        target,
        target.tokenizer,
        drafter,
        selector,
        adapters=Sources(loader, keeper),
        sinks=[recorder, keeper],
        closers=[selector.close, loader.close, recorder.close, store.close],
        glance=glances_of(drafter, draft, bank, settings.draft_source),
        max_batch_size=settings.max_batch_size,
        max_model_len=settings.max_model_len,
        prefill_chunk=settings.prefill_chunk,
        truncate_prompts=settings.long_prompts == "truncate",
        num_speculative_tokens=settings.num_speculative_tokens,
        draft_source=settings.draft_source,
        past=past,
        verification=settings.verification,
        max_speculative_tokens=settings.max_speculative_tokens,
        adaptive_budget=settings.adaptive_budget,
        topk=settings.topk,
        eos_token_ids=target.eos_token_ids,
    )
    engine.refresh(now=True)
    return System(settings, store, router, target, draft, bank, loader, recorder, engine)


def general_list(bank: ExpertBank) -> str | None:
    """What is noted as GENERAL_LIST, for people to see; None where the draft base guesses every token."""
    heads = bank.heads
    if heads is None or len(heads.general) >= heads.draft.config.vocab_size:
        return None
    bits = np.zeros(heads.draft.config.vocab_size, np.uint8)
    bits[heads.general.cpu().numpy()] = 1
    return np.packbits(bits).tobytes().hex()


@contextmanager
def with_other_draft(system: System, draft: str) -> Iterator[System]:
    """A second engine over the same target with another draft base, without experts.

    draft: named as in the settings. Its home is a folder that is deleted at the end. Raises InvalidRequest or
    UnsupportedModel.
    """
    with TemporaryDirectory(prefix="moedraft-") as folder:
        settings = system.settings.model_copy(update={"draft": draft, "home": Path(folder)})
        base = load_base(settings, system.target)
        other = assemble(settings, open_store(settings), system.target, base)
        try:
            yield other
        finally:
            other.close()


def selector_of(
    settings: Settings, router: Router, drafter: ExpertDrafter, bank: ExpertBank
) -> ExpertSelector:
    """The selector, which decides who drafts. Experts that share keys and values can be compared."""
    if settings.selector == "fixed":
        return UnaskedSelector(router)
    # Where lookup alone drafts, it only matters whom a record teaches.
    if settings.selector == "classifier" or settings.draft_source == "lookup":
        return BackgroundSelector(router)
    apart = settings.adapter_scope == "full" and isinstance(drafter, ModelDrafter)
    judge = None if apart else judge_of(drafter, bank)
    if judge is not None:
        return EvidenceSelector(router, judge)
    if apart and "selector" in settings.model_fields_set:
        log.warning(UNCOMPARED)
    return BackgroundSelector(router)


def load(
    target: str = "mini",
    draft: str = "auto",
    home: str | Path | None = None,
    **settings: Any,
) -> Engine:
    """An engine over `target` and `draft` with its experts in `home`.

    Both are named alike: `mini`, `smollm2`, a folder, a GGUF file or a hub id. `settings` are those of
    `moedraft.config.Settings`. Close it, or use it as a context manager: it holds the home's writing lock.
    Raises InvalidRequest, UnsupportedModel or StorageError, one sentence each.
    """
    return build(load_settings(target=target, draft=draft, home=home, **settings), keeps=False).engine


@contextmanager
def opened(settings: Settings, *, keeps: bool = True) -> Iterator[System]:
    """`build`, closed at the end whatever happens."""
    system = build(settings, keeps=keeps)
    try:
        yield system
    finally:
        system.close()
