"""What becomes of an update: its files the live version, its figures a row, what it has read a note.

The process that writes the home does it itself, by `HomeOutlet`; one that only reads it has to ask (see
`process`).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from moedraft.core import AdapterVersion, UpdateRecord
from moedraft.storage.store import Store

KEEP_VERSIONS = 5  # newest versions of an adapter that stay on disk, besides the live one and its parent


class Outlet(Protocol):
    """Where a trainer's results go. Both methods raise StorageError where they cannot be stored."""

    def publish(
        self,
        expert: str,
        write: Callable[[Path], None],
        *,
        parent: int,
        base_hash: str,
        acceptance: float | None,
        extra: dict[str, Any],
    ) -> AdapterVersion:
        """Make what `write(folder)` leaves the live version, as `AdapterStore.publish` does; old ones go."""

    def learned(self, expert: str, last_id: int, update: UpdateRecord | None) -> None:
        """`expert` has used its records up to `last_id`; None: they were not fit to learn from."""


class HomeOutlet:
    """Straight into a home that is open for writing."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def publish(
        self,
        expert: str,
        write: Callable[[Path], None],
        *,
        parent: int,
        base_hash: str,
        acceptance: float | None,
        extra: dict[str, Any],
    ) -> AdapterVersion:
        version = self.store.adapters.publish(
            expert, write, parent=parent, base_hash=base_hash, acceptance=acceptance, extra=extra
        )
        self.store.adapters.prune(expert, KEEP_VERSIONS)
        return version

    def learned(self, expert: str, last_id: int, update: UpdateRecord | None) -> None:
        self.store.registry.set_meta(f"trained:{expert}", str(last_id))
        if update is not None:
            self.store.updates.add(update)
