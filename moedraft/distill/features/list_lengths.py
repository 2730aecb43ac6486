"""How many tokens an expert's list has: as many as guess best on records that are new to it.

A short list leaves out tokens that the domain hardly ever holds, so it guesses wrong less often, and it
costs less; a long one lacks fewer of the right ones. Which of the two weighs more depends on the domain. What
stands in a row's text can be guessed with any list (`feature.text_tokens`), so most lists can be short
(docs/experiments.md, "Tokens of the text").
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite

LENGTHS = (512, 1024, 2048, 4096, 8192)  # of which one is chosen
FIRST = 1024  # before enough was seen
ENOUGH = 256  # guesses that are enough
FORGETS = 0.9  # what earlier records weigh less after each update that brought new ones
WORTH = 0.002  # of all guesses, that a longer list must guess more


class ListLengths:
    """What was guessed right from lists of these lengths, by expert."""

    def __init__(self) -> None:
        self._seen: dict[str, list[float]] = {}  # hits by length, and at the end all guesses

    def observe(self, name: str, hits: Sequence[float], guesses: float) -> None:
        """hits: by LENGTHS, how many of these guesses were right, on records that came since the last."""
        before, new = self._seen.get(name, [0.0] * (len(LENGTHS) + 1)), [*hits, guesses]
        self._seen[name] = [FORGETS * old + more for old, more in zip(before, new, strict=True)]

    def of(self, name: str, now: int = FIRST) -> int:
        """The shortest that guesses hardly less than the best; as it is `now` before enough was seen."""
        *hits, guesses = self._seen.get(name, [0.0])
        if guesses < ENOUGH:
            return now
        least = max(hits) - WORTH * guesses
        return next(length for length, hit in zip(LENGTHS, hits, strict=True) if hit >= least)

    def told(self) -> dict[str, list[float]]:
        """All of it, in plain numbers."""
        return {name: [*seen] for name, seen in self._seen.items()}

    def restore(self, told: Mapping[str, Sequence[float]]) -> None:
        """Go on from what another one has seen; figures that cannot be counts are left out."""
        whole = {name: [*seen] for name, seen in told.items() if len(seen) == len(LENGTHS) + 1}
        self._seen = {n: seen for n, seen in whole.items() if all(map(isfinite, seen)) and min(seen) >= 0}

    def forget(self) -> None:
        self._seen.clear()
