"""How adapters stand beside the draft base: both are measured on new records, before these are trained on.

About one record in eight is held out. Of a domain of few requests these few leave open for long whether its
adapters guess it better than the draft base, which may have been trained on such texts. But until the next
update all new records are new to the version that serves, so what the base alone and that version guess can
be compared on each of them. Versions change little from one to the next, so the gate counts this beside what
a candidate does on held-out records (docs/experiments.md, "A domain that the drafter knows").
"""

from __future__ import annotations

from collections.abc import Callable

from moedraft.core import SHARED
from moedraft.distill.judging.fresh import REMEMBERED, fresh_records, prompt_of
from moedraft.distill.judging.gate import Seen
from moedraft.distill.measuring.figures import FEW, Measured, joined
from moedraft.distill.measuring.measures import Measure
from moedraft.distill.single.trainer import domains_taught
from moedraft.storage.store import Store

MOST = 16  # newest records of a domain that count, since versions change


class BesideBase:
    """The standings of one home's domains. It reads storage and writes nothing; a restart forgets them."""

    def __init__(self, measure: Measure, store: Store) -> None:
        self.measure, self.store = measure, store
        self.seen: dict[str, Seen] = {}  # by domain, the base alone and the adapters that were live
        self._learned: set[str] = set()  # the domains that the live version has learned
        self._base_hash = ""  # of the draft base that it was trained on
        self._last_id = 0  # the newest record that there was when an update began

    def gather(self, on_batch: Callable[[], None] = lambda: None) -> None:
        """Measure what is live on the records that came since the last update began.

        Whoever serves a domain now, its adapters are measured, so that it can get them back.
        """
        before, self._last_id = self._last_id, self.store.replay.last_id()
        if not self._learned or before == self._last_id:
            return
        records = self.store.replay.records(limit=REMEMBERED)
        known = {prompt_of(record) for record in records if record.id <= before}
        new = fresh_records(self.store, before + 1, known, self._learned.__contains__)
        for domain, found in new.items():
            loaded = {one: self.store.adapters.load_live(one, self._base_hash) for one in (SHARED, domain)}
            live = {name: one[1] if one else None for name, one in loaded.items()}
            base = self.measure(dict.fromkeys(live), domain, found, on_batch)
            pair = Seen(base, self.measure(live, domain, found, on_batch))
            self.seen[domain] = _added(self.seen.get(domain), pair)

    def published(self, base_hash: str) -> None:
        """A version that was trained on this draft base will serve, with all that it has learned."""
        self._base_hash = base_hash
        self._learned |= domains_taught(self.store.replay.records(limit=REMEMBERED), FEW) - {SHARED}

    def forget(self) -> None:
        """Forget all figures, since records were purged."""
        self.seen.clear()


def _added(seen: Seen | None, new: Seen) -> Seen:
    parts = [new] if seen is None else [seen, new]
    return Seen(_newest([one.before for one in parts]), _newest([one.after for one in parts]))


def _newest(parts: list[Measured]) -> Measured:
    whole = joined(parts)
    chances = None if whole.chances is None else whole.chances[-MOST:]
    return Measured(whole.counts[-MOST:], None, chances)
