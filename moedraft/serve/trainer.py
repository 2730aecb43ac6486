"""Starts the trainer process, watches it, and publishes what it has learned.

One thread does all of it. A trainer that crashes, hangs or talks rubbish is killed and started again, later
each time; serving never waits for it, and while there is something to serve it is held in mid-step. Knows no
engine: results meet it in the store.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import ValidationError

from moedraft.config import Settings
from moedraft.core import AdapterVersion, InvalidRequest, MoedraftError
from moedraft.distill.messages import (
    TRAINING,
    Begin,
    Learned,
    Message,
    Noted,
    Pause,
    Publish,
    Published,
    Refused,
    Resume,
    State,
    from_trainer,
)
from moedraft.distill.publish import HomeOutlet
from moedraft.serve.child import Child, ChildFailed
from moedraft.serve.hold import Hold
from moedraft.storage.adapters import CONFIG, WEIGHTS
from moedraft.storage.store import Store

COMMAND = (sys.executable, "-m", "moedraft.distill.process")
# Nothing of the folder that the server was started in is imported by `-m`.
ENVIRONMENT = {"PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
PAUSED = "learning_paused"  # meta key, there while learning is paused
MAX_RUBBISH = 100  # lines of one trainer that make no sense
BREATH = 0.01  # s between two reads: a trainer that talks all the time gets no whole core of ours
LOOK_SECONDS = 0.2
WATCH_SECONDS = 0.02  # between two looks while it trains: so long it is in the way of a request that comes
GRACE = 3.0  # s for a trainer to end by itself

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainerState:
    """What the trainer does, for people to read."""

    status: str = "not started"
    waits: str | None = None  # why it does not learn just now
    held: bool = False  # in mid-step, while requests are being served
    expert: str | None = None  # whose update is running
    step: int = 0  # optimiser steps done, of `steps`
    steps: int = 0
    loss: float | None = None  # mean over the running update, nats per token
    paused: bool = False
    pid: int | None = None  # None: no process
    restarts: int = 0
    updates: int = 0  # published since the server started
    last_error: str | None = None  # of the process or of an update

    @property
    def trains(self) -> bool:
        """An update is running and does not wait of its own accord."""
        return self.expert is not None and self.waits is None


class TrainerSupervisor:
    """Keeps one trainer process alive over an open, writable store. `start` it, `stop` it.

    `base_hash`: of the draft base that serves; updates of another are refused. `busy`: whether requests are
    being served. `published`: called after each new version. `backoff`: shortest and longest pause before a
    restart; it starts anew after `healthy` seconds of life.
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
        self._settings, self._store, self._base_hash = settings, store, base_hash
        self._command, self._backoff, self._healthy = command, backoff, healthy
        self._busy, self._published = busy, published
        self._outlet = HomeOutlet(store)
        self._hold: Hold | None = None  # of the process that lives
        self._deadly: Counter[str] = Counter()  # experts in whose updates a process ended, in a row
        self._state = TrainerState(paused=store.registry.get_meta(PAUSED) is not None)
        self._lock = threading.Lock()  # of `_state`
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
        """A request has come: a trainer that works is stopped at once. For any thread, and soon done."""
        if (hold := self._hold) is not None:
            hold.make_way(self._state.trains)

    def pause(self) -> None:
        """Learning stops between two optimiser steps until `resume`, a restart of the server included.

        Raises StorageError where that cannot be written down; nothing was changed then.
        """
        self._store.registry.set_meta(PAUSED, "1")
        self._set(paused=True)

    def resume(self) -> None:
        """Raises StorageError as `pause` does."""
        self._store.registry.set_meta(PAUSED, None)
        self._set(paused=False)

    def _set(self, **changes: object) -> None:
        with self._lock:
            self._state = replace(self._state, **changes)  # type: ignore[arg-type]

    # -- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        delay, longest = self._backoff
        while not self._quit.is_set():
            began = time.monotonic()
            error = self._live()
            self._deadly.update([self._state.expert] if self._state.expert else [])
            self._set(pid=None, expert=None, step=0, steps=0, loss=None, waits=None, held=False)
            if self._quit.is_set():
                break
            if time.monotonic() - began >= self._healthy:
                delay = self._backoff[0]
            log.warning("The trainer has ended (%s); it is started again in %.0f s.", error, delay)
            self._set(status=f"starts again in {delay:.0f} s", last_error=error)
            self._quit.wait(delay)
            self._set(restarts=self._state.restarts + 1)
            delay = min(2 * delay, longest)
        self._set(status="stopped")

    def _live(self) -> str:
        """One process from its start to its end; returns why it ended."""
        shutil.rmtree(self._settings.home / TRAINING, ignore_errors=True)  # of one that was killed
        try:
            child = Child(self._command, {**os.environ, **ENVIRONMENT})
        except OSError as error:
            return f"it cannot be started: {error}"
        self._set(pid=child.process.pid, status="starting")
        hold = self._hold = Hold(child, self._busy)
        grace, fault = GRACE, ""
        try:
            self._talk(child, hold)
        except ChildFailed as error:
            grace, fault = 0.0, str(error)
        except Exception as error:
            log.exception("The trainer's supervisor failed.")
            grace, fault = 0.0, f"{type(error).__name__}: {error}"
        finally:
            hold.end()
            child.close(grace)
        return fault or child.why_ended()

    def _talk(self, child: Child, hold: Hold) -> None:
        """Until it has ended or the server stops. Raises ChildFailed."""
        conversation = Conversation(child, self._settings.trainer_timeout)
        paused = self._state.paused
        settings, failures = self._settings.model_dump(mode="json"), dict(self._deadly)
        conversation.send(Begin(settings=settings, paused=paused, failures=failures))
        while not self._quit.is_set():
            in_the_way = self._state.trains and not hold.held
            seconds = WATCH_SECONDS if in_the_way else LOOK_SECONDS
            for message in conversation.hear(seconds, starved=self._busy()):
                self._answer(conversation, message, hold)
            hold.turn(self._state.trains)
            if hold.held:
                conversation.excuse()
            if hold.held != self._state.held:
                self._set(held=hold.held)
            if paused != self._state.paused:
                paused = self._state.paused
                conversation.send(Pause() if paused else Resume())
            if child.ended and not conversation.heard:
                return
            self._quit.wait(BREATH)

    def _answer(self, conversation: Conversation, message: State | Publish | Learned, hold: Hold) -> None:
        if isinstance(message, State):
            if message.expert is None:
                hold.seconds = 0.0  # no update runs, so whatever was held is none of the next one
            self._show(message)
            return
        try:
            reply = self._publish(message) if isinstance(message, Publish) else self._note(message, hold)
        except MoedraftError as error:
            if str(error) != self._state.last_error:
                log.warning("An update of %s was refused: %s", message.expert, error)
            self._set(last_error=str(error))
            reply = Refused(reason=str(error))
        conversation.send(reply)

    def _show(self, state: State) -> None:
        shown = state.model_dump(exclude={"type", "error"})
        self._set(**shown, **({"last_error": state.error} if state.error else {}))

    def _publish(self, message: Publish) -> Message:
        """Raises MoedraftError for what must not become the live version."""
        if self._base_hash not in (None, message.base_hash):
            raise InvalidRequest(
                "the trainer's draft base is not the one that serves: its files have changed; "
                "start the server again."
            )
        line = self._store.registry.lineage(message.expert, message.base_hash)
        if message.parent != (line[0].version if line else 0):
            raise InvalidRequest(f"the live version of '{message.expert}' was changed meanwhile.")
        version: AdapterVersion = self._outlet.publish(
            message.expert,
            moved_from(self._settings.home / TRAINING / message.folder),
            parent=message.parent,
            base_hash=message.base_hash,
            acceptance=message.acceptance,
            extra={"rank": message.rank, "modules": message.modules},
        )
        self._set(updates=self._state.updates + 1)
        self._published()
        return Published(version=version)

    def _note(self, message: Learned, hold: Hold) -> Message:
        update, held = message.update, hold.seconds
        hold.seconds = 0.0
        if update is not None:
            update = replace(update, seconds=max(0.0, update.seconds - held))  # it cannot know of that
        self._outlet.learned(message.expert, message.last_id, update)
        self._deadly.pop(message.expert, None)
        return Noted()


