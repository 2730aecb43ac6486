"""Which records the rows of an update's batches hold, and whom each row teaches."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from moedraft.core import SHARED, ReplayRecord

COUNTS = 0.25  # probability that a record is another domain's, from which on that one's list counts it


@dataclass(frozen=True)
class Drawn:
    """The records of one update."""

    fresh: list[ReplayRecord]  # that came since the last update, newest first
    replayed: list[ReplayRecord]
    held_out: list[ReplayRecord]

    @property
    def train(self) -> list[ReplayRecord]:
        return [*self.fresh, *self.replayed]

    def batches(
        self, steps: int, rows: int, replayed: float, rng: random.Random
    ) -> Iterator[list[ReplayRecord]]:
        """`steps` lists of `rows` records: new ones, each twice at most, and replay, again and again.

        replayed: the share of replay where there are new records enough.
        """
        old_rows = max(round(rows * replayed), rows - 2 * len(self.fresh)) if self.replayed else 0
        fresh, old = _cycled(self.fresh, rng), _cycled(self.replayed, rng)
        for _ in range(steps):
            yield [
                *(next(old) for _ in range(old_rows)),
                *(next(fresh) for _ in range(rows - old_rows)),
            ]


def owner_of(record: ReplayRecord, learners: Collection[str], chance: random.Random) -> str:
    """The expert that a row of this record teaches beside the shared adapter; SHARED: none.

    A domain is drawn, each as likely as the text is to be its. `learners` are the domains whose experts learn
    in this update; where another one is drawn, no expert is taught.
    """
    sure = record.belief
    if sure >= 1 or chance.random() < sure:
        return record.domain
    others = others_of(record)
    drawn = chance.choices([*others], [*others.values()])[0]
    return drawn if drawn in learners else SHARED


def whose(record: ReplayRecord) -> set[str]:
    """The domains whose lists of tokens count this record: its own, and others that are likely enough."""
    return {record.domain, *(name for name, weight in others_of(record).items() if weight >= COUNTS)}


def others_of(record: ReplayRecord) -> dict[str, float]:
    """How likely the text is to be another domain's, for each that is possible at all."""
    weights = record.weights.items()
    return {name: w for name, w in weights if w > 0 and name not in (record.domain, SHARED)}


def _cycled(records: list[ReplayRecord], rng: random.Random) -> Iterator[ReplayRecord]:
    """Yield all records again and again, each time in a new random order."""
    while records:
        yield from rng.sample(records, len(records))
