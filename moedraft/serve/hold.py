"""Stops a process while another has work: the cores are free at once, not when its step is done."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable

from moedraft.serve.child import Child

LONGEST = 60.0  # s; then it goes on, sees the load for itself and waits of its own accord
CALM = 0.25  # s without work before it goes on: it takes the caches with it
STOP, GO = getattr(signal, "SIGSTOP", None), getattr(signal, "SIGCONT", None)  # not on Windows


class Hold:
    """Over `child`, while `busy()`. `turn` it often; `release` it before the child is to end."""

    def __init__(self, child: Child, busy: Callable[[], bool]) -> None:
        self.child = child
        self.seconds = 0.0  # held so far, until somebody sets it back
        self._busy = busy
        self._since: float | None = None
        self._busy_at = -math.inf  # when there was work last
        self._done = False  # held long enough for this time

    @property
    def held(self) -> bool:
        return self._since is not None

    def turn(self, works: bool) -> None:
        """Hold the child if it works while the other does, let it go if not."""
        now = time.monotonic()
        if self._busy():
            self._busy_at = now
        if not (works and STOP) or now - self._busy_at > CALM:
            self.release()
            self._done = False
        elif self._since is None:
            if not self._done:
                self.child.process.send_signal(STOP)
                self._since = now
        elif now - self._since > LONGEST:
            self.release()
            self._done = True

    def release(self) -> None:
        if self._since is not None and GO:
            self.child.process.send_signal(GO)
            self.seconds += time.monotonic() - self._since
            self._since = None
