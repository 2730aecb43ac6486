"""How often the router's answers turned out right: its confusion matrix, estimated from answers that ended.

A router that takes one domain for another does so again and again: with every prompt that is worded as its
examples are not, say. The evidence of each answer says which arm guessed best, so after a few answers the
next one need not begin with the wrong arm. Row r of the matrix is the distribution of the best arm where the
router said r. It is estimated by expectation and maximisation, one answer at a time (Dawid and Skene,
"Maximum likelihood estimation of observer error-rates using the EM algorithm", 1979; here with one observer,
which gives probabilities). Rows that little is known of are held up by all others: a router that was right so
far is believed, one that was wrong is doubted. Knows no model, no request and no clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moedraft.selecting.standings import DOUBT

Floats = NDArray[np.float64]

SEEN = 4.0  # answers of a row from which on a mistake is told
GIVEN = 8.0  # answers, as which many being right the router begins
HELD_UP = 3.0  # answers of its own that weigh as much for a row as what is known of all others
MEMORY = 32.0  # answers of a row that count; what was seen before them fades


@dataclass(frozen=True)
class Mistake:
    """What the router said, and the other arm that usually guesses best then."""

    said: str
    best: str
    share: float  # of these answers where it does


class Confusion:
    """Corrects the router's probabilities by what the answers before have shown."""

    def __init__(self) -> None:
        self.arms: list[str] = []
        self._counts: Floats = np.zeros((0, 0))  # [router's answer, best arm]

    def restart(self) -> None:
        """Forget everything: another router answers from now on."""
        self.arms, self._counts = [], np.zeros((0, 0))

    def corrected(self, shares: Mapping[str, float]) -> dict[str, float]:
        """The probability of each arm, from those of the router's answers, which sum to 1."""
        self._know(shares)
        given = np.array([shares.get(arm, 0.0) for arm in self.arms])
        found = given @ self._rates()
        return {arm: float(p) for arm, p in zip(self.arms, found, strict=True) if arm in shares}

    def learn(self, shares: Mapping[str, float], likelihoods: Mapping[str, float]) -> None:
        """Take in one answer.

        shares: what the router said. likelihoods: how likely what the answer showed is where each arm is the
        best one, up to a common factor; arms that are not named cannot be it. An answer counts by how much it
        tells: not at all where all arms are equally likely, fully where one is certain.
        """
        self._know(shares)
        given = np.array([shares.get(arm, 0.0) for arm in self.arms])
        seen = np.array([likelihoods.get(arm, 0.0) for arm in self.arms])
        # What was never seen may be nevertheless, hence the doubt.
        both = given[:, None] * self._rates(DOUBT) * seen  # [router's answer, best arm]
        total = both.sum()
        if total > 0:
            even = 1 / len(self.arms)
            both *= (seen.max() / seen.sum() - even) / max(1 - even, even) / total
            # A new array: the page reads the old one from another thread.
            self._counts = self._counts * (1 - both.sum(1, keepdims=True) / MEMORY) + both

    def mistakes(self) -> list[Mistake]:
        """Answers of the router after which another arm guesses best more often than not."""
        arms, counts = self.arms, self._counts
        if len(arms) != len(counts):  # another thread is about to set the second
            return []
        found = []
        for said, row in zip(arms, counts, strict=True):
            best, total = arms[int(row.argmax())], float(row.sum())
            if total >= SEEN and best != said and row.max() > total / 2:
                found.append(Mistake(said, best, float(row.max()) / total))
        return found

    def _rates(self, doubt: float = 0.0) -> Floats:
        """The matrix [arms, arms]; each row sums to 1.

        doubt: part of what is usual that is spread evenly.
        """
        size, counts = len(self.arms), self._counts
        trust = (GIVEN + np.trace(counts)) / (GIVEN + counts.sum())
        usual = np.full((size, size), (1 - trust) / max(1, size - 1))
        np.fill_diagonal(usual, trust if size > 1 else 1.0)
        usual = (1 - doubt) * usual + doubt / max(1, size)
        return np.asarray((HELD_UP * usual + counts) / (HELD_UP + counts.sum(1, keepdims=True)))

    def _know(self, names: Mapping[str, float]) -> None:
        """Have exactly these arms, of which those known before keep their counts."""
        if [*names] == self.arms:
            return
        before = {arm: place for place, arm in enumerate(self.arms)}
        arms = [*names]
        counts = np.zeros((len(arms), len(arms)))
        pairs = [(new, before[arm]) for new, arm in enumerate(arms) if arm in before]
        for new, old in pairs:
            for other, former in pairs:
                counts[new, other] = self._counts[old, former]
        self.arms, self._counts = arms, counts
