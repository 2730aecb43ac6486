"""Carries out what a trainer asks of the server, which alone writes the home."""

from __future__ import annotations

from collections.abc import Callable

from moedraft.core import InvalidRequest
from moedraft.distill.messages import (
    TRAINING,
    Asked,
    Learned,
    Message,
    Noted,
    Publish,
    Published,
    StagedCandidate,
    StandAside,
    Withdraw,
    Withdrawn,
)
from moedraft.distill.outlet import HomeOutlet
from moedraft.storage.store import Store


class Publisher:
    """Publishes, withdraws and notes in an open and writable store.

    `base_hash` identifies the draft base that serves; updates made for another one are refused. `published`
    is called after each change of what serves.
    """

    def __init__(self, store: Store, base_hash: str | None, published: Callable[[], None]) -> None:
        self._store, self._base_hash, self._published = store, base_hash, published
        self._outlet = HomeOutlet(store)

    def done(self, message: Asked) -> Message:
        """Carry out the message and return the reply. Raises MoedraftError if it is refused."""
        if isinstance(message, Learned):
            self._outlet.learned(message.expert, message.last_id, message.update)
            return Noted()
        if isinstance(message, StandAside):
            self._outlet.stand_aside(message.names)
            self._published()
            return Noted()
        return self._withdraw(message) if isinstance(message, Withdraw) else self._publish(message)

    def _publish(self, message: Publish) -> Message:
        """Make trained versions live, all of them or none. Raises MoedraftError if they are refused."""
        staged = [(part.summary(), self._store.home.path / TRAINING / part.folder) for part in message.parts]
        with self._store.home.folder_lock:  # so that nobody promotes or pins between the check and the end
            for part in message.parts:
                self._check(part)
            versions = self._outlet.adopt(staged, message.also())
        self._published()
        return Published(versions=tuple(versions))

    def _withdraw(self, message: Withdraw) -> Message:
        """Go back to the version before. Raises MoedraftError if another one is live, or it is pinned."""
        now = self._outlet.withdraw(message.expert, message.version)
        self._published()
        return Withdrawn(version=now)

    def _check(self, part: StagedCandidate) -> None:
        """Raises InvalidRequest if the candidate's draft base or parent is not the one that serves."""
        if self._base_hash not in (None, part.base_hash):
            raise InvalidRequest(
                "the trainer's draft base is not the one that serves: its files have changed; "
                "start the server again."
            )
        line = self._store.registry.lineage(part.expert, part.base_hash)
        if part.parent != (line[0].version if line else 0):
            raise InvalidRequest(f"the live version of '{part.expert}' was changed meanwhile.")
