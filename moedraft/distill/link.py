"""The trainer process's end of the pipes to the server, and the outlet that publishes through a link."""

from __future__ import annotations

import logging
import queue
import shutil
import threading
import uuid
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import IO, Protocol

from pydantic import ValidationError
from safetensors import SafetensorError

from moedraft.core import AdapterVersion, InvalidRequest, StorageError, UpdateRecord
from moedraft.distill.messages import (
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
    StagedCandidate,
    StandAside,
    Withdraw,
    Withdrawn,
    from_server,
)
from moedraft.storage.db import storage_errors
from moedraft.storage.versions.candidate import Candidate, write_files
from moedraft.storage.versions.version_rows import NOTHING_ELSE, Also

log = logging.getLogger(__name__)


class Link(Protocol):
    """Messages to and from the server. Every call raises SystemExit once this process is to end."""

    @property
    def paused(self) -> bool:
        """Whether an administrator has paused learning."""

    def send(self, message: Message) -> None: ...

    def ask(self, message: Message) -> FromServer:
        """Send, and wait for the answer. Raises StorageError where it is a refusal."""

    def check(self) -> None: ...

    def wait(self, seconds: float) -> None: ...


class ServerLink:
    """Messages to and from the server. Every call raises SystemExit once the server is gone.

    A thread reads incoming messages: pauses are kept in `paused`, and everything else is a reply to `ask`.
    """

    def __init__(self, incoming: IO[bytes], outgoing: IO[bytes]) -> None:
        self.gone = threading.Event()
        self.paused = False
        self._incoming, self._outgoing = incoming, outgoing
        self._replies: queue.SimpleQueue[FromServer | None] = queue.SimpleQueue()

    def begin(self) -> Begin:
        """Read the first line; from then on a thread reads the others."""
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
        """The next message; None at the end of the stream and for a line that is no valid message."""
        try:
            line = self._incoming.readline()
            return from_server.validate_json(line) if line else None
        except (OSError, ValidationError) as error:
            log.error("The server's message cannot be read: %s", type(error).__name__)
            return None


class ServerOutlet:
    """An `Outlet` that asks the server, which alone writes the home."""

    def __init__(self, link: Link, home: Path) -> None:
        self.link = link
        self.home = home

    def publish(self, candidates: Sequence[Candidate], also: Also = NOTHING_ELSE) -> list[AdapterVersion]:
        """Writes the files into folders of their own; the server moves them out of these, or refuses them."""
        folders = [self.home / TRAINING / uuid.uuid4().hex for _ in candidates]
        try:
            for candidate, folder in zip(candidates, folders, strict=True):
                self._stage(candidate, folder)
            staged = zip(candidates, folders, strict=True)
            parts = tuple(StagedCandidate.of(candidate, folder.name) for candidate, folder in staged)
            aside = None if also.unadapted is None else tuple(sorted(also.unadapted))
            asked = Publish(parts=parts, untrained=dict(also.untrained), unadapted=aside, purges=also.purges)
            reply = self.link.ask(asked)
            assert isinstance(reply, Published)
            return list(reply.versions)
        finally:
            for folder in folders:
                shutil.rmtree(folder, ignore_errors=True)

    def withdraw(self, expert: str, version: int) -> int:
        reply = self.link.ask(Withdraw(expert=expert, version=version))
        assert isinstance(reply, Withdrawn)
        return reply.version

    def stand_aside(self, names: Collection[str]) -> None:
        reply = self.link.ask(StandAside(names=tuple(sorted(names))))
        assert isinstance(reply, Noted)

    def learned(self, expert: str, last_id: int, update: UpdateRecord | None) -> None:
        reply = self.link.ask(Learned(expert=expert, last_id=last_id, update=update))
        assert isinstance(reply, Noted)

    def _stage(self, candidate: Candidate, folder: Path) -> None:
        with storage_errors(self.home):
            try:
                folder.mkdir(mode=0o700, parents=True)
                write_files(candidate, folder)
            except SafetensorError as error:
                raise StorageError(f"{folder.parent} takes no new adapter: {error}.") from error
