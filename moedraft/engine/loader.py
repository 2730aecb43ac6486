"""Live adapter versions come from storage into the engine's bank, beside decoding where it has a thread."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from moedraft import core
from moedraft.core import SHARED, CorruptAdapter, StorageError
from moedraft.drafting.lora import Adapter, ExpertBank, Prepared
from moedraft.memory import return_free_memory
from moedraft.storage.store import Store

POLL_SECONDS = 0.5

log = logging.getLogger(__name__)

Loaded = tuple[int, Prepared]  # of which generation of the registry, and what has changed


class AdapterLoader:
    """Brings the bank in line with the live versions in storage. `refresh` is called between two steps.

    After `load_beside` versions are read, checked and merged in a thread of its own while the engine goes on,
    and put in between two later steps. `close` it then.
    """

    def __init__(self, store: Store, bank: ExpertBank) -> None:
        self.store, self.bank = store, bank
        self.generation = -1
        self.refused: set[tuple[str, int]] = set()
        self._next_poll = 0.0
        self._thread: ThreadPoolExecutor | None = None
        self._job: Future[Loaded | None] | None = None

    def load_beside(self) -> None:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "moedraft-adapters", initializer=torch.get_num_threads)

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)

    def hurry(self) -> None:
        """There is something new: the next `refresh` looks, however soon it comes. For any thread."""
        self._next_poll = 0.0

    def refresh(self, running: Iterable[core.Sequence], *, now: bool = False) -> None:
        """Use what has changed; sequences whose draft cache became stale re-fill it. Never raises.

        now: whatever stands in storage serves when this returns.
        """
        if self._job is not None and (now or self._job.done()):
            job, self._job = self._job, None
            self._use(job.result(), running)
        if self._job is not None or not (now or time.monotonic() >= self._next_poll):
            return
        self._next_poll = time.monotonic() + POLL_SECONDS
        if not self._outdated():
            return
        if self._thread is None or now:
            self._use(self._load(), running)
        else:
            self._job = self._thread.submit(self._load, self.bank.recent)

    def _outdated(self) -> bool:
        try:
            return self.store.registry.generation() != self.generation
        except StorageError as error:
            log.warning("Adapters were not refreshed: %s", error)
            return False

    @torch.inference_mode()
    def _load(self, recent: Sequence[str] = ()) -> Loaded | None:
        """What has changed, ready to be used; None where storage does not say."""
        try:
            generation = self.store.registry.generation()
            changes: dict[str, Adapter | None] = {}
            for name in self._names():
                self._find(name, changes)
        except StorageError as error:
            log.warning("Adapters were not refreshed: %s", error)
            return None
        return generation, self.bank.prepare(changes, recent)

    def _use(self, loaded: Loaded | None, running: Iterable[core.Sequence]) -> None:
        if loaded is None:
            return
        self.generation, prepared = loaded
        stale = self.bank.take(prepared)
        for sequence in running:
            if sequence.expert in stale or SHARED in stale:
                sequence.draft_cached = 0
        if not prepared.changes:
            return
        if self._thread is None:
            return_free_memory()
        else:
            self._thread.submit(return_free_memory)

    def _names(self) -> list[str]:
        registered = [domain.name for domain in self.store.registry.domains()]
        return [SHARED, *registered, *(set(self.bank.experts) - set(registered))]

    def _find(self, name: str, changes: dict[str, Adapter | None]) -> None:
        """The live version of `name` goes into `changes` where the bank has another.

        A version that the bank refuses is rolled back where the home is writable, as a corrupt one is, and
        its nearest ancestor that fits is taken.
        """
        for version in self.store.registry.lineage(name, self.bank.base_hash):
            if (name, version.version) in self.refused:
                continue
            if version.version == self.bank.version(name):
                return
            try:
                found = self.store.adapters.load(version, self.bank.base_hash)
                changes[name] = self.bank.read(version.version, found.config, found.tensors)
            except CorruptAdapter as error:
                log.warning("%s version %d: %s An older version serves.", name, version.version, error)
                self.refused.add((name, version.version))
                self.store.adapters.reject(version)
            except StorageError as error:
                log.warning("%s An older version serves.", error)
            else:
                return
        if self.bank.version(name) > 0:
            changes[name] = None
