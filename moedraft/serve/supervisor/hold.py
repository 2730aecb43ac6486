"""Stops a process while another has work: the cores are free at once, not when its step is done."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable

from moedraft.serve.supervisor.child import Child

LONGEST = 60.0  # s; then it goes on, sees the load for itself and waits of its own accord
CALM = 0.25  # s without work before it goes on: it takes the caches with it
STOP, GO = getattr(signal, "SIGSTOP", None), getattr(signal, "SIGCONT", None)  # not on Windows


class Hold:
    """Over `child`, while `busy()`. `turn` it often; `end` it before the child is to end. For any thread."""

    def __init__(self, child: Child, busy: Callable[[], bool]) -> None:
        self.child = child
        self.seconds = 0.0  # held so far, until somebody sets it back
        self._busy = busy
        self._lock = threading.Lock()
        self._since: float | None = None
        self._busy_at = -math.inf  # when there was work last
        self._done = False  # held long enough for this time
        self._ended = False

    @property
    def held(self) -> bool:
        return self._since is not None

    def turn(self, works: bool) -> None:
        """Hold the child if it works while the other does, let it go if not."""
        with self._lock:
            self._turn(works, self._busy())

    def make_way(self, works: bool) -> None:
        """The other begins to work right now."""
        with self._lock:
            self._turn(works, True)

    def end(self) -> None:
        """Let the child go, and never hold it again."""
        with self._lock:
            self._ended = True
            self._release()

    def _turn(self, works: bool, busy: bool) -> None:
        now = time.monotonic()
        if busy:
            self._busy_at = now
        if not (works and STOP) or self._ended or now - self._busy_at > CALM:
            self._release()
            self._done = False
        elif self._since is None:
            if not self._done:
                self.child.process.send_signal(STOP)
                self._since = now
        elif now - self._since > LONGEST:
            self._release()
            self._done = True

    def _release(self) -> None:
        if self._since is not None and GO:
            self.child.process.send_signal(GO)
            self.seconds += time.monotonic() - self._since
            self._since = None
