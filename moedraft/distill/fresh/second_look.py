"""Looks a second time at candidates that the gate kept: on the records that came since, before an update
is trained on them.

About one record in eight is held out, and one update brings few of them. But until the next update is trained
on them, all new records are new to a candidate that was kept, so what serves and that candidate can be
measured on each of them, in domains that it has learned. What is seen adds up over the line: the candidate,
and those trained on from it, until one is published, thrown away, or does harm (`gate.decide_again`).

Where the draft base alone may serve a domain, it is measured on these records as well: what candidates do
beside it says before any is published whether the domain is better left to it (`beside_base`).

Simulated with sixteen records an update, two of them held out (tests/distill/test_second_look.py): without a
gain fewer lines are published than by one look at each candidate, and small gains are published sooner.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from moedraft.core import SHARED, ReplayRecord
from moedraft.distill.fresh.beside_base import BesideBase, some_of
from moedraft.distill.fresh.new_records import REMEMBERED, fresh_records, prompt_of
from moedraft.distill.judging.gate import SURE, Seen, Verdict
from moedraft.distill.measuring.figures import FEW, Measured, joined
from moedraft.distill.measuring.measures import Measure, Serving
from moedraft.distill.single.trainer import domains_taught
from moedraft.storage.changes import is_pinned
from moedraft.storage.store import Store
from moedraft.storage.versions.candidate import Candidate, Weights

OnBatch = Callable[[], None]


@dataclass
class Line:
    """The newest candidates of a line, which one update has made, and what the line has shown."""

    made: dict[str, Candidate]
    last_id: int  # the newest record that these candidates may have been trained on
    shared: int  # the version of the shared adapter that serves while the line lasts
    prompts: set[int] = field(default_factory=set)  # hashes of those trained on or measured: they are not new
    learned: set[str] = field(default_factory=set)  # domains that these candidates have learned
    seen: dict[str, Seen] = field(default_factory=dict)  # by domain
    aside: frozenset[str] = frozenset()  # the domains that the base alone served when they were seen


class SecondLook:
    """The lines of one home. It reads storage and writes nothing; a restart forgets the lines."""

    def __init__(self, measure: Measure, store: Store, beside: BesideBase | None = None) -> None:
        """beside: notes what candidates do beside the base; None: the base serves no domain alone."""
        self.measure, self.store, self.beside = measure, store, beside
        self._lines: dict[str, Line] = {}  # by the adapter that the update was of

    def settled(self, candidates: Sequence[Candidate], verdicts: Mapping[str, Verdict], last_id: int) -> None:
        """Note the gate's verdicts on the candidates of one update, which knew of records up to `last_id`."""
        made = {one.expert: one for one in candidates}
        name = SHARED if SHARED in made else candidates[0].expert
        for other, verdict in verdicts.items():
            if other != name and verdict.decision in ("discard", "reset"):
                made.pop(other, None)  # the next one is not trained on from it
                self._forget_beside(other)
        if name not in verdicts or verdicts[name].decision != "keep":
            self._lines.pop(name, None)
            if name not in verdicts or not verdicts[name].is_published:
                self._forget_beside(name)
            return
        shared = self._version(SHARED, made[name])
        line = self._lines.get(name)
        if line is None or line.shared != shared or line.made[name].parent != made[name].parent:
            line = self._lines[name] = Line(made, last_id, shared)
        line.made, line.last_id = made, last_id
        if verdicts[name].better <= 1 - SURE:  # what did harm says nothing of what is trained on from it
            line.seen.clear()
            self._forget_beside(name)
        known = [one for one in self.store.replay.records(limit=REMEMBERED) if one.id <= last_id]
        line.prompts |= {prompt_of(record) for record in known}
        live = {one.domain for one in self.store.registry.versions() if one.state == "live"}
        line.learned |= domains_taught(known, FEW) | {*made, *live} - {SHARED}

    def gather(self, on_batch: OnBatch = lambda: None) -> None:
        """Measure the candidate of every line on the records that came since it was made."""
        for name, line in list(self._lines.items()):
            if self._is_broken(name, line):
                del self._lines[name]
                continue
            last_id, aside = self.store.replay.last_id(), self.store.registry.unadapted()
            for domain in aside ^ line.aside:  # what served is another now
                line.seen.pop(domain, None)
            line.aside = aside
            for domain, records in self._new(name, line).items():
                before, after = self._pair(line.made, domain)
                found = [self.measure(serving, domain, records, on_batch) for serving in (before, after)]
                line.seen[domain] = _added(line.seen.get(domain), found[0], found[1])
                self._note_beside(domain, records, before, found, on_batch)
            line.last_id = last_id

    def forget(self) -> None:
        """Drop all lines: a trainer that has failed goes on from what serves, and lines remember prompts."""
        self._lines.clear()
        self._forget_beside()

    def _note_beside(
        self,
        domain: str,
        records: list[ReplayRecord],
        before: Serving,
        found: list[Measured],
        on_batch: OnBatch,
    ) -> None:
        """Note what candidates do beside the base, on those records on which no live adapters were measured.

        found: the figures of what serves, which is `before`, and those of the candidates.
        """
        if self.beside is None:
            return
        new = [i for i, one in enumerate(records) if not self.beside.has(domain, one.id)]
        if not new:
            return
        chosen = [records[i] for i in new]
        if any(one is not None for one in before.values()):
            base = self.measure(dict.fromkeys(before), domain, chosen, on_batch)
        else:
            base = some_of(found[0], new)
        self.beside.note_kept(domain, chosen, Seen(base, some_of(found[1], new)))

    def _forget_beside(self, name: str = SHARED) -> None:
        """Forget what candidates for this adapter did beside the base; all domains have the shared one."""
        if self.beside is not None:
            self.beside.forget_kept(None if name == SHARED else name)

    def seen(self, candidate: Candidate) -> dict[str, Seen]:
        """By domain, what the line shows that `candidate` goes on from; empty where there is none."""
        line = self._lines.get(candidate.expert)
        if line is None or line.made[candidate.expert].parent != candidate.parent:
            return {}
        return line.seen

    def _is_broken(self, name: str, line: Line) -> bool:
        """Whether something else serves than when the line began, or nothing can be published for it now."""
        made = line.made[name]
        if is_pinned(self.store.registry, name):
            return True
        return self._version(name, made) != made.parent or self._version(SHARED, made) != line.shared

    def _version(self, name: str, made: Candidate) -> int:
        versions = self.store.registry.lineage(name, made.base_hash)
        return versions[0].version if versions else 0

    def _new(self, name: str, line: Line) -> dict[str, list[ReplayRecord]]:
        """The records that came since, by domain, of those that the line has learned.

        Of a domain that it has not learned yet they only show what was, not what its next can do.
        """
        concerns = lambda domain: name in (SHARED, domain) and domain in line.learned  # noqa: E731
        return fresh_records(self.store, line.last_id + 1, line.prompts, concerns)

    def _pair(self, made: Mapping[str, Candidate], domain: str) -> tuple[Serving, Serving]:
        """The adapters that draft for `domain` now, and those that would if the candidates were published.

        A pinned adapter stays: no candidate for it can be published.
        """
        some = next(iter(made.values()))
        before = {name: self._live(name, some) for name in {SHARED, domain}}
        new = {name: one for name, one in made.items() if not is_pinned(self.store.registry, name)}
        after = {name: new.get(name) or weights for name, weights in before.items()}
        if domain in self.store.registry.unadapted():
            before = dict.fromkeys(before)
        return before, after

    def _live(self, name: str, made: Candidate) -> Weights | None:
        found = self.store.adapters.load_live(name, made.base_hash)
        return found[1] if found else None


def _added(seen: Seen | None, before: Measured, after: Measured) -> Seen:
    if seen is None:
        return Seen(before, after)
    return Seen(joined([seen.before, before]), joined([seen.after, after]))
