"""Answers the letters of a trainer that follows this server (`moedraft distill --follow`)."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

from moedraft.core import MoedraftError
from moedraft.distill.following.mail import answer, letters
from moedraft.distill.messages import Asked, Message, Refused
from moedraft.serve.supervisor.publisher import Publisher

LOOK_SECONDS = 0.2

log = logging.getLogger(__name__)


class Mailroom:
    """A thread that looks for letters in the home. Call `start`, later `stop`, which waits for its end."""

    def __init__(self, home: Path, publisher: Publisher) -> None:
        self._home, self._publisher = home, publisher
        self._quit = threading.Event()
        self._said: dict[str, Message] = {}  # replies that could not be written yet, by the letter's name
        self._thread = threading.Thread(target=self._run, name="moedraft-mail", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._quit.set()
        if self._thread.ident is not None:
            self._thread.join()

    def look(self) -> None:
        """Answer every letter that is there, and carry out none twice. Raises OSError."""
        for letter, message in letters(self._home):
            if letter.name not in self._said:
                self._said[letter.name] = self._reply(message)
            answer(letter, self._said[letter.name])
            del self._said[letter.name]

    def _run(self) -> None:
        said = ""
        while not self._quit.wait(LOOK_SECONDS):
            try:
                self.look()
                said = ""
            except Exception as error:  # whatever goes wrong here, serving goes on
                if str(error) != said:
                    log.exception("A trainer's letter could not be answered.")
                said = str(error)

    def _reply(self, message: Asked | None) -> Message:
        if message is None:
            return Refused(reason="the server does not understand this letter.")
        try:
            return self._publisher.done(message)
        except MoedraftError as error:
            log.warning("An update of %s was refused: %s", message.expert, error)
            return Refused(reason=str(error))
