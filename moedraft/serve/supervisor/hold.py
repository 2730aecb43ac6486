"""Suspends the trainer process while requests are served, so that they have all cores at once.

With a share of a core for learning, the process gets that share of a core's time meanwhile, in short slices.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable

from moedraft.serve.supervisor.child import Child

LONGEST = 60.0  # seconds; then the process runs on, reads the server's load and pauses by itself
# seconds without requests before it runs on, because its work displaces the requests' data in the caches
CALM = 0.25
SLICE = 0.1  # seconds that the process runs at once on its share, about
# signals that Windows does not have
STOP, GO = getattr(signal, "SIGSTOP", None), getattr(signal, "SIGCONT", None)


class Hold:
    """Suspends `child` while `busy()` returns true. All methods may be called from any thread.

    Call `turn` often while the child runs, and `end` before the child is asked to end.
    """

    def __init__(self, child: Child, busy: Callable[[], bool], share: float = 0.0) -> None:
        """share: of a core's time while requests are served, which the child gets all the same."""
        self.child, self.share = child, share
        self._credit, self._credited = 0.0, time.monotonic()  # seconds that it may run now; when that was
        self._used: float | None = None  # seconds of a processor that it had used then, where that is known
        self.seconds = 0.0  # total time suspended; the caller sets it back to 0
        self._busy = busy
        self._lock = threading.Lock()
        self._since: float | None = None
        self._busy_at = -math.inf  # the last time that requests were being served
        # it was already suspended for LONGEST seconds and must not be suspended again until there is a pause
        self._done = False
        self._ended = False

    @property
    def held(self) -> bool:
        return self._since is not None

    def turn(self, works: bool) -> None:
        """Suspend the child if it trains (`works`) while requests are served; resume it otherwise."""
        with self._lock:
            self._turn(works, self._busy())

    def make_way(self, works: bool) -> None:
        """Suspend the child now if it trains, because a request has just arrived."""
        with self._lock:
            self._turn(works, True)

    def end(self) -> None:
        """Resume the child, and never suspend it again."""
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
            self._credit, self._credited, self._used = 0.0, now, None
        elif self.share:
            self._ration(now)
        elif self._since is None:
            if not self._done:
                self._suspend(now)
        elif now - self._since > LONGEST:
            self._release()
            self._done = True

    def _ration(self, now: float) -> None:
        """Let the child run while it has credit; it earns its share of each second, and spends what it uses.

        That is the processor's time, since others want the cores as well; where the system does not tell, it
        is the time for which the child was not suspended. It is resumed once it can run for a slice.
        """
        self._credit = min(5 * SLICE, self._credit + self.share * (now - self._credited) - self._spent(now))
        self._credited = now
        if self._since is None and self._credit <= 0:
            self._suspend(now)
        elif self._since is not None and self._credit >= SLICE:
            self._release()

    def _spent(self, now: float) -> float:
        """Seconds that the child has computed since the last call."""
        used, before = self.child.processor_seconds(), self._used
        if used is None:  # nobody knows, or it is suspended
            return 0.0 if self.held else now - self._credited
        self._used = used
        return 0.0 if before is None else used - before

    def _suspend(self, now: float) -> None:
        if STOP:
            self.child.process.send_signal(STOP)
            self._since = now

    def _release(self) -> None:
        if self._since is not None and GO:
            self.child.process.send_signal(GO)
            self.seconds += time.monotonic() - self._since
            self._since = None
