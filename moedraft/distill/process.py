"""The trainer process: `python -m moedraft.distill.process`, started and watched by the server.

It reads the home, learns when the engine has room, and hands finished updates over in the folder `training`:
the home has one writer, the server. The two speak in lines on stdin and stdout (see `messages`). It ends when
stdin does. Whatever happens to it, serving goes on.
"""

from __future__ import annotations

import ctypes
import logging
import os
import queue
import shutil
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from pydantic import ValidationError
from safetensors import SafetensorError

from moedraft.config import Settings, load_settings
from moedraft.core import AdapterVersion, InvalidRequest, MoedraftError, StorageError, UpdateRecord
from moedraft.distill.build import build_loop
from moedraft.distill.loop import DistillLoop, read_load, why_wait
from moedraft.distill.messages import (
    LONGEST,
    TRAINING,
    Begin,
    FromServer,
    Learned,
    Message,
    Noted,
    Pause,
    Publish,
    Published,
    Refused,
    Resume,
    State,
    from_server,
)
from moedraft.storage.db import storage_errors
from moedraft.storage.store import Store

LOOK_SECONDS = 0.5  # between two looks for something to do
HEARTBEAT = 1.0  # s between two messages at least, while this process is awake
LONGEST_REST = 60.0  # s after updates that failed
GRACE = 2.0  # s to end by itself once the server is gone
FIRST_TO_DIE = b"800"  # of 1000, when memory runs out
PR_SET_PDEATHSIG = 1

log = logging.getLogger(__name__)


class Server:
    """The other end of the pipes. Every call raises SystemExit once the server is gone."""

    def __init__(self, incoming: IO[bytes], outgoing: IO[bytes]) -> None:
        self.gone = threading.Event()
        self.paused = False
        self._incoming, self._outgoing = incoming, outgoing
        self._replies: queue.SimpleQueue[FromServer | None] = queue.SimpleQueue()

    def begin(self) -> Begin:
        """The first line. From then on a thread reads the others."""
        first = self._read()
        if not isinstance(first, Begin):
            raise InvalidRequest("the trainer is started by `moedraft serve`, which sends its settings.")
        self.paused = first.paused
        threading.Thread(target=self._listen, name="moedraft-server", daemon=True).start()
        return first

    def send(self, message: Message) -> None:
        self.check()
        line = message.line()
        try:
            while line:
                line = line[self._outgoing.write(line) :]
        except OSError:
            self.gone.set()
            self.check()

    def ask(self, message: Message) -> FromServer:
        """Send, and wait for the answer. Raises StorageError where it is a refusal."""
        self.send(message)
        reply = self._replies.get()
        if isinstance(reply, Refused):
            raise StorageError(reply.reason)
        if reply is None:
            raise SystemExit(0)
        return reply

    def check(self) -> None:
        if self.gone.is_set():
            raise SystemExit(0)

    def wait(self, seconds: float) -> None:
        self.gone.wait(seconds)
        self.check()

    def _listen(self) -> None:
        while message := self._read():
            if isinstance(message, Pause | Resume):
                self.paused = isinstance(message, Pause)
            else:
                self._replies.put(message)
        self.gone.set()
        self._replies.put(None)

    def _read(self) -> FromServer | None:
        """None at the end, and for what the server cannot have meant."""
        try:
            line = self._incoming.readline()
            return from_server.validate_json(line) if line else None
        except (OSError, ValidationError) as error:
            log.error("The server's message cannot be read: %s", type(error).__name__)
            return None


class ServerOutlet:
    """An `Outlet` that asks the server, which alone writes the home."""

    def __init__(self, server: Server, home: Path) -> None:
        self.server = server
        self.home = home

    def publish(
        self,
        expert: str,
        write: Callable[[Path], None],
        *,
        parent: int,
        base_hash: str,
        acceptance: float | None,
        extra: dict[str, Any],
    ) -> AdapterVersion:
        folder = self.home / TRAINING / uuid.uuid4().hex
        try:
            self._stage(folder, write)
            reply = self.server.ask(
                Publish(
                    folder=folder.name,
                    expert=expert,
                    parent=parent,
                    base_hash=base_hash,
                    acceptance=acceptance,
                    rank=extra["rank"],
                    modules=extra["modules"],
                )
            )
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        assert isinstance(reply, Published)
        return reply.version

    def learned(self, expert: str, last_id: int, update: UpdateRecord | None) -> None:
        reply = self.server.ask(Learned(expert=expert, last_id=last_id, update=update))
        assert isinstance(reply, Noted)

    def _stage(self, folder: Path, write: Callable[[Path], None]) -> None:
        with storage_errors(self.home):
            try:
                folder.mkdir(mode=0o700, parents=True)
                write(folder)
            except SafetensorError as error:
                raise StorageError(f"{folder.parent} takes no new adapter: {error}.") from error


