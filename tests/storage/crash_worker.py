"""Another process that uses a home and dies: `crash_worker.py serve|publish|joint|joint-row HOME`."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # where pytest finds the modules that tests share

from sqlalchemy import Connection
from storage_fakes import candidate, domain, record, stats

from moedraft.core import SHARED, AdapterVersion
from moedraft.storage import AdapterStore, Home, Registry, ReplayBuffer, RequestLog
from moedraft.storage import registry as registry_module


def serve(home: Home) -> None:
    """Writes, says so, and waits to be killed; ends by itself if nobody does that within a minute."""
    Registry(home).add_domain(domain())
    ReplayBuffer(home, 10).add([record(token=42)])
    RequestLog(home).add([stats()])
    print("written", flush=True)
    signal.alarm(60)
    signal.pause()


def publish(home: Home) -> None:
    """Dies between the renaming of the folder and its row."""
    registry = Registry(home)
    registry.add_domain(domain())
    store = AdapterStore(home, registry)
    registry.add_versions = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
    store.publish(candidate())


def joint(home: Home) -> None:
    """Dies when the folders of a joint update stand, before any of their rows."""
    store, registry = first_joint(home)
    registry.add_versions = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
    store.publish_together([candidate(2.0, 1, SHARED), candidate(2.0, 1)])


def joint_row(home: Home) -> None:
    """Dies within the transaction, after the shared adapter's row and before the expert's."""
    store, _ = first_joint(home)
    insert = registry_module.insert_version

    def insert_one(connection: Connection, version: AdapterVersion) -> None:
        if version.domain != SHARED:
            os.kill(os.getpid(), signal.SIGKILL)
        insert(connection, version)

    registry_module.insert_version = insert_one
    store.publish_together([candidate(2.0, 1, SHARED), candidate(2.0, 1)])


def first_joint(home: Home) -> tuple[AdapterStore, Registry]:
    """A home whose shared adapter and expert are at version 1."""
    registry = Registry(home)
    registry.add_domain(domain())
    store = AdapterStore(home, registry)
    store.publish_together([candidate(1.0, 0, SHARED), candidate(1.0, 0)])
    return store, registry


if __name__ == "__main__":
    {"serve": serve, "publish": publish, "joint": joint, "joint-row": joint_row}[sys.argv[1]](
        Home.open(sys.argv[2])
    )
