"""How often the router's answers turned out right: its confusion matrix, estimated from answers that ended.

A router that takes one domain for another does so again and again: with every prompt that is worded as its
examples are not, say. The evidence of each answer says which arm guessed best, so after some answers the next
one need not begin with the wrong arm. Row r of the matrix says how often each arm was the best one where the
router had said r. It is estimated by expectation and maximisation, one answer at a time (Dawid and Skene,
"Maximum likelihood estimation of observer error-rates using the EM algorithm", 1979; here with one observer,
which gives probabilities). A row of few answers borrows from all others: a router that was right so far is
believed, one that was wrong is doubted. Knows no model, no request and no clock.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

GIVEN = 8.0  # right answers with which the router is credited at first
HEARD = 4.0  # most answers of one row that count where the router as a whole is judged
LEAST_TRUST = 0.5  # probability that it is right in a row without answers, however wrong all others are
BORROWED = 3.0  # what a row borrows from the others weighs as much as so many answers of its own
MEMORY = 32  # answers of a row that count; what was seen before them fades
DOUBT = 0.2  # that an arm is the best one though it never was in this row
TOLD = 0.5  # share of a row from which on it is told as a mistake


@dataclass(frozen=True)
class Mistake:
    """What the router says, and the other arm that answers begin with then."""

    said: str
    best: str
    share: float  # how often that arm is the best one then


class Confusion:
    """Corrects the router's probabilities by what the answers before have shown."""

    def __init__(self) -> None:
        # Arms, and counts [router's answer, best arm]: one value, since a page reads it from another thread.
        self._known: tuple[list[str], Floats] = [], np.zeros((0, 0))
        self._clients: deque[str] = deque(maxlen=MEMORY)  # whose the last answers were that counted

    @property
    def arms(self) -> list[str]:
        return self._known[0]

    def corrected(self, shares: Mapping[str, float]) -> dict[str, float]:
        """The probability of each arm, from those of the router's answers, which sum to 1.

        From now on exactly these arms are known; those known before keep their counts.
        """
        self._know([*shares])
        given = np.array([*shares.values()])
        return dict(zip(shares, (given @ _rates(self._known[1])).tolist(), strict=True))

    def learn(self, shares: Mapping[str, float], likelihoods: Mapping[str, float], client: str = "") -> None:
        """Take in one answer.

        shares: what the router said. likelihoods: for each arm that was compared, how likely the evidence of
        the answer is if this arm is the best one; they sum to 1. An answer counts by how much it tells: not
        at all where all likelihoods are equal, fully where one arm is certain. Of the last answers, those of
        one client count until they are as many as those of all others together, unless there is no other.
        """
        arms, counts = self._known
        compared = np.array([likelihoods.get(arm, -1.0) for arm in arms])
        named = compared >= 0
        if named.sum() < 2 or not self._may_count(client):
            return
        even = 1 / named.sum()
        tells = max(0.0, (compared.max() - even) / (1 - even))
        rates = (1 - DOUBT) * _rates(counts) + DOUBT * even * named
        given = np.array([shares.get(arm, 0.0) for arm in arms])
        both = given[:, None] * rates * np.where(named, compared, even)  # [router's answer, best arm]
        if both.sum() > 0:
            both *= tells * min(1.0, given.sum()) / both.sum()  # less, where arms that it named are gone
            self._known = arms, counts * (1 - both.sum(1, keepdims=True) / MEMORY) + both

    def mistakes(self) -> list[Mistake]:
        """Answers of the router after which another arm is more likely than not to be the best one."""
        arms, counts = self._known
        found = []
        for said, row in zip(arms, _rates(counts), strict=True):
            best = arms[int(row.argmax())]
            if best != said and row.max() > TOLD:
                found.append(Mistake(said, best, float(row.max())))
        return found

    def _may_count(self, client: str) -> bool:
        mine = Counter(self._clients)[client]
        others = len(self._clients) - mine
        if may := mine <= others or not others:
            self._clients.append(client)
        return may

    def _know(self, arms: list[str]) -> None:
        known, counts = self._known
        if arms != known:
            kept = [arm for arm in arms if arm in known]
            new, old = [arms.index(arm) for arm in kept], [known.index(arm) for arm in kept]
            table = np.zeros((len(arms), len(arms)))
            table[np.ix_(new, new)] = counts[np.ix_(old, old)]
            self._known = arms, table


def _rates(counts: Floats) -> Floats:
    """The matrix [arms, arms] of counts; each row sums to 1."""
    size, seen = len(counts), counts.sum(1, keepdims=True)
    heard = seen[:, 0] * HEARD / (seen[:, 0] + HEARD)  # no row outvotes the others
    right = np.diag(counts) / np.maximum(seen[:, 0], 1e-9)
    trust = max(LEAST_TRUST, (GIVEN + (heard * right).sum()) / (GIVEN + heard.sum())) if size > 1 else 1.0
    usual = np.full((size, size), (1 - trust) / max(1, size - 1))
    np.fill_diagonal(usual, trust)
    return np.asarray((BORROWED * usual + counts) / (BORROWED + seen))