@dataclass
class Process:
    """Runs updates while there is room for them, and says what it does."""

    settings: Settings
    store: Store
    loop: DistillLoop
    server: Server
    said: State | None = None
    said_at: float = 0.0
    failures: int = 0  # in a row

    def run(self) -> None:
        """Until the server is gone, which is a SystemExit."""
        while True:
            self.turn()

    def turn(self) -> None:
        """One update, or one rest."""
        reason = self._why_wait()
        expert = self._due() if reason is None else None
        if expert is None:
            self._say(
                State(status="waiting", waits=reason or self.loop.status[:LONGEST], error=self._error())
            )
            self.server.wait(LOOK_SECONDS)
            return
        self._say(State(status=f"training {expert}", expert=expert, steps=self.settings.update_steps))
        self.loop.run_once(expert, on_step=lambda step, loss: self._between(expert, step, loss))
        self.failures = self.failures + 1 if self.loop.status.startswith("paused") else 0
        if self.failures:
            self._rest(min(LONGEST_REST, 2.0**self.failures))

    def _between(self, expert: str, step: int, loss: float | None) -> None:
        """Between two batches: say how far it is, and wait where the engine needs the machine."""
        steps = self.settings.update_steps
        state = State(status=f"training {expert}", expert=expert, step=step, steps=steps, loss=loss)
        self._say(state)
        began = time.monotonic()
        while reason := self._why_wait():
            self._say(state.model_copy(update={"status": f"yielding in training {expert}", "waits": reason}))
            self.server.wait(LOOK_SECONDS)
            self.loop.waited += time.monotonic() - began
            began = time.monotonic()

    def _rest(self, seconds: float) -> None:
        """After a failure, longer each time."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            self._say(State(status="waiting", waits="the last update failed", error=self._error()))
            self.server.wait(min(left, LOOK_SECONDS))

    def _due(self) -> str | None:
        try:
            expert = self.loop.due()
        except StorageError as error:
            self.loop.status = f"paused: {error}"
            return None
        if expert is None:
            self.loop.status = "waiting for records"
        return expert

    def _why_wait(self) -> str | None:
        self.server.check()
        if self.server.paused:
            return "learning is paused"
        try:
            return why_wait(read_load(self.store.registry), self.settings)
        except StorageError as error:
            return str(error)[:LONGEST]

    def _error(self) -> str | None:
        status = self.loop.status
        return status.removeprefix("paused: ")[:LONGEST] if status.startswith("paused") else None

    def _say(self, state: State) -> None:
        """At once where it is new, else as a heartbeat."""
        now = time.monotonic()
        if state != self.said or now - self.said_at >= HEARTBEAT:
            self.server.send(state)
            self.said, self.said_at = state, now


def work(server: Server) -> None:
    """Everything between the first line and the end of stdin. Raises MoedraftError, SystemExit."""
    begin = server.begin()
    settings = load_settings(**begin.settings)
    server.send(State(status="loading the draft base"))
    store = Store.open(settings.home, write=False)
    try:
        loop = build_loop(settings, store, ServerOutlet(server, settings.home))
        loop.failures |= begin.failures
        Process(settings, store, loop, server).run()
    finally:
        store.close()


def main() -> int:
    server = Server(*_take_pipes())
    step_back()
    threading.Thread(target=_end_with, args=(server,), daemon=True).start()
    try:
        work(server)
    except MoedraftError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def step_back() -> None:
    """The lowest priority, one thread, and the first to go: when memory runs out, or the server is gone.

    The server may have stopped this process when it dies; then nobody would tell it to go on. Linux ends it,
    and elsewhere the system does so as its process group has lost its last parent.
    """
    os.nice(19)
    if (prctl := getattr(ctypes.CDLL(None), "prctl", None)) is not None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    with suppress(AttributeError, OSError):  # Linux: only where nobody else wants the core
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    torch.set_num_threads(1)
    try:
        Path("/proc/self/oom_score_adj").write_bytes(FIRST_TO_DIE)
    except OSError:
        log.debug("This system has no oom_score_adj.")


def _take_pipes() -> tuple[IO[bytes], IO[bytes]]:
    """stdin and stdout for messages alone: whatever else writes to stdout gets stderr."""
    sys.stdout.flush()
    pipes = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    return pipes


def _end_with(server: Server) -> None:
    """A step that takes long must not outlive the server by more than a moment."""
    server.gone.wait()
    time.sleep(GRACE)
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
