"""Checks published versions again, on the requests that came since they were published.

The gate judges by few records, all from before. Requests that came after a publication are new to what serves
now and to what served before it, so both can be measured on each of them. That needs fewer requests for the
same certainty than sending a share of the traffic to the earlier version, and slows none of them down. A
version that does clearly worse than the one before it is withdrawn. It is looked at again and again, so less
certainty would withdraw one that is no worse in time (docs/experiments.md, "What the gate lets pass").

What is looked at is whatever version is live, also one that serves again since a newer one was taken back.
Nothing is taken back that a person has made live or pinned; an expert that followed a shared adapter back,
which a person chose, was not chosen itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from moedraft.core import SHARED, AdapterVersion, CorruptAdapter, ReplayRecord
from moedraft.distill.judging.gate import Verdict, compare
from moedraft.distill.judging.held_out import LEAST_JUDGED, USABLE
from moedraft.distill.measuring.figures import Measured, joined
from moedraft.distill.measuring.measures import Measure, Serving
from moedraft.storage.changes import is_pinned
from moedraft.storage.filing import filed
from moedraft.storage.registry import Registry
from moedraft.storage.retention.shares import Held, of_many
from moedraft.storage.store import TARGET_ID, Store
from moedraft.storage.versions.candidate import Weights

ENOUGH, MOST = 16, 64  # records that came since: with fewer nothing is decided, more are not looked at
SURE = 0.98  # probability that a version is better, from which on it is left alone …
SURELY_WORSE = 0.995  # … or worse, from which on it is taken back

OnBatch = Callable[[], None]


@dataclass(frozen=True)
class Withdrawal:
    """A version that does worse than the one before it."""

    version: AdapterVersion
    verdict: Verdict


def followers(
    registry: Registry, found: Withdrawal, live: Iterable[AdapterVersion]
) -> list[tuple[Withdrawal, int]]:
    """The experts that went back with a shared adapter, each with the number of what serves it now.

    live: the versions that served until then.
    """
    reason = f"Version {found.version.version} of the shared adapter, which it stood on, was taken back."
    now = {one.domain: one.version for one in registry.versions() if one.state == "live"}
    return [
        (Withdrawal(one, Verdict("withdraw", reason=reason)), now.get(one.domain, 0))
        for one in live
        if one.domain != found.version.domain and now.get(one.domain) != one.version
    ]


def looked_at(before: Measured, after: Measured) -> Verdict:
    """The verdict on a version. before: what would serve without it; after: what serves, on equal records."""
    found = compare(before, after)
    if found.better > 1 - SURELY_WORSE:
        return replace(found, decision="keep", reason=None)
    reason = "On the requests that came since, what served before it did better."
    return replace(found, decision="withdraw", reason=reason)


class Watch:
    """Watches the live versions of one home. It reads storage and writes nothing."""

    def __init__(self, measure: Measure, store: Store) -> None:
        self.measure, self.store = measure, store
        self._settled: set[tuple[str, int]] = set()  # versions that have proved better, by name and number

    def __call__(self, base_hash: str, on_batch: OnBatch = lambda: None) -> Withdrawal | None:
        """The first version of this draft base that is to be taken back: the shared one's, or an expert's."""
        for name in (SHARED, *(domain.name for domain in self.store.registry.domains())):
            live = self._watched(name, base_hash)
            if live is None:
                continue
            verdict = self._compared(live, on_batch)
            if verdict.records >= ENOUGH and verdict.better >= SURE:
                self._settled.add((name, live.version))
            if verdict.decision == "withdraw":
                return Withdrawal(live, verdict)
        return None

    def _watched(self, name: str, base_hash: str) -> AdapterVersion | None:
        """The live version of `name`; None if pinned or chosen by a person, or proved better."""
        registry = self.store.registry
        line = registry.lineage(name, base_hash)
        if not line or line[0].state != "live" or is_pinned(registry, name):
            return None
        number = line[0].version
        return None if (name, number) in self._settled or registry.is_chosen(name, number) else line[0]

    def _compared(self, live: AdapterVersion, on_batch: OnBatch) -> Verdict:
        """What serves now against what would serve without `live`, on the records that came since."""
        by_domain = self._since(live)
        count = sum(map(len, by_domain.values()))
        if count < ENOUGH:
            return Verdict("keep", count)
        befores, afters = list[Measured](), list[Measured]()
        try:
            for domain, records in by_domain.items():
                befores.append(self.measure(self._without(live, domain), domain, records, on_batch))
                afters.append(self.measure(self._serving(live, domain), domain, records, on_batch))
        except CorruptAdapter:  # whoever serves finds that as well, and goes on with an older version
            return Verdict("keep")
        return looked_at(joined(befores), joined(afters))

    def _since(self, live: AdapterVersion) -> dict[str, list[ReplayRecord]]:
        """The newest records since `live` was published, by domain, as far as the clients' shares allow.

        Of each prompt only one record, and none of a domain for which the draft base alone drafts.
        """
        target = self.store.registry.get_meta(TARGET_ID)
        found: dict[tuple[str, tuple[int, ...]], ReplayRecord] = {}
        own, aside = None if live.domain == SHARED else live.domain, self.store.registry.unadapted()
        moved = filed(self.store.registry)
        for record in self.store.replay.newest(2 * MOST, live.last_record + 1, target, own):
            usable = len(record.topk_ids) >= USABLE and record.id not in moved
            if usable and record.domain not in aside:
                prompt = tuple(record.token_ids[: record.num_prompt_tokens])
                found.setdefault((record.domain, prompt), record)
        records = list(found.values())
        held = [Held(i, one.source, one.pinned) for i, one in enumerate(records)]
        by_domain: dict[str, list[ReplayRecord]] = {}
        for number in sorted(of_many(held, MOST, LEAST_JUDGED)):
            by_domain.setdefault(records[number].domain, []).append(records[number])
        return by_domain

    def _serving(self, live: AdapterVersion, domain: str) -> Serving:
        """The adapters that draft for `domain` now."""
        names = {SHARED, domain}
        return {name: self._weights(self.store.registry.lineage(name, live.base_hash)) for name in names}

    def _without(self, live: AdapterVersion, domain: str) -> Serving:
        """The adapters that would draft for `domain` after a rollback of `live`.

        Where `live` is the shared adapter, experts that were trained above it are taken back with it, but for
        those that are pinned.
        """
        lines = {name: self.store.registry.lineage(name, live.base_hash) for name in {SHARED, domain}}
        lines[live.domain] = lines[live.domain][1:]
        if live.domain == SHARED != domain and not is_pinned(self.store.registry, domain):
            left = lines[SHARED][0].version if lines[SHARED] else 0
            lines[domain] = [one for one in lines[domain] if (one.stood_on or 0) <= left]
        return {name: self._weights(line) for name, line in lines.items()}

    def _weights(self, line: Iterable[AdapterVersion]) -> Weights | None:
        first = next(iter(line), None)
        return None if first is None else self.store.adapters.load(first, first.base_hash)
