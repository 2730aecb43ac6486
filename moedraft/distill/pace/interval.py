"""How many new records an update waits for: fewer after traffic has moved, more while learning pays little.

The setting `update_every` is where this begins. Traffic has moved where the first guesses for a domain hit
clearly less often in its newest requests than in those before. An update of new records and those that follow
it without any are a round. Rounds cost processor time whether they bring something or not, so after some in a
row that did not pay for themselves, more records must come before the next one. A domain of which little was
learned yet does not wait for that.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from math import sqrt
from statistics import NormalDist, fmean, variance

from moedraft.core import SHARED, UpdateRecord
from moedraft.distill.pace.payback import Payback
from moedraft.storage.requests import outcome_of
from moedraft.storage.store import Store

NEWEST, BEFORE = 8, 24  # requests of one domain that are compared
CHANCE = 0.001  # that all domains together look as if one had moved
SOONER = 4  # times fewer records than `update_every`, after traffic has moved
A_FEW = 4  # records after which the requests are compared anew
PATIENCE = 3  # rounds in a row that did not pay, which double the records that the next one waits for
MOST_DOUBLINGS = 5  # of the usual records
MOST_SOON = 2  # doublings after traffic has moved
HORIZON = 1000  # requests, see `moedraft.distill.pace.payback`


class Interval:
    """The number of new records that make an update of one home due."""

    def __init__(self, store: Store, every: int, horizon: int = HORIZON) -> None:
        self.store, self.every = store, every
        self.payback = Payback(store, horizon)
        self.barren = 0  # rounds in a row that have not paid for themselves
        self._gain, self._seconds = 0.0, 0.0  # of what the present round published, and what it took
        self._rounds: Counter[str] = Counter()  # in which each expert took part
        self._settled_at = 0.0  # epoch s, the last update's end: what came before has been learned from
        self._compared = (-A_FEW, False)  # the newest record when drift was looked for, and what was found

    def resume(self) -> None:
        """Restore from the home's log of updates which experts have learned before. Raises StorageError."""
        self._rounds = Counter(one.expert for one in self.store.updates.recent())

    def settled(self, outcomes: Sequence[UpdateRecord], published: bool, is_fresh: bool = True) -> bool:
        """Note the end of an update, and whether a version of it serves. Returns whether its gain pays.

        outcomes: of its adapters. is_fresh: it had new records, so it begins a round. Raises StorageError.
        """
        gain = next((one.gain for one in outcomes if one.expert == SHARED), None)
        seconds = sum(one.seconds for one in outcomes)
        if is_fresh:
            self.barren, self._gain, self._seconds = self.barren + 1, 0.0, 0.0
            self._rounds.update(one.expert for one in outcomes)
        self._gain += gain or 0.0 if published else 0.0
        self._seconds += seconds
        if published and (gain is None or self.payback.is_paid(self._gain, self._seconds)):
            self.barren = 0
        self._settled_at, self._compared = time.time(), (-A_FEW, False)
        return self.payback.is_paid(gain, seconds)

    @property
    def why_rare(self) -> str | None:
        """Why an update waits for more records than usual, as part of a sentence; None where it does not."""
        if self.barren < PATIENCE:
            return None
        return "the updates of late saved less time than they took (`train_horizon`)"

    def wanted(self, news: int) -> int:
        """How many new records to wait for, where there are `news` of them now.

        Never more than half of what the replay of one domain can hold, since more may never be there.
        """
        doublings = min(self.barren // PATIENCE, MOST_DOUBLINGS)
        most = max(1, self.store.replay.capacity // 2)
        soon = min(most, max(1, self.every // SOONER) << min(doublings, MOST_SOON))
        if news >= soon and self._has_moved():
            return soon
        usual, wanted = min(most, self.every), min(most, self.every << doublings)
        return usual if usual <= news < wanted and self._has_beginners() else wanted

    def _has_beginners(self) -> bool:
        """Whether a few new records have come of a domain whose expert took part in few rounds."""
        used = self.store.registry.get_meta(f"trained:{SHARED}")
        return any(
            self._rounds[name] < PATIENCE and self.store.replay.counts_since(name, int(used or 0)) >= A_FEW
            for name, _ in self.store.registry.domain_names()
        )

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
