"""How many new records an update waits for: fewer after traffic has moved, more while learning pays little.

The setting `update_every` is where this begins. Traffic has moved where the first guesses for a domain hit
clearly less often in its newest requests than in those before. Updates cost processor time whether they bring
something or not. So after some series of them in a row, each of new records with what follows it, that did
not pay, more records must come before the next one. A domain of which little was learned yet does not wait
for that.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from math import sqrt
from statistics import fmean, variance

from scipy.special import stdtrit

from moedraft.core import SHARED, UpdateRecord
from moedraft.distill.judging.gate import is_unseen
from moedraft.distill.measuring.figures import FEW
from moedraft.distill.pace.payback import Payback
from moedraft.storage.requests import outcome_of
from moedraft.storage.store import Store

NEWEST, BEFORE = 8, 24  # requests of one domain that are compared
CHANCE = 0.001  # that all domains together look as if one had moved
SOONER = 4  # times fewer records than `update_every`, after traffic has moved
A_FEW = 4  # records after which the requests are compared anew
PATIENCE = 3  # series in a row that did not pay, which double the records that the next one waits for
MOST_DOUBLINGS = 5  # of the usual records
MOST_SOON = 2  # doublings after traffic has moved
BEGINNING = 3  # times `update_every` records, of which a domain has learned before it waits like all others
SERIES = 3  # updates of a series that does not pay, about
LOGGED = 1000  # rows of the home's log that a new trainer reads


class Interval:
    """The number of new records that make an update of one home due."""

    def __init__(self, store: Store, every: int, horizon: int) -> None:
        """horizon: requests over which a gain is counted, see `Payback`."""
        self.store, self.every = store, every
        self.payback = Payback(store, horizon)
        self.barren = 0  # series in a row that have not paid
        self._seconds = 0.0  # of learning since the last version that serves or candidate that was discarded
        self._line = 0.0  # what the candidate that the next update continues has gained already
        self._settled_at = 0.0  # epoch s, the last update's end: what came before has been learned from
        self._compared = (-A_FEW, False)  # the newest record when drift was looked for, and what was found

    def resume(self) -> None:
        """Restore from the home's log what earlier updates have shown, about. Raises StorageError."""
        unpaid, seconds = 0, 0.0
        for shared, took in _updates(self.store.updates.recent(limit=LOGGED)):
            unseen = _is_unseen(shared)
            unpaid, seconds = unpaid + (not unseen), seconds + took
            if not unseen and shared.decision in (None, "promote"):
                unpaid = 0 if self.payback.is_paid(_known(shared), seconds) else unpaid
            if shared.decision != "keep":
                seconds = 0.0
            self._settled_at = shared.created_at
        self.barren = unpaid // SERIES

    def settled(
        self, outcome: UpdateRecord | None, seconds: float, *, published: bool, is_fresh: bool = True
    ) -> bool:
        """Note the end of an update, and whether a version of it serves. Returns whether what it added pays.

        outcome: of the shared adapter. is_fresh: the update had new records, so it begins a series. Raises
        StorageError.
        """
        unseen = _is_unseen(outcome)
        self.barren += is_fresh and not unseen
        self._seconds += seconds
        if published and not unseen and self.payback.is_paid(_known(outcome), self._seconds):
            self.barren = 0
        gain = outcome.gain if outcome else None
        added = None if gain is None or unseen else gain - self._line
        is_kept = not published and outcome is not None and outcome.decision == "keep"
        self._line = max(gain or 0.0, 0.0) if is_kept else 0.0  # to make good what did harm saves nothing
        self._seconds = self._seconds if is_kept else 0.0
        self._settled_at, self._compared = time.time(), (-A_FEW, False)
        return self.payback.is_paid(added, seconds)

    @property
    def why_rare(self) -> str | None:
        """Why an update waits for more records than usual, as a sentence; None where it does not."""
        if self.barren < PATIENCE:
            return None
        return "updates are rare now, since the last ones saved less time than they took (`train_horizon`)"

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
        """Whether a few new records have come of a domain of which few were learned from before."""
        used = int(self.store.registry.get_meta(f"trained:{SHARED}") or 0)
        enough = min(BEGINNING * self.every, self.store.replay.capacity // 2)
        for name, size in self.store.replay.sizes().items():
            new = self.store.replay.counts_since(name, used) if name != SHARED else 0
            if new >= A_FEW and size - new < enough:
                return True
        return False

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

    By Welch's test; differences below three hundredths are never enough.
    """
    before, newest = shares[:-NEWEST], shares[-NEWEST:]
    if len(before) < NEWEST:
        return False
    errors = [variance(some) / len(some) for some in (before, newest)]
    each = sum(error**2 / (len(some) - 1) for error, some in zip(errors, (before, newest), strict=True))
    free = sum(errors) ** 2 / each if each else 1e9  # degrees of freedom
    bound = float(stdtrit(free, chance)) * max(sqrt(sum(errors)), 0.01)
    return fmean(newest) < fmean(before) + bound


def _known(outcome: UpdateRecord | None) -> float | None:
    """The gain in tokens per step; None where too few records, or none, tell it."""
    return outcome.gain if outcome and (outcome.gate_records or 0) >= FEW else None


def _is_unseen(outcome: UpdateRecord | None) -> bool:
    """Whether a version was published for another reason than its gain: what it saves is not known."""
    return outcome is not None and is_unseen(outcome.decision, outcome.gain, outcome.gate_records)


def _updates(rows: Iterable[UpdateRecord]) -> Iterator[tuple[UpdateRecord, float]]:
    """Of each update in the log the shared adapter's row, which is its first one, and the seconds it took."""
    shared, seconds = None, 0.0
    for row in rows:
        if row.decision in ("withdraw", "reset"):
            continue
        if row.expert == SHARED:
            if shared is not None:
                yield shared, seconds
            shared, seconds = row, 0.0
        seconds += row.seconds
    if shared is not None:
        yield shared, seconds
