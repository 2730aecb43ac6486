"""Live adapter versions come from storage into the engine's bank, beside decoding where it has a thread."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import torch

from moedraft import core
from moedraft.core import SHARED, AdapterVersion, CorruptAdapter, StorageError
from moedraft.cpu.memory import return_free_memory
from moedraft.drafting.adapter import Adapter
from moedraft.drafting.lora import ExpertBank, Prepared
from moedraft.storage.store import Store

POLL_SECONDS = 0.5  # doubled with every failure in a row,
DOUBLINGS = 6  # at most so often: half a minute

log = logging.getLogger(__name__)

# Of which generation of the registry (None: not all of it could be read), and what has changed.
Loaded = tuple[int | None, Prepared]


class AdapterLoader:
    """Brings the bank in line with the live versions in storage. `refresh` is called between two steps.

    After `load_beside` versions are read, checked and merged in a thread of its own while the engine goes on,
    and put in between two later steps. `close` it then. tend_memory: give the memory of replaced weights back
    to the system.
    """

    def __init__(self, store: Store, bank: ExpertBank, *, tend_memory: bool = True) -> None:
        self.store, self.bank, self.tend_memory = store, bank, tend_memory
        self.generation = -1
        self.refused: set[tuple[str, int]] = set()
        self._next_poll = 0.0
        self._failures = 0  # in a row
        self._said: set[str] = set()  # since they began
        self._thread: ThreadPoolExecutor | None = None
        self._job: Future[Loaded] | None = None

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

        Where something fails, the disk, memory or the code, what is in use stays, and it is tried again.
        now: whatever stands in storage serves when this returns.
        """
        if self._job is not None and (now or self._job.done()):
            job, self._job = self._job, None
            with self._trying():
                self._use(job.result(), running)
        if self._job is None and (now or time.monotonic() >= self._next_poll):
            with self._trying():
                self._look(running, now)

    def _look(self, running: Iterable[core.Sequence], now: bool) -> None:
        self._next_poll = time.monotonic() + POLL_SECONDS * 2 ** min(self._failures, DOUBLINGS)
        if self.store.registry.generation() == self.generation:
            self._succeed()
        elif self._thread is None or now:
            self._use(self._load(), running)
        else:
            self._job = self._thread.submit(self._load, self.bank.recent)

    @contextmanager
    def _trying(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._failures += 1
            self._say("Adapters were not refreshed", error)

    def _succeed(self) -> None:
        if self._failures:
            self._failures, self._next_poll = 0, 0.0
            self._said.clear()

    def _say(self, what: str, error: Exception) -> None:
        """Once, however often it happens again."""
        what = f"{what} ({type(error).__name__})"
        if what not in self._said:
            self._said.add(what)
            known = isinstance(error, StorageError)
            log.warning("%s; it is tried again: %s", what, error, exc_info=None if known else error)

    @torch.inference_mode()
    def _load(self, recent: Sequence[str] = ()) -> Loaded:
        """What has changed, ready to be used."""
        generation = self.store.registry.generation()
        changes: dict[str, Adapter | None] = {}
        found = [self._find(name, changes) for name in self._names()]
        return generation if all(found) else None, self.bank.prepare(changes, recent)

    def _use(self, loaded: Loaded, running: Iterable[core.Sequence]) -> None:
        generation, prepared = loaded
        stale = self.bank.take(prepared)
        for sequence in running:
            if sequence.expert in stale or SHARED in stale:
                sequence.draft_cached = 0
        if generation is None:
            self._failures += 1
        else:
            self.generation = generation
            self._succeed()
        if not (prepared.changes and self.tend_memory):
            return
        if self._thread is None:
            return_free_memory()
        else:
            self._thread.submit(return_free_memory)

    def _names(self) -> list[str]:
        registered = [domain.name for domain in self.store.registry.domains()]
        return [SHARED, *registered, *(set(self.bank.experts) - set(registered))]

    def _find(self, name: str, changes: dict[str, Adapter | None]) -> bool:
        """The live version of `name` goes into `changes` where the bank has another.

        A version that the bank refuses is rolled back where the home is writable, as a corrupt one is, and
        its nearest ancestor that fits is taken. So it is for one that cannot be read now; False then.
        """
        readable = True
        for version in self.store.registry.lineage(name, self.bank.base_hash):
            if (name, version.version) in self.refused:
                continue
            if version.version == self.bank.version(name):
                return readable
            try:
                changes[name] = self._read(version)
            except CorruptAdapter as error:
                log.warning("%s version %d: %s An older version serves.", name, version.version, error)
                self.refused.add((name, version.version))
                self.store.adapters.reject(version)
            except Exception as error:
                self._say(f"{name} version {version.version} could not be read", error)
                readable = False
            else:
                return readable
        if self.bank.version(name) > 0:
            changes[name] = None
        return readable

    def _read(self, version: AdapterVersion) -> Adapter:
        """Raises CorruptAdapter where it does not fit, and StorageError."""
        found = self.store.adapters.load(version, self.bank.base_hash)
        return self.bank.read(version.version, found.config, found.tensors, found.vocabulary)
