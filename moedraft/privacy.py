"""Keeps what a process has in its memory out of files that others may read."""

from __future__ import annotations

import ctypes
from contextlib import suppress

try:
    import resource
except ImportError:  # Windows, which writes no core files
    resource = None  # type: ignore[assignment]

PR_SET_DUMPABLE = 4


def write_no_core_file() -> None:
    """Leave no core file where this process dies: it would hold prompts, answers and keys.

    A limit of 0, which child processes inherit, stops the system's own files. On Linux a flag stops those too
    that are piped to a program; other processes of this user can then no longer read this one's memory.
    """
    if resource is not None:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if (prctl := getattr(ctypes.CDLL(None), "prctl", None)) is not None:
        prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
