"""All stores of one home, opened together."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from moedraft.storage.db import Home
from moedraft.storage.records.replay import ReplayBuffer
from moedraft.storage.registry import Registry
from moedraft.storage.requests import RequestLog
from moedraft.storage.retention.eviction import Policy
from moedraft.storage.updates import UpdateLog
from moedraft.storage.versions.adapters import AdapterStore, check_database_is_there

GENERAL_LIST = "general_list"  # meta key: bits in hex, 1 for each token that its draft base can guess
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

    def close(self) -> None:
        self.home.close()
