"""Where candidates go: an outlet makes one the live version and writes down what an update did.

`HomeOutlet` is for the process that may write the home; a trainer process that only reads it asks the server,
by `ServerOutlet` in `link`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from moedraft.core import AdapterVersion, UpdateRecord
from moedraft.storage.candidate import Candidate, CandidateSummary
from moedraft.storage.changes import check_not_pinned
from moedraft.storage.store import Store

KEEP_VERSIONS = 5  # newest versions of an adapter that stay on disk, besides the live one and its parent


class Outlet(Protocol):
    """Both methods raise StorageError, or another MoedraftError, where the result cannot be taken."""

    def publish(self, candidate: Candidate) -> AdapterVersion:
        """Make the candidate the live version of its expert, whole or not at all."""

    def learned(self, expert: str, last_id: int, update: UpdateRecord | None) -> None:
        """`expert` has used its records up to `last_id`. `update`: what it did; None: it learned nothing."""


class HomeOutlet:
    """Straight into a home that is open for writing; old versions are removed.

    An adapter that a person has pinned is refused, whatever the gate said.
    """

    def __init__(self, store: Store) -> None:
        self.store = store

    def publish(self, candidate: Candidate) -> AdapterVersion:
        check_not_pinned(self.store.registry, candidate.expert)
        return self._pruned(self.store.adapters.publish(candidate))

    def adopt(self, summary: CandidateSummary, staged: Path) -> AdapterVersion:
        """As `publish`, for a candidate whose files another process has written into the folder `staged`."""
        check_not_pinned(self.store.registry, summary.expert)
        return self._pruned(self.store.adapters.adopt(summary, staged))

    def learned(self, expert: str, last_id: int, update: UpdateRecord | None) -> None:
        self.store.registry.set_meta(f"trained:{expert}", str(last_id))
        if update is not None:
            self.store.updates.add(update)

    def _pruned(self, version: AdapterVersion) -> AdapterVersion:
        self.store.adapters.prune(version.domain, KEEP_VERSIONS)
        return version
