"""Keeps the earlier answers that lookup searches those that the home may keep."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator
from itertools import zip_longest

from moedraft.core import Sequence, StorageError
from moedraft.drafting.lookup.past_answers import PastAnswers
from moedraft.storage.store import Store

POLL_SECONDS = 0.5  # between two looks at whether something was purged
RECORDS = 1024  # of each domain, that are read at the start at most

log = logging.getLogger(__name__)


class PastAnswersKeeper:
    """An engine sink that adds each answer whose record is kept for learning.

    At the start, and after each purge, they are read from the replay buffers: what was purged guesses nothing
    any more. `refresh` is called between two steps.
    """

    def __init__(self, store: Store, past: PastAnswers, target_id: str) -> None:
        self.store, self.past, self.target_id = store, past, target_id
        self._purges: int | None = None  # of the registry, when all was read; None: it was not
        self._next_poll = 0.0

    def __call__(self, sequence: Sequence) -> None:
        if sequence.counted and sequence.captured and sequence.finish_reason in ("stop", "length"):
            self.past.add(sequence.domain, sequence.generated)

    def refresh(self, running: Iterable[Sequence], *, now: bool = False) -> None:
        """Read all anew where something was purged since. Never raises: it is tried again later."""
        if not self.past.most or (time.monotonic() < self._next_poll and not now):
            return
        self._next_poll = time.monotonic() + POLL_SECONDS
        try:
            if (purges := self.store.registry.purges()) != self._purges:
                self._purges = None
                self.past.replace(())  # whatever happens next
                self.past.replace(self._read())
                self._purges = purges
        except StorageError as error:
            log.debug("Earlier answers are not searched now: %s", error)

    def _read(self) -> Iterator[tuple[str, list[int]]]:
        """The newest answers of each domain, the oldest first, domains in turns."""
        replay = self.store.replay
        newest = {name: replay.answers(name, RECORDS, target_id=self.target_id) for name in replay.sizes()}
        for one_each in reversed([*zip_longest(*newest.values())]):
            for name, answer in zip(newest, one_each, strict=True):
                if answer is not None:
                    yield name, answer.tolist()
