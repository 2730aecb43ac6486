"""Which expert drafts for a sequence. Knows the router's prior; knows no model and no cache."""

from __future__ import annotations

from typing import Protocol

from moedraft.core import Sequence, Verdict
from moedraft.routing.classifier import Router


class ExpertSelector(Protocol):
    """What the engine asks: an expert at admission, and a place to learn from verification."""

    def assign(self, sequences: list[Sequence]) -> None:
        """Set `expert` of all newly admitted sequences at once; pinned ones stay as they are."""

    def observe(self, sequences: list[Sequence], verdict: Verdict) -> None:
        """Take in what the target made of the last proposal, row by row."""


class Selector:
    """The router's prior decides, once, at admission."""

    def __init__(self, router: Router) -> None:
        self.router = router

    def assign(self, sequences: list[Sequence]) -> None:
        """One batch through the router. Rows that neither draft nor are learned from need no expert."""
        open_rows = [s for s in sequences if not s.pinned and (s.draft or s.capture)]
        routes = self.router.route([s.prompt for s in open_rows])
        for sequence, route in zip(open_rows, routes, strict=True):
            sequence.expert, sequence.confidence = route.domain, route.confidence

    def observe(self, sequences: list[Sequence], verdict: Verdict) -> None:
        """Not needed: a choice that rests on the prompt alone has nothing to learn from verification."""
