"""A trainer of its own beside a server: it reads the server's home and hands over what it has learned.

Between the two there is nothing but the home. The server alone writes its database (see `mail`), and goes on
whatever this process does. It may run on another device than the server. Nobody suspends this process, as
the server does with its own trainer: between two batches it waits by itself while the engine is busy.
"""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import ClassVar

from moedraft.config import Settings
from moedraft.distill.assembly import build_loop
from moedraft.distill.claim import learning_for
from moedraft.distill.following.mail import MailLink
from moedraft.distill.link import ServerOutlet
from moedraft.distill.messages import TRAINING, StateReport
from moedraft.distill.pace.governor import read_load, why_wait
from moedraft.distill.process import LOOK_SECONDS, Process
from moedraft.learning_state import LearningState
from moedraft.storage.store import Store

LONGEST_PAUSE = 120.0  # s between two batches, at most, whatever its share
SIGNALS = (signal.SIGTERM, signal.SIGINT)


@dataclass
class FollowingProcess(Process):
    """Runs updates as the server's own trainer does, and keeps to its share of the time by itself."""

    afterwards: ClassVar[str] = "so this process has ended; start it again"

    worked_since: float = field(default_factory=time.monotonic)

    def turn(self) -> None:
        self.worked_since = time.monotonic()  # whatever was waited for before is no work
        super().turn()

    def _between(self, state: LearningState) -> None:
        share = self.settings.train_cpu_share
        if 0 < share < 1:
            began = time.monotonic()
            until = began + min(LONGEST_PAUSE, (began - self.worked_since) * (1 / share - 1))
            while (left := until - time.monotonic()) > 0 and self._is_busy():
                self.link.wait(min(left, LOOK_SECONDS))
            self.loop.waited += time.monotonic() - began
        super()._between(state)
        self.worked_since = time.monotonic()

    def _is_busy(self) -> bool:
        """Whether an engine without a share for learning would have it wait."""
        without = self.settings.model_copy(update={"train_cpu_share": 0.0})
        return why_wait(read_load(self.store.registry), without) is not None


def follow(settings: Settings, tell: Callable[[StateReport], None] = lambda report: None) -> None:
    """Learn for the server of this home until SIGTERM or SIGINT. Call it from the main thread.

    `tell` is called with what it does, at each change and now and then. Raises StorageError where there is
    no home, it needs an upgrade, or another trainer learns for it, and what loading a model raises.
    """
    store = Store.open(settings.home, write=False, replay_capacity=settings.replay_capacity)
    try:
        with learning_for(settings.home):
            shutil.rmtree(settings.home / TRAINING, ignore_errors=True)  # left by a killed trainer
            link = MailLink(settings.home, store.registry, tell)
            with _ended_by_signals(link):
                loop = build_loop(settings, store, ServerOutlet(link, settings.home))
                FollowingProcess(settings, store, loop, link).run()
    except SystemExit:
        return
    finally:
        store.close()


@contextmanager
def _ended_by_signals(link: MailLink) -> Iterator[None]:
    """The first signal ends the process between two batches, a second one at once."""

    def end(number: int, frame: FrameType | None) -> None:
        if link.stop.is_set():
            raise SystemExit(128 + number)
        link.stop.set()

    before = {number: signal.signal(number, end) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
