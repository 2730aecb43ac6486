"""The server's end of the pipes to the trainer process: reads messages, and notices rubbish and silence."""

from __future__ import annotations

import logging
import time

from pydantic import ValidationError

from moedraft.distill.messages import FromTrainer, Message, from_trainer
from moedraft.serve.supervisor.child import Child, ChildFailed

MAX_RUBBISH = 100  # lines without a valid message, after which a trainer is killed

log = logging.getLogger(__name__)


class Conversation:
    """Messages exchanged as lines with a child. All methods raise ChildFailed if the child cannot go on."""

    def __init__(self, child: Child, timeout: float) -> None:
        self.child = child
        self.timeout = timeout  # seconds without a message, after which the child counts as hanging
        self.heard = 0  # how many lines the last `hear` read
        self._rubbish = 0
        self.excuse()

    def send(self, message: Message) -> None:
        self.child.send(message.line())
        self.excuse()  # the child was perhaps silent only because it waited for this message

    def excuse(self) -> None:
        """Reset the timeout for silence."""
        self._silence = 0.0
        self._looked, self._used = time.monotonic(), self.child.processor_seconds()

    def hear(self, seconds: float, *, starved: bool = False, held: bool = False) -> list[FromTrainer]:
        """The messages that came, after waiting `seconds` at most.

        `starved`: requests take the processor, so silence is counted in the child's own processor time.
        `held`: the child is suspended, and this time does not count as silence. Silence from before still
        counts, or else every request would excuse a child that hangs.
        """
        lines = self.child.read(seconds)
        self.heard = len(lines)
        messages = [message for line in lines if (message := self._understood(line)) is not None]
        looked, used = self._looked, self._used
        self._looked, self._used = time.monotonic(), self.child.processor_seconds()
        if messages:
            self._silence = 0.0
        elif held:
            pass
        elif starved and used is not None and self._used is not None:
            self._silence += min(self._looked - looked, self._used - used)
        else:
            self._silence += self._looked - looked
        if self._silence > self.timeout:
            raise ChildFailed(f"it said nothing for {self.timeout:.0f} s")
        return messages

    def _understood(self, line: bytes) -> FromTrainer | None:
        try:
            return from_trainer.validate_json(line)
        except ValidationError:
            self._rubbish += 1
            if self._rubbish == 1:
                log.warning("The trainer wrote a line of %d bytes that is no message.", len(line))
            if self._rubbish >= MAX_RUBBISH:
                raise ChildFailed("it talks rubbish") from None
            return None
