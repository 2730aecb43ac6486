"""Has the gate judge candidates: what would serve with them against what serves now, on the same records.

An expert's candidate is measured over the shared adapter that is live, on its own domain: other domains are
drafted by other experts. A shared adapter's is measured on every domain, below the expert that each would
have. All of them are measured against the draft base without any adapter as well. This reads storage and
writes nothing; it remembers how often an adapter was trained on without being published, and what was
measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from moedraft.core import SHARED, ReplayRecord
from moedraft.distill.fresh.beside_base import BesideBase
from moedraft.distill.fresh.second_look import SecondLook
from moedraft.distill.judging.alone import decide_alone
from moedraft.distill.judging.gate import Seen, Verdict
from moedraft.distill.judging.held_out import LEAST_JUDGED, HeldOut
from moedraft.distill.judging.options import ENOUGH, Options
from moedraft.distill.judging.together import decide_together, in_doubt
from moedraft.distill.measuring.figures import Measured
from moedraft.distill.measuring.measures import Measure, Serving
from moedraft.distill.measuring.remembered import Remembered
from moedraft.storage.changes import is_pinned
from moedraft.storage.filing import filed
from moedraft.storage.store import TARGET_ID, Store
from moedraft.storage.versions.candidate import Candidate, Weights

OnBatch = Callable[[], None]
TAUGHT = 4  # records from which on a domain gets adapters
OF_LATE = 48  # newest records, whose domains are those of the traffic now


@dataclass(frozen=True)
class Case:
    """A domain's held-out records, and how to measure what would serve it on them."""

    domain: str
    records: list[ReplayRecord]
    measured: Callable[[Serving], Measured]


class JudgeLike(Protocol):
    """Decides on candidates that one update has made."""

    def __call__(self, candidates: Sequence[Candidate], on_batch: OnBatch = ...) -> dict[str, Verdict]: ...

    def untaught(self) -> frozenset[str]: ...

    def forget(self) -> None: ...


