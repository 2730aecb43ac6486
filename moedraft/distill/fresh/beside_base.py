"""How adapters stand beside the draft base: both are measured on new records, before these are trained on.

About one record in eight is held out. Of a domain of few requests these few leave open for long whether its
adapters guess it better than the draft base, which may have been trained on such texts. But until the next
update all new records are new to the version that serves, so what the base alone and that version guess can
be compared on each of them. Versions change little from one to the next, so the gate counts this beside what
a candidate does on held-out records (docs/experiments.md, "A domain that the drafter knows"). Candidates that
the gate kept are measured on these records as well (`second_look`). What they did is noted here apart from
what served did: it says what the next candidate would do, and nothing of what serves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from moedraft.core import SHARED, ReplayRecord
from moedraft.distill.fresh.new_records import REMEMBERED, fresh_records, prompt_of
from moedraft.distill.judging.gate import Seen
from moedraft.distill.judging.held_out import LEAST_JUDGED
from moedraft.distill.measuring.figures import FEW, Measured, joined
from moedraft.distill.measuring.measures import Measure
from moedraft.distill.single.trainer import domains_taught
from moedraft.storage.retention.shares import Held, of_many
from moedraft.storage.store import Store
from moedraft.storage.versions.candidate import Weights

MOST_COUNTED = 16  # newest records of a domain that count, since versions change
Versions = tuple[int, int]  # of the shared adapter and of the domain's own; 0: none


@dataclass(frozen=True)
class SeenRecord:
    """One record, measured under the base alone and under adapters."""

    record: Held
    versions: Versions  # that were live when it was measured
    figures: Seen

    @property
    def depth(self) -> int:
        """Tokens of the drafts that it was measured with."""
        return int(self.figures.before.counts.shape[1])


class BesideBase:
    """What was seen in one home. It reads storage and writes nothing.

    `memory.of_gate` keeps what was seen of live adapters over a restart, not what was seen of candidates.
    """

    def __init__(self, measure: Measure, store: Store) -> None:
        self.measure, self.store = measure, store
        self.base_hash = ""  # of the draft base that is trained on; nothing is measured before it is known
        self.rows: dict[str, list[SeenRecord]] = {}  # of the live adapters, by domain, oldest first
        self.of_kept: dict[str, list[SeenRecord]] = {}  # of candidates that were kept, likewise
        self._live: dict[str, int] = {}  # the live versions when this was looked at last
        self.learned: set[str] = set()  # the domains that the live version has learned
        self.last_id = 0  # the newest record that the live version may have been trained on, or was measured

    def gather(self, on_batch: Callable[[], None] = lambda: None) -> None:
        """Measure what is live on the records that came since the last update began.

        Whoever serves a domain now, its adapters are measured, so that it can get them back.
        """
        before, self.last_id = self.last_id, self.store.replay.last_id()
        live = self._live_versions()
        self._drop_withdrawn(live)
        learned = self.learned | set(live) - {SHARED}
        if not self.base_hash or SHARED not in live or before == self.last_id:
            return
        known = {prompt_of(one) for one in self.store.replay.records(limit=REMEMBERED) if one.id <= before}
        shared = self._load(SHARED)
        for domain, records in fresh_records(self.store, before + 1, known, learned.__contains__).items():
            serving = {SHARED: shared, domain: self._load(domain)}
            base = self.measure(dict.fromkeys(serving), domain, records, on_batch)
            adapted = self.measure(serving, domain, records, on_batch)
            _note(self.rows, domain, records, live, Seen(base, adapted))

    def has(self, domain: str, number: int) -> bool:
        """Whether live adapters were measured on the record with this id."""
        return any(row.record.id == number for row in self.rows.get(domain, ()))

    def note_kept(self, domain: str, records: list[ReplayRecord], seen: Seen) -> None:
        """Note what candidates that the gate kept did on new records of a domain, beside the base alone."""
        _note(self.of_kept, domain, records, self._live, seen)

    def forget_kept(self, domain: str | None = None) -> None:
        """Forget what kept candidates did, of this domain or of all, since nothing goes on from them."""
        if domain is None:
            self.of_kept.clear()
        else:
            self.of_kept.pop(domain, None)

    def seen(self, domain: str, depth: int | None = None, *, with_kept: bool = False) -> Seen | None:
        """The base alone and the adapters on the domain's newest records; None where none were measured.

        One client gives no more of them than all others together. depth: only those that were measured with
        drafts of this length, which may have been another before a restart; None: all. with_kept: of records
        on which live adapters were not measured, what kept candidates did there counts.
        """
        seen = [*(self.of_kept.get(domain, ()) if with_kept else ()), *self.rows.get(domain, ())]
        rows = {row.record.id: row for row in seen if depth in (None, row.depth)}
        held = [rows[number].record for number in sorted(rows, reverse=True)]
        chosen = [rows[number].figures for number in of_many(held, MOST_COUNTED, LEAST_JUDGED)]
        if not chosen:
            return None
        return Seen(joined([one.before for one in chosen]), joined([one.after for one in chosen]))

    def published(self, last_id: int) -> None:
        """A new version serves, which may have been trained on records up to `last_id`."""
        self._live = self._live_versions()
        self.last_id = max(self.last_id, last_id)
        known = [one for one in self.store.replay.records(limit=REMEMBERED) if one.id <= last_id]
        self.learned |= domains_taught(known, FEW) - {SHARED}

    def restore(
        self, rows: dict[str, list[SeenRecord]], learned: Iterable[str], base_hash: str, last_id: int
    ) -> None:
        """Go on from what another one has seen; `last_id` is the newest record that may be trained on."""
        self.rows = {n: [one for one in found if one.record.id <= last_id] for n, found in rows.items()}
        self.learned, self.base_hash, self.last_id = set(learned), base_hash, last_id

    def forget(self) -> None:
        """Forget all figures, since records were purged."""
        self.rows.clear()
        self.of_kept.clear()
        self.learned.clear()

    def _drop_withdrawn(self, live: dict[str, int]) -> None:
        """Drop what was seen of versions that were taken back, and of the candidates of these domains."""
        for name, version in self._live.items():
            if live.get(name, 0) < version:
                self.forget_kept(None if name == SHARED else name)
        self._live = live
        for domain, rows in self.rows.items():
            now = live.get(SHARED, 0), live.get(domain, 0)
            rows[:] = [row for row in rows if row.versions[0] <= now[0] and row.versions[1] <= now[1]]

    def _live_versions(self) -> dict[str, int]:
        return {one.domain: one.version for one in self.store.registry.versions() if one.state == "live"}

    def _load(self, name: str) -> Weights | None:
        found = self.store.adapters.load_live(name, self.base_hash)
        return found[1] if found else None


def _note(
    rows: dict[str, list[SeenRecord]],
    domain: str,
    records: list[ReplayRecord],
    live: dict[str, int],
    seen: Seen,
) -> None:
    """Add what was `seen` of each record. Of a domain the newest are left, shared among clients."""
    versions = live.get(SHARED, 0), live.get(domain, 0)
    found = rows.setdefault(domain, [])
    for i, one in enumerate(records):
        figures = Seen(some_of(seen.before, [i]), some_of(seen.after, [i]))
        found.append(SeenRecord(Held(one.id, one.source, one.pinned), versions, figures))
    found.sort(key=lambda row: row.record.id)
    if len(found) > 2 * MOST_COUNTED:
        held = [row.record for row in reversed(found)]
        left = {*of_many(held, 2 * MOST_COUNTED, LEAST_JUDGED)}
        found[:] = [row for row in found if row.record.id in left]


def some_of(measured: Measured, indices: Sequence[int]) -> Measured:
    """The figures of some of the records."""
    numbers = np.array(indices, int)
    chances = None if measured.chances is None else measured.chances[numbers]
    return Measured(measured.counts[numbers], None, chances)
