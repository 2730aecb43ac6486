"""Puts candidates before the gate: what would serve with them, against what serves now, on the same records.

An expert's candidate is measured over the shared adapter that is live, on its own domain: other domains are
drafted by other experts. A shared adapter's is measured on every domain, below the expert that each would
have. This reads storage and writes nothing; it remembers how often an adapter was trained on without being
published.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from moedraft.core import SHARED, ReplayRecord
from moedraft.distill.gate import Options, Verdict, decide, decide_together
from moedraft.distill.held_out import HeldOut
from moedraft.distill.measures import Measure
from moedraft.storage.candidate import Candidate, Weights
from moedraft.storage.changes import is_pinned
from moedraft.storage.store import TARGET_ID, Store

OnBatch = Callable[[], None]


class Judge:
    """The gate of one home."""

    def __init__(self, measure: Measure, store: Store) -> None:
        self.measure, self.store = measure, store
        self.held_out = HeldOut(store.replay)
        self._kept: dict[str, tuple[int, int]] = {}  # version that was begun with, candidates kept since

    def __call__(
        self, candidates: Sequence[Candidate], on_batch: OnBatch = lambda: None
    ) -> dict[str, Verdict]:
        """The verdict on each of the candidates, which one update has made, by name.

        Those of pinned adapters are left out. Raises StorageError.
        """
        made = {one.expert: one for one in candidates if not is_pinned(self.store.registry, one.expert)}
        if not made or (len(candidates) > 1 and SHARED not in made):
            return {}
        kept = {name: self._kept_before(one) for name, one in made.items()}
        if SHARED in made:
            verdicts = decide_together(self._options(made, on_batch), kept, SHARED)
        else:
            verdicts = {name: self._alone(one, kept[name], on_batch) for name, one in made.items()}
        for name, verdict in verdicts.items():
            self._kept[name] = made[name].parent, kept[name] + 1 if verdict.decision == "keep" else 0
        return verdicts

    def _kept_before(self, candidate: Candidate) -> int:
        """Nothing counts from before another version was made live."""
        parent, count = self._kept.get(candidate.expert, (0, 0))
        return count if parent == candidate.parent else 0

    def _alone(self, made: Candidate, kept: int, on_batch: OnBatch) -> Verdict:
        name, records = made.expert, self._records(made.expert, 1, on_batch)
        shared, live = self._live(SHARED, made), self._live(name, made)
        before = self.measure({SHARED: shared, name: live}, name, records, on_batch)
        after = self.measure({SHARED: shared, name: made}, name, records, on_batch)
        return decide(before, after, kept)

    def _options(self, made: dict[str, Candidate], on_batch: OnBatch) -> dict[str, Options]:
        """What each domain with records would have under the new shared adapter."""
        new_shared = made[SHARED]
        shared, domains = self._live(SHARED, new_shared), list(self.store.replay.sizes())
        options = {}
        for name in domains:
            records = self._records(name, len(domains), on_batch)
            own = {} if name == SHARED else {name: self._live(name, new_shared)}
            before = self.measure({SHARED: shared, **own}, name, records, on_batch)
            old = self.measure({SHARED: new_shared, **own}, name, records, on_batch)
            new = None
            if name in made and name != SHARED:
                new = self.measure({SHARED: new_shared, name: made[name]}, name, records, on_batch)
            options[name] = Options(before, new, old)
        return options

    def _records(self, domain: str, domains: int, on_record: OnBatch) -> list[ReplayRecord]:
        target = self.store.registry.get_meta(TARGET_ID)
        return self.held_out.records(domain, domains, target, on_record)

    def _live(self, name: str, made: Candidate) -> Weights | None:
        found = self.store.adapters.load_live(name, made.base_hash)
        return found[1] if found else None