class Judge:
    """The gate of one home."""

    def __init__(self, measure: Measure, store: Store, *, base_serves: bool = False) -> None:
        """base_serves: whether rows of single domains can be drafted for by the base alone."""
        self.measure, self.store = Remembered(measure), store
        self.held_out = HeldOut(store.replay)
        self.beside_base = BesideBase(measure, store) if base_serves else None
        self.second_look = SecondLook(measure, store, self.beside_base)
        self.kept: dict[str, tuple[int, int]] = {}  # the live version, and candidates kept since
        self._newest = -1  # record there was when candidates were judged last
        self.base_serves = base_serves

    def __call__(
        self, candidates: Sequence[Candidate], on_batch: OnBatch = lambda: None
    ) -> dict[str, Verdict]:
        """The verdict on each of the candidates, which one update has made, by name.

        Those of pinned adapters are left out. Raises StorageError.
        """
        made = {one.expert: one for one in candidates if not is_pinned(self.store.registry, one.expert)}
        if not made or (len(candidates) > 1 and SHARED not in made):
            return {}
        newest, before = self.store.replay.last_id(), self._newest
        self._newest = newest
        kept = {name: self._kept_before(one) for name, one in made.items()}
        if SHARED in made:
            verdicts = decide_together(self._options(made, on_batch), kept, SHARED)
            if self.beside_base is not None:
                self.beside_base.base_hash = made[SHARED].base_hash
        else:
            verdicts = {name: self._alone(one, kept[name], on_batch) for name, one in made.items()}
        for name, one in made.items():
            stays = name in verdicts and verdicts[name].decision == "keep"
            # Without new records a further look tells nothing new; it must not use up the candidate's time.
            self.kept[name] = one.parent, kept[name] + (newest != before) if stays else 0
        return verdicts

    def untaught(self) -> frozenset[str]:
        """The domains of which nothing was learned: without a version, and with fewer than TAUGHT records.

        A shared adapter knows other domains only and does harm there, so the base alone is to draft for them
        (docs/experiments.md, "Before anything was learned of a domain"). None where it cannot, or a person
        has pinned what serves.
        """
        if not self.base_serves:
            return frozenset()
        kept, registry = self.store.replay.sizes(), self.store.registry
        few = [name for name, _ in registry.domain_names() if kept.get(name, 0) < TAUGHT]
        return frozenset(n for n in few if registry.live(n) is None and not is_pinned(registry, n))

    def forget(self) -> None:
        """Forget what was measured of records, since some were purged."""
        self.measure.forget()
        self.second_look.forget()
        self.held_out = HeldOut(self.store.replay)
        if self.beside_base is not None:
            self.beside_base.forget()

    def _kept_before(self, candidate: Candidate) -> int:
        """How many candidates were kept since the live version was published."""
        parent, count = self.kept.get(candidate.expert, (0, 0))
        return count if parent == candidate.parent else 0

    def _alone(self, made: Candidate, kept: int, on_batch: OnBatch) -> Verdict:
        name, case = made.expert, self._case(made.expert, 1, on_batch)
        shared, live = self._live(SHARED, made), self._live(name, made)
        before = case.measured({SHARED: shared, name: live})
        new = case.measured({SHARED: shared, name: made})
        none = case.measured({SHARED: shared, name: None}) if self._removable(name, made) else None
        seen = self.second_look.seen(made).get(name)
        return decide_alone(Options(before, new, before, none, self._static_of(case), seen=seen), kept)

    def _options(self, made: dict[str, Candidate], on_batch: OnBatch) -> dict[str, Options]:
        """Measure for each domain with records what it could have under the new shared adapter."""
        new_shared = made[SHARED]
        shared = self._live(SHARED, new_shared)
        untaught = self.untaught()
        traffic = self.store.replay.traffic(OF_LATE, LEAST_JUDGED, filed(self.store.registry))
        cases = {name: self._case(name, len(traffic), on_batch) for name in traffic}
        unadapted, options = self.store.registry.unadapted(), dict[str, Options]()
        seen = self.second_look.seen(new_shared)
        for name, case in cases.items():
            own = {} if name == SHARED else {name: self._live(name, new_shared)}
            static = self._static_of(case)
            before = static if name in unadapted else case.measured({SHARED: shared, **own})
            stood, with_kept = self._on_new_records(name, static)
            base = static if self._may_stand_aside(case, with_kept) else None
            old = static if name in untaught else case.measured({SHARED: new_shared, **own})
            new = None
            if name in made and name != SHARED:
                new = case.measured({SHARED: new_shared, name: made[name]})
            options[name] = Options(
                before,
                new,
                old,
                static=static,
                share=traffic[name],
                base=base,
                seen=seen.get(name),
                stood=stood,
                with_kept=with_kept,
                aside=name in unadapted,
            )
        for name in in_doubt(options):
            if self._removable(name, new_shared):
                none = cases[name].measured({SHARED: new_shared, name: None})
                options[name] = replace(options[name], none=none)
        return options

    def _case(self, domain: str, domains: int, on_batch: OnBatch) -> Case:
        target = self.store.registry.get_meta(TARGET_ID)
        records = self.held_out.records(domain, domains, target, on_batch)
        return Case(domain, records, lambda serving: self.measure(serving, domain, records, on_batch))

    @staticmethod
    def _static_of(case: Case) -> Measured:
        """The figures of the draft base alone."""
        return case.measured(dict.fromkeys({SHARED, case.domain}))

    def _removable(self, name: str, made: Candidate) -> bool:
        """Whether the expert has a live version of this draft base that is not pinned, and may be removed."""
        live = self.store.registry.live(name)
        own = live is not None and live.base_hash == made.base_hash
        return own and name != SHARED and not is_pinned(self.store.registry, name)

    def _on_new_records(self, domain: str, static: Measured) -> tuple[Seen | None, Seen | None]:
        """The base beside live adapters; and beside kept candidates too, in drafts as long as `static`'s."""
        if self.beside_base is None:
            return None, None
        depth = static.counts.shape[1]
        return self.beside_base.seen(domain, depth), self.beside_base.seen(domain, depth, with_kept=True)

    def _may_stand_aside(self, case: Case, with_kept: Seen | None) -> bool:
        """Whether the base alone may serve: enough records, and no version that a person pinned or chose."""
        registry = self.store.registry
        free = case.domain != SHARED and not is_pinned(registry, case.domain)
        live = {name: registry.live(name) for name in (case.domain, SHARED)}
        chosen = any(registry.is_chosen(name, one.version if one else 0) for name, one in live.items())
        records = len(case.records) + (with_kept.before.records if with_kept else 0)
        return self.base_serves and free and not chosen and records >= ENOUGH

    def _live(self, name: str, made: Candidate) -> Weights | None:
        found = self.store.adapters.load_live(name, made.base_hash)
        return found[1] if found else None
