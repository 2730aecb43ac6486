"""One trainer at a time learns for a home: the server's own, one that follows it, or `moedraft distill`."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from moedraft.core import StorageError
from moedraft.storage.db import storage_errors

CLAIM = "trainer.lock"  # file of the home, beside the lock of the process that writes it
LOOKS = 5  # at a claim that is taken: somebody may only have asked who has it, see `learner`
LOOK_SECONDS = 0.02


@contextmanager
def learning_for(home: Path) -> Iterator[None]:
    """Hold the claim on a home that exists. Raises StorageError where another process has it."""
    with storage_errors(home):
        file = os.open(home / CLAIM, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        if not _taken(file):
            raise StorageError(
                f"Another trainer (pid {_owner(file) or 'unknown'}) learns for the home {home}; "
                "stop it first, or start its server with --no-learning."
            )
        with storage_errors(home):
            os.ftruncate(file, 0)
            os.pwrite(file, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(file)


def learner(home: Path) -> int | None:
    """The pid of the process that learns for a home; 0 where it is unknown, None where there is none."""
    with suppress(OSError):
        file = os.open(home / CLAIM, os.O_RDONLY)
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return _owner(file)
        finally:
            os.close(file)
    return None


def _taken(file: int) -> bool:
    for _ in range(LOOKS):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            time.sleep(LOOK_SECONDS)
    return False


def _owner(file: int) -> int:
    written = os.pread(file, 32, 0).decode(errors="replace").strip()
    return int(written) if written.isascii() and written.isdigit() else 0
