"""Another process that uses a home and dies: `crash_worker.py serve|publish HOME`."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # where pytest finds the modules that tests share

from storage_fakes import candidate, domain, record, stats

from moedraft.storage import AdapterStore, Home, Registry, ReplayBuffer, RequestLog


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
    registry.add_version = lambda version: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
    store.publish(candidate())


if __name__ == "__main__":
    {"serve": serve, "publish": publish}[sys.argv[1]](Home.open(sys.argv[2]))
