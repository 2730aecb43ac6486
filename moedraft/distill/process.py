"""The trainer process: `python -m moedraft.distill.process`, started and watched by the server.

It reads the home, learns when the engine has room, and hands finished candidates over to the server, which
alone writes the home's database and versions. The two exchange lines on stdin and stdout (see `messages`).
The process ends when its stdin does. Whatever happens to it, serving goes on.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from dataclasses import dataclass, replace
from typing import IO, ClassVar

import torch

from moedraft.config import Settings, load_settings
from moedraft.core import MoedraftError, StorageError
from moedraft.distill.assembly import build_loop
from moedraft.distill.background import run_when_idle, step_back
from moedraft.distill.link import Link, ServerLink, ServerOutlet
from moedraft.distill.loop import DistillLoop
from moedraft.distill.messages import StateReport
from moedraft.distill.pace.governor import read_load, why_wait
from moedraft.learning_state import LearningKind, LearningState, paused, waiting
from moedraft.privacy import write_no_core_file
from moedraft.storage.records import trainer_file
from moedraft.storage.store import Store

LOOK_SECONDS = 0.5  # between two looks for something to do
HEARTBEAT = 1.0  # s after which an unchanged report is sent again, while this process is awake
LONGEST_REST = 60.0  # s, the longest pause after failed updates
# In the reason for which an update failed: memory was refused, by Python, PyTorch, CUDA, or the C++ library.
NO_MEMORY = ("MemoryError", "OutOfMemoryError", "can't allocate memory", "bad_alloc")
GRACE = 2.0  # s to end by itself once the server is gone

log = logging.getLogger(__name__)


class OutOfMemory(MoedraftError):
    """This process can get no more memory; a new one begins with little."""


@dataclass
class Process:
    """Runs updates while there is room for them, and says what it does."""

    afterwards: ClassVar[str] = "a new process will try again"  # once this one has ended without memory

    settings: Settings
    store: Store
    loop: DistillLoop
    link: Link
    said: StateReport | None = None
    said_at: float = 0.0
    failures: int = 0  # in a row

    def run(self) -> None:
        """Take turns until the server is gone, which raises SystemExit."""
        try:
            while True:
                self.turn()
        except SystemExit:
            self.loop.end()
            raise

    def turn(self) -> None:
        """Run one update if one is due and the engine leaves room for it; otherwise wait for a moment."""
        reason = self._why_wait()
        self._forget_purged()
        expert = self._due() if reason is None else None
        if expert is None and reason is None:
            self.loop.tend(lambda *_: self._between(LearningState(LearningKind.TRAINING)))
        if expert is None:
            self._say(waiting(reason or self.loop.state.reason), self._error())
            self.link.wait(LOOK_SECONDS)
            return
        self._say(self._training(expert))
        self.loop.run_once(expert, on_step=lambda *at: self._between(self._training(expert, *at)))
        self.failures = self.failures + 1 if self.loop.state.is_paused else 0
        if self.failures:
            self._check_memory()
            self._rest(min(LONGEST_REST, 2.0**self.failures))

    def _check_memory(self) -> None:
        """Raises OutOfMemory where that is why the last update failed."""
        if any(words in self.loop.last_fault for words in NO_MEMORY):
            trainer_file.remove(self.store.home.path)  # else a new process would begin with as much
            raise OutOfMemory(f"An update found no memory; {self.afterwards}.")

    def _between(self, state: LearningState) -> None:
        """Between two batches: say how far it is, and wait while the engine needs the machine."""
        self._say(state)
        began = time.monotonic()
        while reason := self._why_wait():
            self._say(replace(state, kind=LearningKind.YIELDING, reason=reason))
            self.link.wait(LOOK_SECONDS)
            self.loop.waited += time.monotonic() - began
            began = time.monotonic()

    def _training(self, expert: str, step: int = 0, loss: float | None = None) -> LearningState:
        steps = self.settings.update_steps
        return LearningState(LearningKind.TRAINING, expert=expert, step=step, steps=steps, loss=loss)

    def _rest(self, seconds: float) -> None:
        """Wait for so long after a failed update, and send heartbeats meanwhile."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            self._say(waiting("the last update failed"), self._error())
            self.link.wait(min(left, LOOK_SECONDS))

    def _forget_purged(self) -> None:
        """Forget records that were purged, whether or not anything may be learned now."""
        try:
            self.loop.forget_purged()
        except StorageError as error:
            self.loop.state = paused(str(error))

    def _due(self) -> str | None:
        """The adapter to train now; where it is None, `loop.state` says why."""
        try:
            expert = self.loop.due()
            if expert is None:
                self.loop.state = waiting(self.loop.held_up() or self.loop.waits())
        except StorageError as error:
            self.loop.state = paused(str(error))
            return None
        return expert

    def _why_wait(self) -> str | None:
        self.link.check()
        try:
            if self.link.paused:
                return "learning is paused"
            return why_wait(read_load(self.store.registry), self.settings)
        except StorageError as error:
            return str(error)

    def _error(self) -> str | None:
        """The error of the last update, or None."""
        return self.loop.state.reason if self.loop.state.is_paused else None

    def _say(self, state: LearningState, error: str | None = None) -> None:
        """Send a report: at once where it is new, and otherwise as a heartbeat now and then."""
        report, now = StateReport.of(state, error), time.monotonic()
        if report != self.said or now - self.said_at >= HEARTBEAT:
            self.link.send(report)
            self.said, self.said_at = report, now


def work(link: ServerLink) -> None:
    """Begin with the server's first message, and learn until stdin ends. Raises MoedraftError, SystemExit."""
    begin = link.begin()
    settings = load_settings(**begin.settings)
    if not settings.train_cpu_share:
        run_when_idle()
    link.send(StateReport.of(LearningState(LearningKind.LOADING)))
    store = Store.open(settings.home, write=False, replay_capacity=settings.replay_capacity)
    try:
        if begin.failures:  # the last process died: this one begins with little in memory
            trainer_file.remove(settings.home)
        loop = build_loop(settings, store, ServerOutlet(link, settings.home))
        loop.failures |= begin.failures
        Process(settings, store, loop, link).run()
    finally:
        store.close()


def main() -> int:
    link = ServerLink(*_take_pipes())
    step_back()
    write_no_core_file()  # after step_back: once this is called, no file of /proc/self may be written
    torch.set_num_threads(1)
    threading.Thread(target=_end_with, args=(link,), daemon=True).start()
    try:
        work(link)
    except MoedraftError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _take_pipes() -> tuple[IO[bytes], IO[bytes]]:
    """Keep stdin and stdout for messages: what libraries print goes to stderr from now on."""
    sys.stdout.flush()
    pipes = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    return pipes


def _end_with(link: ServerLink) -> None:
    """End the process soon after the server, even in the middle of a long optimiser step."""
    link.gone.wait()
    time.sleep(GRACE)
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
