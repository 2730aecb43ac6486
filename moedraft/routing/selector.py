"""Which expert drafts for a sequence. Knows the router's prior; knows no model and no cache."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import torch

from moedraft.core import Sequence, Verdict
from moedraft.routing.router import Route, Router

log = logging.getLogger(__name__)


class ExpertSelector(Protocol):
    """What the engine asks: an expert at admission, and a place to learn from verification."""

    def assign(self, sequences: list[Sequence]) -> None:
        """Set `expert` of all newly admitted sequences at once; pinned ones stay as they are."""

    def settle(self, ending: Sequence | None = None) -> list[Sequence]:
        """Sequences whose `expert` was set since the last call; that of `ending` is set in any case."""

    def observe(self, sequences: list[Sequence], verdict: Verdict) -> None:
        """Take in what the target made of the last proposal, row by row."""


class Selector:
    """The router's prior decides, once, at admission."""

    def __init__(self, router: Router) -> None:
        self.router = router

    def assign(self, sequences: list[Sequence]) -> None:
        """One batch through the router. Where that fails the shared draft keeps it."""
        rows = [s for s in sequences if needs_expert(s)]
        if rows:
            send(rows, lambda: self.router.route([s.prompt for s in rows]))

    def settle(self, ending: Sequence | None = None) -> list[Sequence]:
        """Nothing is ever open."""
        return []

    def observe(self, sequences: list[Sequence], verdict: Verdict) -> None:
        """Not needed: a choice that rests on the prompt alone has nothing to learn from verification."""


class BackgroundSelector(Selector):
    """The same prior, found beside decoding: a row begins with the shared draft and changes when it is known.

    Embedding a prompt takes several steps' time, which decoding need not wait for: with experts that leave
    keys and values alone a change in mid-answer costs nothing. Only seeded sampling waits, since its answer
    depends on who drafts, and must not depend on timing. Close it.
    """

    def __init__(self, router: Router) -> None:
        super().__init__(router)
        self._pool = ThreadPoolExecutor(1, "moedraft-router", initializer=torch.get_num_threads)
        self._open: list[tuple[Future[list[Route]], list[Sequence]]] = []

    def assign(self, sequences: list[Sequence]) -> None:
        rows = [s for s in sequences if needs_expert(s)]
        later = [s for s in rows if not s.reproducible]
        super().assign([s for s in rows if s.reproducible])
        if later and self.router.domains:
            routed = self._pool.submit(self.router.route, [s.prompt for s in later])
            self._open.append((routed, later))

    def settle(self, ending: Sequence | None = None) -> list[Sequence]:
        """Never raises: a prompt that cannot be routed stays with the shared draft."""
        settled: list[Sequence] = []
        for routed, rows in list(self._open):
            if routed.done() or any(row is ending for row in rows):
                self._open.remove((routed, rows))
                settled += send(rows, routed.result)
        return settled

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)


def needs_expert(sequence: Sequence) -> bool:
    """Rows that neither draft nor are learned from need none."""
    return not sequence.pinned and (sequence.draft or sequence.capture)


def send(rows: list[Sequence], find: Callable[[], list[Route]]) -> list[Sequence]:
    """The rows, with the experts that were found. Never raises: none where they could not be."""
    try:
        for sequence, route in zip(rows, find(), strict=True):
            sequence.expert, sequence.confidence = route.domain, route.confidence
    except Exception:
        log.exception("Prompts could not be routed; the shared draft serves them.")
        return []
    return rows
