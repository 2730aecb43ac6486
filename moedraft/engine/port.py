"""What the engine and those around it agree on: where adapters come from, and where answers go."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from moedraft.core import RequestOutput, Sequence

OnOutput = Callable[[RequestOutput], None]
Sink = Callable[[Sequence], None]  # gets every finished request


class AdapterSource(Protocol):
    """Where new adapter versions come from."""

    def refresh(self, running: Iterable[Sequence], *, now: bool = False) -> None:
        """Called between two steps; resets `draft_cached` of sequences whose draft cache became stale."""


class NoAdapters:
    """For an engine whose adapters never change."""

    def refresh(self, running: Iterable[Sequence], *, now: bool = False) -> None:
        """There are no versions to load."""


@dataclass(frozen=True)
class EngineFigures:
    """How busy the engine is at one moment, and what speculation brings."""

    slots: int
    running: int  # requests in a slot
    waiting: int
    speedup: float | None  # of the last rounds over plain decoding; None until both kinds were timed
