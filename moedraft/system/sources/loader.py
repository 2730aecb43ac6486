"""Brings the live adapter versions from storage into the engine's bank, while the engine goes on decoding."""

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
from moedraft.cpu.threads import compute_alone
from moedraft.drafting.experts.adapter import Adapter
from moedraft.drafting.experts.lora import ExpertBank, Prepared
from moedraft.storage.store import Store

POLL_SECONDS = 0.5  # between two looks at the registry; doubled with every failure in a row
READS = 5  # most times that versions are read anew since they changed meanwhile
DOUBLINGS = 6  # the most doublings: half a minute

log = logging.getLogger(__name__)

# The generation of the registry that was read (None: some version could not be read), and what has changed.
Loaded = tuple[int | None, Prepared]


class AdapterLoader:
    """Brings the bank in line with the live versions in storage. `refresh` is called between two steps.

    After `load_beside` a thread reads, checks and merges versions while the engine goes on, and they are put
    in between two later steps; the owner then has to call `close`. tend_memory: give the memory of replaced
    weights back to the system.
    """

    def __init__(self, store: Store, bank: ExpertBank, *, tend_memory: bool = True) -> None:
        self.store, self.bank, self.tend_memory = store, bank, tend_memory
        self.generation = -1
        self.refused: set[tuple[str, int]] = set()
        self._next_poll = 0.0
        self._failures = 0  # in a row
        self._said: set[str] = set()  # errors logged since these failures began
        self._thread: ThreadPoolExecutor | None = None
        self._job: Future[Loaded] | None = None

    def load_beside(self) -> None:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "moedraft-adapters", initializer=compute_alone)

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)

    def hurry(self) -> None:
        """Have the next `refresh` look at the registry, because there is something new. Thread-safe."""
        self._next_poll = 0.0

    def refresh(self, running: Iterable[core.Sequence], *, now: bool = False) -> None:
        """Use what has changed; never raises. Sequences whose draft cache became stale fill it again.

        If something fails, for example the disk, the versions in use stay and it is tried again later.
        now: wait until the newest stored versions are in use.
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
            self._use(self._load(ahead=not self.bank.names), running)  # at the start nobody waits
        else:
            self._job = self._thread.submit(self._load, self.bank.recent, ahead=True)

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
        """Log an error the first time; repetitions are left out until loading has succeeded again."""
        what = f"{what} ({type(error).__name__})"
        if what not in self._said:
            self._said.add(what)
            known = isinstance(error, StorageError)
            log.warning("%s; it is tried again: %s", what, error, exc_info=None if known else error)

    @torch.inference_mode()
    def _load(self, recent: Sequence[str] = (), *, ahead: bool = False) -> Loaded:
        """Read and prepare the versions that have changed.

        Adapters that were published together are taken together: where something was published meanwhile,
        all is read again.
        """
        for _ in range(READS):
            generation = self.store.registry.generation()
            changes: dict[str, Adapter | None] = {}
            found = [self._find(name, changes) for name in self._names()]
            unadapted = self.store.registry.unadapted()
            if self.store.registry.generation() == generation:
                break
        prepared = self.bank.prepare(changes, recent, unadapted, ahead=ahead)
        return generation if all(found) else None, prepared

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
        registered = [name for name, _ in self.store.registry.domain_names()]
        return [SHARED, *registered, *(set(self.bank.names) - set(registered))]

    def _find(self, name: str, changes: dict[str, Adapter | None]) -> bool:
        """Put the live version of `name` into `changes` if the bank has another one.

        A version that is corrupt or does not fit is rolled back if the home is writable, and its nearest
        ancestor that fits is taken. The same ancestor serves for a version that cannot be read at the moment;
        then the result is False, so that it is tried again.
        """
        readable = True
        for version in self.store.registry.lineage(name, self.bank.base_hash):
            if (name, version.version) in self.refused:
                continue
            if version.version == self.bank.held(name):
                return readable
            try:
                changes[name] = self._read(version)
            except CorruptAdapter as error:
                log.warning(
                    "%s version %d: %s An older one serves, or no adapter.", name, version.version, error
                )
                self.refused.add((name, version.version))
                self.store.adapters.reject(version)
            except Exception as error:
                self._say(f"{name} version {version.version} could not be read", error)
                readable = False
            else:
                return readable
        if self.bank.held(name) > 0:
            changes[name] = None
        return readable

    def _read(self, version: AdapterVersion) -> Adapter:
        """Read and check a version. Raises CorruptAdapter where it does not fit, and StorageError."""
        found = self.store.adapters.load(version, self.bank.base_hash)
        return self.bank.read(version.version, found.config, found.tensors, found.vocabulary)
