"""Where candidates go: an outlet makes one the live version and writes down what an update did.

`HomeOutlet` is for the process that may write the home; a trainer process that only reads it asks the server,
by `ServerOutlet` in `link`.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from moedraft.core import AdapterVersion, InvalidRequest, StorageError, UpdateRecord
from moedraft.storage.changes import check_not_pinned, is_pinned
from moedraft.storage.store import Store
from moedraft.storage.versions.candidate import Candidate, CandidateSummary
from moedraft.storage.versions.version_rows import NOTHING_ELSE, Also

log = logging.getLogger(__name__)

KEEP_VERSIONS = 5  # newest versions of an adapter that stay on disk, besides the live one and its parent


class Outlet(Protocol):
    """Takes the results of updates. Its methods raise a MoedraftError, such as StorageError, on failure."""

    def publish(self, candidates: Sequence[Candidate], also: Also = NOTHING_ELSE) -> list[AdapterVersion]:
        """Make the candidates the live versions of their experts, and `also`: all of it at once, or nothing.

        Adapters that a person has pinned or chosen are not left to the base alone. Fails where records were
        purged since the update began.
        """

    def withdraw(self, expert: str, version: int) -> int:
        """Go back from this live version to the one before it, and return which one serves now.

        Experts trained on a shared adapter are rolled back with it. Fails where another version is live.
        """

    def stand_aside(self, names: Collection[str]) -> None:
        """Have the draft base alone draft for these domains, unless they are pinned, and for no others."""

    def learned(self, expert: str, last_id: int, update: UpdateRecord | None) -> None:
        """Note that `expert` has used its records up to `last_id`, and log `update` where there was one."""


class HomeOutlet:
    """Writes straight into a home that is open for writing, and removes old versions.

    An adapter that a person has pinned is refused, whatever the gate said. What a person changes waits until
    a publication is over (`Home.folder_lock`), so that neither overtakes the other.
    """

    def __init__(self, store: Store) -> None:
        self.store = store

    def publish(self, candidates: Sequence[Candidate], also: Also = NOTHING_ELSE) -> list[AdapterVersion]:
        with self.store.home.folder_lock:
            self._check([one.expert for one in candidates], also.untrained)
            return self._pruned(self.store.adapters.publish_together(candidates, self._allowed(also)))

    def adopt(
        self, staged: Sequence[tuple[CandidateSummary, Path]], also: Also = NOTHING_ELSE
    ) -> list[AdapterVersion]:
        """As `publish`, for candidates whose files another process has written into these folders."""
        with self.store.home.folder_lock:
            self._check([summary.expert for summary, _ in staged], also.untrained)
            return self._pruned(self.store.adapters.adopt_together(staged, self._allowed(also)))

    def withdraw(self, expert: str, version: int) -> int:
        with self.store.home.folder_lock:
            self._check([expert], {})
            live = self.store.registry.live(expert)
            if live is None or live.version != version:
                raise InvalidRequest(f"the live version of '{expert}' was changed meanwhile.")
            now = self.store.registry.rollback(expert)
        return 0 if now is None else now.version

    def stand_aside(self, names: Collection[str]) -> None:
        with self.store.home.folder_lock:
            self.store.registry.set_unadapted(self._left_to_us(names))

    def learned(self, expert: str, last_id: int, update: UpdateRecord | None) -> None:
        self.store.registry.set_meta(f"trained:{expert}", str(last_id))
        if update is not None:
            self.store.updates.add(update)

    def _check(self, names: Sequence[str], untrained: Mapping[str, int]) -> None:
        for name in (*names, *untrained):
            check_not_pinned(self.store.registry, name)

    def _allowed(self, also: Also) -> Also:
        if also.unadapted is None:
            return also
        return replace(also, unadapted=self._left_to_us(also.unadapted))

    def _left_to_us(self, names: Collection[str]) -> list[str]:
        """Those of the domains of which no person has pinned or chosen what serves."""
        registry = self.store.registry
        live = {name: registry.live(name) for name in names if not is_pinned(registry, name)}
        return [name for name, one in live.items() if not registry.is_chosen(name, one.version if one else 0)]

    def _pruned(self, versions: list[AdapterVersion]) -> list[AdapterVersion]:
        """Remove old versions. The new ones serve already, so a failure here only leaves files behind."""
        for version in versions:
            try:
                self.store.adapters.prune(version.domain, KEEP_VERSIONS)
            except StorageError as error:
                log.warning("Old versions of %s were not removed: %s", version.domain, error)
        return versions
