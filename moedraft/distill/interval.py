"""How many new records a joint update waits for: fewer after traffic has moved, more while nothing is gained.

The setting `update_every` is where this begins. Traffic has moved where the first guesses for a domain hit
clearly less often in its newest requests than in those before. Updates that the gate did not publish cost as
much processor time as others, so after some of them in a row more records must come before the next one.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from statistics import fmean, variance

from moedraft.core import SHARED
from moedraft.storage.requests import outcome_of
from moedraft.storage.store import Store

NEWEST, BEFORE = 8, 24  # requests of one domain that are compared
SURE = 3.0  # standard errors between them
SOONER = 4  # times fewer records than `update_every`, after traffic has moved
A_FEW = 4  # records after which the requests are compared anew
PATIENCE, MOST_DOUBLINGS = 3, 2  # updates in a row without a publication that double it, and how often


class Interval:
    """The number of new records that make an update of one home due."""

    def __init__(self, store: Store, every: int) -> None:
        self.store, self.every = store, every
        self.barren = 0  # updates of new records, in a row, of which nothing was published
        self._compared = (-A_FEW, False)  # the newest record when drift was looked for, and what was found

    def settled(self, published: bool) -> None:
        """Note whether an update of new records led to a version that serves."""
        self.barren = 0 if published else self.barren + 1

    def wanted(self, news: int) -> int:
        """How many new records to wait for, where there are `news` of them now."""
        soon = max(1, self.every // SOONER)
        if news >= soon and self._has_moved():
            return soon
        return self.every << min(self.barren // PATIENCE, MOST_DOUBLINGS)

    def _has_moved(self) -> bool:
        """Whether any domain's traffic has; looked for anew when a few records have come."""
        newest = self.store.replay.last_id()
        if not self._compared[0] <= newest < self._compared[0] + A_FEW:
            names = [domain.name for domain in self.store.registry.domains()]
            self._compared = newest, any(has_drifted(self._shares(name)) for name in (*names, SHARED))
        return self._compared[1]

    def _shares(self, name: str) -> list[float]:
        """The share of right first guesses in the newest requests of a domain, oldest first."""
        outcomes = map(outcome_of, self.store.requests.rows(expert=name, limit=NEWEST + BEFORE))
        return [one.accepted_first_guesses / one.first_guesses for one in outcomes if one.first_guesses]


def has_drifted(shares: Sequence[float]) -> bool:
    """Whether the newest of these shares are lower than those before by more than chance (Welch's test)."""
    before, newest = shares[:-NEWEST], shares[-NEWEST:]
    if len(before) < NEWEST:
        return False
    error = sqrt(variance(before) / len(before) + variance(newest) / len(newest))
    return fmean(newest) < fmean(before) - SURE * max(error, 0.01)
