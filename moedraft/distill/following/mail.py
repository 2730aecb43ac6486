"""Letters between a server and a trainer that is not its child: files in the home, and nothing else.

A trainer that follows a server asks in `training/mail/<id>.ask`; the server, which alone writes the home,
answers in `<id>.reply`. Files are written under another name and renamed, so nobody reads half a letter. A
letter that the server did not answer before it ended is answered by the next one.
"""

from __future__ import annotations

import math
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from pydantic import ValidationError

from moedraft.core import StorageError
from moedraft.distill.messages import (
    TRAINING,
    Asked,
    FromServer,
    Message,
    Refused,
    StateReport,
    from_server,
    from_trainer,
)
from moedraft.distill.pace.governor import is_paused
from moedraft.learning_state import waiting
from moedraft.storage.db import storage_errors
from moedraft.storage.registry import Registry

MAIL = "mail"  # folder in `training/`
ASK, REPLY = ".ask", ".reply"
LOOK_SECONDS = 0.1  # between two looks for a reply
LONGEST = 2**20  # bytes of a letter
PATIENCE = 10.0  # seconds without a reply after which people are told that there is none
GRACE = 2.0  # seconds that an answer may take once this process is to end: what is published is noted, too


def mail_of(home: Path) -> Path:
    return home / TRAINING / MAIL


class MailLink:
    """A `Link` of a process that follows a server; set `stop` to end it at the next call."""

    def __init__(self, home: Path, registry: Registry, tell: Callable[[StateReport], None]) -> None:
        """tell: is called with each report, which the server does not need."""
        self.stop = threading.Event()
        self._home, self._folder, self._registry, self._tell = home, mail_of(home), registry, tell

    @property
    def paused(self) -> bool:
        """Raises StorageError."""
        return is_paused(self._registry)

    def send(self, message: Message) -> None:
        self.check()
        if isinstance(message, StateReport):
            self._tell(message)

    def ask(self, message: Message) -> FromServer:
        letter = self._folder / f"{uuid.uuid4().hex}{ASK}"
        answer = letter.with_suffix(REPLY)
        try:
            with storage_errors(self._home):
                self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                _put(letter, message)
            self._wait_for(answer)
            reply = _read_reply(answer)
        finally:
            for file in (letter, answer):
                file.unlink(missing_ok=True)
        if isinstance(reply, Refused):
            raise StorageError(reply.reason)
        return reply

    def _wait_for(self, answer: Path) -> None:
        left, began = GRACE, time.monotonic()
        while not answer.exists():
            if time.monotonic() - began > PATIENCE:
                self._tell(StateReport.of(waiting("the server does not answer")))
                began = math.inf
            if self.stop.is_set():
                time.sleep(LOOK_SECONDS)
                left -= LOOK_SECONDS
                if left <= 0:
                    self.check()
            self.stop.wait(LOOK_SECONDS)

    def check(self) -> None:
        if self.stop.is_set():
            raise SystemExit(0)

    def wait(self, seconds: float) -> None:
        self.stop.wait(seconds)
        self.check()


def letters(home: Path) -> Iterator[tuple[Path, Asked | None]]:
    """The letters that wait for an answer, the oldest first; None for what cannot be understood."""
    with suppress(FileNotFoundError):
        for path in sorted(mail_of(home).glob(f"*{ASK}"), key=lambda one: one.stat().st_mtime):
            yield path, _understood(path)


def answer(letter: Path, reply: Message) -> None:
    """Put the reply beside the letter, which is taken away. Raises OSError."""
    if letter.exists():  # else nobody waits for it any more
        _put(letter.with_suffix(REPLY), reply)
        letter.unlink(missing_ok=True)


def _understood(path: Path) -> Asked | None:
    try:
        text = path.read_bytes() if path.stat().st_size <= LONGEST else b""
        message = from_trainer.validate_json(text)
    except (OSError, ValidationError):
        return None
    return None if isinstance(message, StateReport) else message


def _read_reply(path: Path) -> FromServer:
    try:
        return from_server.validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        raise StorageError(f"The server's answer in {path} cannot be read.") from error


def _put(path: Path, message: Message) -> None:
    scratch = path.with_suffix(".tmp")
    scratch.write_bytes(message.line())
    os.replace(scratch, path)
