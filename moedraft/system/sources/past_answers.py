"""Keeps the answers that lookup searches in line with what the home may keep."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable

from moedraft.core import Sequence, StorageError
from moedraft.drafting.lookup.past_answers import PastAnswers
from moedraft.storage.store import Store

POLL_SECONDS = 0.5  # between two looks at whether something was purged; doubled with every failure in a row
DOUBLINGS = 6  # the most doublings: half a minute
FEW, MOST = 16, 1024  # answers of a domain that tell how long they are, and that are read at most

log = logging.getLogger(__name__)


class PastAnswersKeeper:
    """An engine sink that adds each answer that may be kept for learning; `refresh` is called between steps.

    At the start the newest are read from the replay buffers. After each purge all are forgotten, and the ones
    that are left read again: what was purged guesses nothing any more.
    """

    def __init__(self, store: Store, past: PastAnswers, target_id: str) -> None:
        self.store, self.past, self.target_id = store, past, target_id
        self._purges: int | None = None  # of the registry, when reading began; None: it has not
        self._unread: list[str] = []  # domains
        self._domains = 1  # that there were to read
        self._next_poll = 0.0
        self._failures = 0  # in a row

    def __call__(self, sequence: Sequence) -> None:
        if sequence.counted and sequence.captured and sequence.finish_reason in ("stop", "length"):
            self.past.add(sequence.domain, sequence.generated)

    def refresh(self, running: Iterable[Sequence], *, now: bool = False) -> None:
        """Read one domain that is still to be read, all of them with `now`. Never raises: it tries again."""
        due = time.monotonic() >= self._next_poll
        if not self.past.most or not (now or due or (self._unread and not self._failures)):
            return
        try:
            if now or due:
                self._look()
            while self._unread:
                self._read(self._unread[-1])
                self._unread.pop()
                if not now:
                    break
            self._failures = 0
        except Exception as error:
            self._failures += 1
            self._next_poll = time.monotonic() + POLL_SECONDS * 2 ** min(self._failures, DOUBLINGS)
            if self._failures == 1:
                cause = None if isinstance(error, StorageError) else error
                log.warning("Earlier answers cannot be read now: %s", error, exc_info=cause)

    def _look(self) -> None:
        self._next_poll = time.monotonic() + POLL_SECONDS
        purges = self.store.registry.purges()
        if purges != self._purges:
            self.past.clear()
            self._unread = [*self.store.replay.sizes()]
            self._domains = max(1, len(self._unread))
            self._purges = purges

    def _read(self, domain: str) -> None:
        """Add the newest answers of a domain, the oldest first; to those of all domains its even share."""
        replay, target = self.store.replay, self.target_id
        if not (few := replay.answers(domain, FEW, target_id=target)):
            return
        usual = max(1, sum(map(len, few)) // len(few))
        wanted = min(MOST, 1 + self.past.most // usual)
        found = replay.answers(domain, wanted, target_id=target)
        for number, answer in reversed([*enumerate(found)]):
            self.past.add(domain, answer.tolist(), common=number < wanted // self._domains)
