"""Which expert drafts for a sequence. Knows the router; knows no model and no cache."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

from moedraft.core import SHARED, Sequence
from moedraft.cpu.threads import compute_alone
from moedraft.routing.router import Route, Router

log = logging.getLogger(__name__)


class ExpertSelector(Protocol):
    """What the engine needs: an expert for each new sequence.

    What a verification showed reaches a selector only by the sequences, as `Sequence.rejected` and the counts
    of `Sequence.speculation`, or where it is also one of the engine's `learners`; none of those here is.
    """

    def assign(self, sequences: list[Sequence]) -> None:
        """Choose the expert of all newly admitted sequences. Those whose expert the user chose keep it."""

    def settle(self, ending: Sequence | None = None) -> list[Sequence]:
        """Sequences whose `expert` was set since the last call. Waits until that of `ending` is set."""

    def knows(self, expert: str) -> bool:
        """Whether there is such an expert."""

    def close(self) -> None:
        """Release threads and the like. The engine's owner calls it, once, when the engine has stopped."""


class FixedSelector:
    """Every row keeps the expert that it came with."""

    def assign(self, sequences: list[Sequence]) -> None:
        """Do nothing: every sequence came with an expert."""

    def settle(self, ending: Sequence | None = None) -> list[Sequence]:
        return []

    def knows(self, expert: str) -> bool:
        return True

    def close(self) -> None:
        """There is nothing to close."""


class Selector:
    """The router chooses by the prompt, once, when a sequence is admitted."""

    def __init__(self, router: Router) -> None:
        self.router = router

    def assign(self, sequences: list[Sequence]) -> None:
        """Route all prompts in one batch. Where that fails the sequences stay with the shared draft."""
        rows = [s for s in sequences if needs_expert(s)]
        if rows:
            send(rows, lambda: self.router.route([s.prompt for s in rows]))

    def settle(self, ending: Sequence | None = None) -> list[Sequence]:
        """An empty list: `assign` sets the experts at once, so none is set later."""
        return []

    def knows(self, expert: str) -> bool:
        return expert == SHARED or expert in self.router.domains

    def close(self) -> None:
        """There is nothing to close."""


class UnaskedSelector(Selector):
    """The router is never asked: the shared draft serves every request that names no expert."""

    def assign(self, sequences: list[Sequence]) -> None:
        """Do nothing: every sequence keeps the expert that it came with."""


class BackgroundSelector(Selector):
    """Routes in a thread of its own: a sequence starts with the shared draft and gets its expert later.

    Embedding a prompt takes as long as several steps, and decoding need not wait for it: experts that leave
    keys and values alone can be changed in the middle of an answer at no cost. Only reproducible
    sequences wait, because their answer depends on who drafts and must not depend on timing. Its owner has
    to call `close`, which ends the thread.
    """

    def __init__(self, router: Router) -> None:
        super().__init__(router)
        self._pool = ThreadPoolExecutor(1, "moedraft-router", initializer=compute_alone)
        self._open: list[tuple[Future[list[Route]], list[Sequence]]] = []

    def assign(self, sequences: list[Sequence]) -> None:
        rows = [s for s in sequences if needs_expert(s)]
        later = [s for s in rows if not s.reproducible]
        super().assign([s for s in rows if s.reproducible])
        if later and self.router.domains:
            routed = self._pool.submit(self.router.route, [s.prompt for s in later])
            self._open.append((routed, later))

    def settle(self, ending: Sequence | None = None) -> list[Sequence]:
        """See `ExpertSelector`. Never raises: prompts that cannot be routed stay with the shared draft."""
        settled: list[Sequence] = []
        for routed, rows in list(self._open):
            if routed.done() or any(row is ending for row in rows):
                self._open.remove((routed, rows))
                settled += send(rows, routed.result)
        return settled

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)


def needs_expert(sequence: Sequence) -> bool:
    """Whether the router must choose the sequence's expert.

    It need not where the user or an earlier routing has chosen it, nor for a request that is neither drafted
    for nor learned from.
    """
    chosen = sequence.pinned or (sequence.reproducible and sequence.routed is not None)
    return not chosen and (sequence.draft or sequence.capture)


def send(rows: list[Sequence], find: Callable[[], list[Route]]) -> list[Sequence]:
    """Give the rows the experts that `find` returns, and return the rows.

    Where `find` raises, the fault is logged, the rows keep their experts, and the list is empty.
    """
    try:
        for sequence, route in zip(rows, find(), strict=True):
            sequence.expert, sequence.confidence = route.domain, route.confidence
            sequence.routed, sequence.prior = route.domain, route.probabilities
    except Exception:
        log.exception("Prompts could not be routed; the shared draft serves them.")
        return []
    return rows
