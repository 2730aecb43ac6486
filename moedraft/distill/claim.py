"""One trainer at a time learns for a home: the server's own, one that follows it, or `moedraft distill`."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from moedraft.core import StorageError
from moedraft.storage.db import storage_errors

CLAIM = "trainer.lock"  # file of the home, beside the lock of the process that writes it


@contextmanager
def learning_for(home: Path) -> Iterator[None]:
    """Hold the claim on a home that exists. Raises StorageError where another process has it."""
    with storage_errors(home):
        file = os.open(home / CLAIM, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            owner = os.pread(file, 32, 0).decode(errors="replace").strip() or "unknown"
            raise StorageError(
                f"Another trainer (pid {owner}) learns for the home {home}; stop it first, or start its "
                "server with --no-learning."
            ) from error
        with storage_errors(home):
            os.ftruncate(file, 0)
            os.pwrite(file, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(file)
