"""All stores of one home, opened together."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from moedraft.core import SHARED
from moedraft.storage.adapters import AdapterStore, check_database_is_there
from moedraft.storage.db import Home
from moedraft.storage.records.replay import Policy, ReplayBuffer
from moedraft.storage.registry import Registry
from moedraft.storage.requests import RequestLog
from moedraft.storage.updates import UpdateLog

GENERAL_LIST = "general_list"  # meta key: bits in hex, 1 for each token that its draft base can guess
TAUGHT = 4  # records of a domain from which on what was learned of others does no harm there
TARGET_ID = "target_id"  # meta key: hash of the target that the home was last opened with


@dataclass(frozen=True)
class Store:
    """A home with its parts. `open` raises what `Home.open` raises; nothing stays open then."""

    home: Home
    registry: Registry
    adapters: AdapterStore
    replay: ReplayBuffer
    requests: RequestLog
    updates: UpdateLog

    @classmethod
    def open(
        cls,
        path: Path,
        *,
        write: bool = True,
        replay_capacity: int = 2000,
        replay_policy: Policy = "fifo",
        states_bytes: int = 0,
    ) -> Store:
        check_database_is_there(path.expanduser())
        home = Home.open(path, write=write)
        try:
            registry = Registry(home)
            return cls(
                home,
                registry,
                AdapterStore(home, registry),
                ReplayBuffer(home, replay_capacity, replay_policy, states_bytes=states_bytes),
                RequestLog(home),
                UpdateLog(home),
            )
        except BaseException:
            home.close()
            raise

    def left_to_base(self) -> frozenset[str]:
        """The domains for which the draft base alone drafts.

        Those for which adapters do worse, as the gate has found, and those of which nothing was learned yet,
        which have no version and fewer than TAUGHT records: there the shared adapter knows other domains only
        (docs/experiments.md, "Before anything was learned of a domain"). The latter with feature drafters
        only, whose lists of tokens are noted; an independent draft does not lose by it.
        """
        registry = self.registry
        if registry.live(SHARED) is None or registry.get_meta(GENERAL_LIST) is None:
            return registry.unadapted()
        kept = self.replay.sizes()
        few = (name for name, _ in registry.domain_names() if kept.get(name, 0) < TAUGHT)
        return registry.unadapted() | {name for name in few if registry.live(name) is None}

    def close(self) -> None:
        self.home.close()
