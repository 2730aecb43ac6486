"""Starts the trainer process, watches it, and publishes what it has learned.

One thread does all of it. A trainer that crashes, hangs or sends lines that are no messages is killed and
started again, after a longer pause each time. Serving never waits for the trainer: while requests are served
its process is suspended, if necessary in the middle of an optimiser step. The supervisor does not know the
engine, which finds new versions in the store.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from moedraft.config import Settings
from moedraft.core import MoedraftError, StorageError
from moedraft.distill.claim import learning_for
from moedraft.distill.messages import (
    TRAINING,
    Asked,
    Begin,
    FromTrainer,
    Learned,
    Message,
    Pause,
    Published,
    Refused,
    Resume,
    StateReport,
)
from moedraft.distill.pace.governor import is_paused, set_paused
from moedraft.learning_state import LearningKind, LearningState
from moedraft.serve.supervisor.child import Child, ChildFailed
from moedraft.serve.supervisor.conversation import Conversation
from moedraft.serve.supervisor.hold import Hold
from moedraft.serve.supervisor.publisher import Publisher
from moedraft.storage.store import Store

COMMAND = (sys.executable, "-m", "moedraft.distill.process")
# With PYTHONSAFEPATH, `-m` imports no modules from the folder in which the server was started.
ENVIRONMENT = {"PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
# seconds between two reads, so that a trainer that writes a lot does not take a whole core here
BREATH = 0.01
LOOK_SECONDS = 0.2
# seconds between two looks while the trainer computes: how soon it notices a request and stops competing
WATCH_SECONDS = 0.02
GRACE = 3.0  # seconds that a trainer gets to end by itself

NOT_STARTED = LearningState(LearningKind.NOT_STARTED)

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainerState:
    """What the trainer last reported, and the state of its process."""

    learning: LearningState = NOT_STARTED
    own: bool = True  # False: the server does not learn; of a trainer that follows it, `pid` and `paused`
    held: bool = False  # suspended during an update, because requests are being served
    paused: bool = False  # by an administrator
    pid: int | None = None  # None: no process runs
    restarts: int = 0
    updates: int = 0  # versions published since the server started
    decisions: Mapping[str, int] = field(default_factory=dict)  # the gate's, counted since the start
    last_error: str | None = None  # the last error, of the process or of an update

    @property
    def trains(self) -> bool:
        """Whether an update is being computed, as opposed to waiting between two of its steps."""
        return self.learning.kind is LearningKind.TRAINING

    def data(self) -> dict[str, Any]:
        """The state as the administrator's routes show it."""
        now = self.learning
        if not self.own:
            return {"enabled": False, "paused": self.paused, "follower": self.pid}
        return {
            "enabled": True,
            "status": now.text,
            "waits": now.waits_for,
            "held": self.held,
            "expert": now.expert,
            "step": now.step,
            "steps": now.steps,
            "loss": now.loss,
            "paused": self.paused,
            "pid": self.pid,
            "restarts": self.restarts,
            "updates": self.updates,
            "decisions": dict(self.decisions),
            "last_error": self.last_error,
        }


