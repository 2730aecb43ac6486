"""How adapters stand beside the draft base: both are measured on new records, before these are trained on.

About one record in eight is held out. Of a domain of few requests these few leave open for long whether its
adapters guess it better than the draft base, which may have been trained on such texts. But until the next
update all new records are new to the version that serves, so what the base alone and that version guess can
be compared on each of them. Versions change little from one to the next, so the gate counts this beside what
a candidate does on held-out records (docs/experiments.md, "A domain that the drafter knows").
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from moedraft.core import SHARED
from moedraft.distill.judging.fresh import REMEMBERED, fresh_records, prompt_of
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
    """One record, measured under the base alone and under the adapters that were live."""

    record: Held
    versions: Versions
    figures: Seen


class BesideBase:
    """What was seen in one home. It reads storage and writes nothing; a restart forgets it."""

    def __init__(self, measure: Measure, store: Store) -> None:
        self.measure, self.store = measure, store
        self.base_hash = ""  # of the draft base that is trained on; nothing is measured before it is known
        self._rows: dict[str, list[SeenRecord]] = {}  # by domain, oldest first
        self._learned: set[str] = set()  # the domains that the live version has learned
        self._last_id = 0  # the newest record that the live version may have been trained on, or was measured

    def gather(self, on_batch: Callable[[], None] = lambda: None) -> None:
        """Measure what is live on the records that came since the last update began.

        Whoever serves a domain now, its adapters are measured, so that it can get them back.
        """
        before, self._last_id = self._last_id, self.store.replay.last_id()
        live = {one.domain: one.version for one in self.store.registry.versions() if one.state == "live"}
        self._drop_withdrawn(live)
        learned = self._learned | set(live) - {SHARED}
        if not self.base_hash or SHARED not in live or before == self._last_id:
            return
        known = {prompt_of(one) for one in self.store.replay.records(limit=REMEMBERED) if one.id <= before}
        shared = self._load(SHARED)
        for domain, records in fresh_records(self.store, before + 1, known, learned.__contains__).items():
            records.sort(key=lambda record: record.id)
            serving = {SHARED: shared, domain: self._load(domain)}
            base = self.measure(dict.fromkeys(serving), domain, records, on_batch)
            adapted = self.measure(serving, domain, records, on_batch)
            versions = live[SHARED], live.get(domain, 0)
            self._rows.setdefault(domain, []).extend(
                SeenRecord(
                    Held(one.id, one.source, one.pinned),
                    versions,
                    Seen(_single(base, i), _single(adapted, i)),
                )
                for i, one in enumerate(records)
            )
            del self._rows[domain][: -2 * MOST_COUNTED]

    def seen(self, domain: str) -> Seen | None:
        """The base alone and the adapters on the domain's newest records; None where none were measured.

        One client gives no more of them than all others together.
        """
        rows = {row.record.id: row.figures for row in self._rows.get(domain, ())}
        held = [row.record for row in reversed(self._rows.get(domain, []))]
        chosen = [rows[number] for number in of_many(held, MOST_COUNTED, LEAST_JUDGED)]
        if not chosen:
            return None
        return Seen(joined([one.before for one in chosen]), joined([one.after for one in chosen]))

    def published(self, last_id: int) -> None:
        """A new version serves, which may have been trained on records up to `last_id`."""
        self._last_id = max(self._last_id, last_id)
        known = [one for one in self.store.replay.records(limit=REMEMBERED) if one.id <= last_id]
        self._learned |= domains_taught(known, FEW) - {SHARED}

    def forget(self) -> None:
        """Forget all figures, since records were purged."""
        self._rows.clear()
        self._learned.clear()

    def _drop_withdrawn(self, live: dict[str, int]) -> None:
        """Drop what was seen of versions that were taken back."""
        for domain, rows in self._rows.items():
            now = live.get(SHARED, 0), live.get(domain, 0)
            rows[:] = [row for row in rows if row.versions[0] <= now[0] and row.versions[1] <= now[1]]

    def _load(self, name: str) -> Weights | None:
        found = self.store.adapters.load_live(name, self.base_hash)
        return found[1] if found else None


def _single(measured: Measured, index: int) -> Measured:
    """The figures of one record."""
    part = slice(index, index + 1)
    return Measured(measured.counts[part], None, None if measured.chances is None else measured.chances[part])