class Conversation:
    """Messages over a child's lines. All methods raise ChildFailed where it cannot go on."""

    def __init__(self, child: Child, timeout: float) -> None:
        self.child = child
        self.timeout = timeout  # s of silence
        self.heard = 0  # lines that came at the last look
        self._rubbish = 0
        self.excuse()

    def send(self, message: Message) -> None:
        self.child.send(message.line())
        self.excuse()  # it had to wait for this

    def excuse(self) -> None:
        """Its silence up to now is none of its own."""
        self._silence = 0.0
        self._looked, self._used = time.monotonic(), self.child.processor_seconds()

    def hear(self, seconds: float, *, starved: bool = False) -> list[State | Publish | Learned]:
        """What has come, after `seconds` at most. `starved`: requests take the cores from it.

        Then its silence is counted in processor time: it is no fault to be slow at the lowest priority.
        """
        lines = self.child.read(seconds)
        self.heard = len(lines)
        messages = [message for line in lines if (message := self._understood(line)) is not None]
        looked, used = self._looked, self._used
        self._looked, self._used = time.monotonic(), self.child.processor_seconds()
        if messages:
            self._silence = 0.0
        elif starved and used is not None and self._used is not None:
            self._silence += min(self._looked - looked, self._used - used)
        else:
            self._silence += self._looked - looked
        if self._silence > self.timeout:
            raise ChildFailed(f"it said nothing for {self.timeout:.0f} s")
        return messages

    def _understood(self, line: bytes) -> State | Publish | Learned | None:
        try:
            return from_trainer.validate_json(line)
        except ValidationError:
            self._rubbish += 1
            if self._rubbish == 1:
                log.warning("The trainer wrote a line of %d bytes that is no message.", len(line))
            if self._rubbish >= MAX_RUBBISH:
                raise ChildFailed("it talks rubbish") from None
            return None


def moved_from(staged: Path) -> Callable[[Path], None]:
    """Moves an adapter's files out of `staged`, which is emptied; whatever else is in there is left."""

    def write(folder: Path) -> None:
        if staged.is_symlink():
            raise InvalidRequest("an update must stand in the home itself.")
        for name in (CONFIG, WEIGHTS):
            (staged / name).rename(folder / name)

    return write