class TrainerSupervisor:
    """Keeps one trainer process running, with an open and writable store. Call `start`, later `stop`.

    `base_hash` identifies the draft base that serves; updates made for another one are refused. `busy` tells
    whether requests are being served. `published` is called after each new version. `backoff` is the shortest
    and the longest pause before a restart; the pause is short again once a process has lived for `healthy`
    seconds.
    """

    def __init__(
        self,
        settings: Settings,
        store: Store,
        *,
        base_hash: str | None = None,
        busy: Callable[[], bool] = lambda: False,
        published: Callable[[], None] = lambda: None,
        command: Sequence[str] = COMMAND,
        backoff: tuple[float, float] = (1.0, 60.0),
        healthy: float = 60.0,
    ) -> None:
        self._settings, self._store = settings, store
        self._command, self._backoff, self._healthy = command, backoff, healthy
        self._busy = busy
        self._publisher = Publisher(store, base_hash, published)
        self._hold: Hold | None = None  # of the process that runs
        # for each expert: how many of its updates, one after another, ended with the death of the process
        self._deadly: Counter[str] = Counter()
        self._state = TrainerState(paused=is_paused(store.registry))
        self._lock = threading.Lock()  # protects `_state`
        self._quit = threading.Event()
        self._thread = threading.Thread(target=self._run, name="moedraft-trainer", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the process and the thread; waits for both. A second call does nothing."""
        self._quit.set()
        if self._thread.ident is not None:
            self._thread.join(4 * GRACE)

    def state(self) -> TrainerState:
        return self._state

    def make_way(self) -> None:
        """Suspend the trainer if it computes, because a request has come. Quick, and safe from any thread."""
        if (hold := self._hold) is not None:
            hold.make_way(self._state.trains)

    def pause(self) -> None:
        """Stop learning between two optimiser steps until `resume`, even after a restart of the server.

        Raises StorageError if the store cannot be written; nothing has changed then.
        """
        set_paused(self._store.registry, True)
        self._set(paused=True)

    def resume(self) -> None:
        """Let learning go on. Raises StorageError if the store cannot be written."""
        set_paused(self._store.registry, False)
        self._set(paused=False)

    def _set(self, **changes: object) -> None:
        with self._lock:
            self._state = replace(self._state, **changes)  # type: ignore[arg-type]

    # -- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        delay, longest = self._backoff
        while not self._quit.is_set():
            began = time.monotonic()
            error, tried = self._claimed()
            expert = self._state.learning.expert
            self._deadly.update([expert] if expert else [])
            self._set(pid=None, learning=LearningState(LearningKind.STOPPED), held=False)
            if self._quit.is_set():
                break
            if time.monotonic() - began >= self._healthy:
                delay = self._backoff[0]
            log.warning("The trainer has ended (%s); it is started again in %.0f s.", error, delay)
            again = LearningState(LearningKind.RESTARTING, f"in {delay:.0f} s")
            self._set(learning=again, last_error=error)
            self._quit.wait(delay)
            self._set(restarts=self._state.restarts + tried)
            delay = min(2 * delay, longest)
        self._set(learning=LearningState(LearningKind.STOPPED))

    def _claimed(self) -> tuple[str, bool]:
        """Why the trainer ended, as `_live`, and True; or that another one learns for the home, and False."""
        try:
            with learning_for(self._settings.home):
                return self._live(), True
        except StorageError as error:
            return str(error).removesuffix("."), False

    def _live(self) -> str:
        """Run one trainer process until it ends; returns why it ended."""
        shutil.rmtree(self._settings.home / TRAINING, ignore_errors=True)  # left by a killed trainer
        try:
            child = Child(self._command, {**os.environ, **ENVIRONMENT})
        except OSError as error:
            return f"it cannot be started: {error}"
        self._set(pid=child.process.pid, learning=LearningState(LearningKind.STARTING))
        hold = self._hold = Hold(child, self._busy, self._settings.train_cpu_share)
        grace, fault = GRACE, ""
        try:
            self._talk(child, hold)
        except ChildFailed as error:
            grace, fault = 0.0, str(error)
        except Exception as error:
            log.exception("The trainer's supervisor failed.")
            grace, fault = 0.0, type(error).__name__
        finally:
            hold.end()
            child.close(grace)
        return fault or child.why_ended()

    def _talk(self, child: Child, hold: Hold) -> None:
        """Exchange messages with the child until it has ended or the server stops. Raises ChildFailed."""
        conversation = Conversation(child, self._settings.trainer_timeout)
        paused = self._state.paused
        settings, failures = self._settings.model_dump(mode="json"), dict(self._deadly)
        conversation.send(Begin(settings=settings, paused=paused, failures=failures))
        while not self._quit.is_set():
            in_the_way = self._state.trains and not hold.held
            seconds = WATCH_SECONDS if in_the_way else LOOK_SECONDS
            for message in conversation.hear(seconds, starved=self._busy(), held=hold.held):
                self._answer(conversation, message, hold)
            hold.turn(self._state.trains)
            if hold.held != self._state.held:
                self._set(held=hold.held)
            if paused != self._state.paused:
                paused = self._state.paused
                conversation.send(Pause() if paused else Resume())
            if child.ended and not conversation.heard:
                return
            self._quit.wait(BREATH)

    def _answer(self, conversation: Conversation, message: FromTrainer, hold: Hold) -> None:
        if isinstance(message, StateReport):
            if message.expert is None:
                # no update runs, so the time suspended so far must not be deducted from the next update
                hold.seconds = 0.0
            self._show(message)
            return
        try:
            reply = self._done(message, hold)
        except MoedraftError as error:
            if str(error) != self._state.last_error:
                log.warning("An update of %s was refused: %s", message.expert, error)
            self._set(last_error=str(error))
            reply = Refused(reason=str(error))
        conversation.send(reply)

    def _done(self, message: Asked, hold: Hold) -> Message:
        """Carry out what the trainer asks for and return the reply. Raises MoedraftError if it is refused."""
        if isinstance(message, Learned):
            return self._note(message, hold)
        reply = self._publisher.done(message)
        if isinstance(reply, Published):
            self._set(updates=self._state.updates + len(reply.versions))
        return reply

    def _show(self, report: StateReport) -> None:
        self._set(learning=report.state(), last_error=report.error or self._state.last_error)

    def _note(self, message: Learned, hold: Hold) -> Message:
        # The trainer cannot know for how long it was suspended. An update of several adapters is written down
        # in as many parts, each with its share of the time; what one has no room for, the next bears.
        update = message.update
        held = min(update.seconds, hold.seconds) if update is not None else hold.seconds
        hold.seconds -= held
        if update is not None:
            update = replace(update, seconds=update.seconds - held)
        reply = self._publisher.done(message.model_copy(update={"update": update}))
        if update is not None:
            self._set(last_error=None)
        if update is not None and update.decision is not None:
            self._set(decisions=Counter(self._state.decisions) + Counter([update.decision]))
        self._deadly.pop(message.expert, None)
        return reply
