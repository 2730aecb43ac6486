"""Makes the trainer process give way to everybody else on the machine. Imports only the standard library."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
from contextlib import suppress
from pathlib import Path

FIRST_TO_DIE = b"800"  # oom_score_adj, of 1000: killed among the first when memory runs out
PR_SET_PDEATHSIG = 1

log = logging.getLogger(__name__)


def step_back() -> None:
    """Take the lowest priority, and be killed first when memory runs out or the server dies.

    The server may have suspended this process (SIGSTOP) when it dies, and then nobody is left to wake it.
    Linux kills it then because of the flag set here; elsewhere the system ends a suspended process group
    that has lost its last parent.
    """
    os.nice(19)
    if (prctl := getattr(ctypes.CDLL(None), "prctl", None)) is not None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    try:
        Path("/proc/self/oom_score_adj").write_bytes(FIRST_TO_DIE)
    except OSError:
        log.debug("This system has no oom_score_adj.")


def run_when_idle() -> None:
    """On Linux: run only while nobody else wants the core. A share of a busy core would not be got then."""
    with suppress(AttributeError, OSError):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
