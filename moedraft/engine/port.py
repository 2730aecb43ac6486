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
    """Nothing ever changes."""

    def refresh(self, running: Iterable[Sequence], *, now: bool = False) -> None:
        """There are no versions to load."""


@dataclass(frozen=True)
class EngineFigures:
    """The engine at one moment."""

    slots: int
    running: int  # requests in a slot
    waiting: int
    speedup: float | None  # of the last rounds against plain decoding, as plain rounds among them measured it
