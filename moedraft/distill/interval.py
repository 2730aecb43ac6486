"""How many new records a joint update waits for: fewer after traffic has moved, more while nothing is gained.

The setting `update_every` is where this begins. Traffic has moved where the first guesses for a domain hit
clearly less often in its newest requests than in those before. Updates that the gate did not publish cost as
much processor time as others, so after some of them in a row more records must come before the next one.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from math import sqrt
from statistics import NormalDist, fmean, variance

from moedraft.core import SHARED
from moedraft.storage.requests import outcome_of
from moedraft.storage.store import Store

NEWEST, BEFORE = 8, 24  # requests of one domain that are compared
CHANCE = 0.001  # that all domains together look as if one had moved
SOONER = 4  # times fewer records than `update_every`, after traffic has moved
A_FEW = 4  # records after which the requests are compared anew
PATIENCE, MOST_DOUBLINGS = 3, 2  # updates in a row without a publication that double it, and how often


class Interval:
    """The number of new records that make an update of one home due."""

    def __init__(self, store: Store, every: int) -> None:
        self.store, self.every = store, every
        self.barren = 0  # updates of new records, in a row, of which nothing was published
        self._settled_at = 0.0  # epoch s, the last update's end: what came before has been learned from
        self._compared = (-A_FEW, False)  # the newest record when drift was looked for, and what was found

    def settled(self, published: bool) -> None:
        """Note the end of an update of new records, and whether it led to a version that serves."""
        self.barren = 0 if published else self.barren + 1
        self._settled_at, self._compared = time.time(), (-A_FEW, False)

    def wanted(self, news: int) -> int:
        """How many new records to wait for, where there are `news` of them now.

        Never more than half of what the replay of one domain can hold, since more may never be there.
        """
        factor = 1 << min(self.barren // PATIENCE, MOST_DOUBLINGS)
        most = max(1, self.store.replay.capacity // 2)
        soon = min(most, max(1, self.every // SOONER) * factor)
        if news >= soon and self._has_moved():
            return soon
        return min(most, self.every * factor)

    def _has_moved(self) -> bool:
        """Whether any domain's traffic has; looked for anew when a few records have come."""
        newest = self.store.replay.last_id()
        if not self._compared[0] <= newest < self._compared[0] + A_FEW:
            names = [*(domain.name for domain in self.store.registry.domains()), SHARED]
            chance = CHANCE / len(names)
            self._compared = newest, any(has_drifted(self._shares(name), chance) for name in names)
        return self._compared[1]

    def _shares(self, name: str) -> list[float]:
        """The share of right first guesses in the newest requests of a domain, oldest first.

        None where nobody has asked for the domain since the last update.
        """
        rows = self.store.requests.rows(expert=name, limit=NEWEST + BEFORE, looked_at=True)
        if not rows or rows[-1].created_at <= self._settled_at:
            return []
        outcomes = [one for one in map(outcome_of, rows) if one.first_guesses]
        return [one.right_first_guesses / one.first_guesses for one in outcomes]


def has_drifted(shares: Sequence[float], chance: float = CHANCE) -> bool:
    """Whether the newest of these shares are lower than those before, with so small a chance of error.

    As Welch's test with a normal distribution; differences below three hundredths are never enough.
    """
    before, newest = shares[:-NEWEST], shares[-NEWEST:]
    if len(before) < NEWEST:
        return False
    error = sqrt(variance(before) / len(before) + variance(newest) / len(newest))
    return fmean(newest) < fmean(before) + NormalDist().inv_cdf(chance) * max(error, 0.01)
