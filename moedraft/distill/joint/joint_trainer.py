"""A joint update: replay records of several domains in, one candidate for each adapter that learned out.

Each row of a batch runs through base + shared adapter + its own expert, and both receive the gradient. So the
shared adapter is taught by every batch, and an expert as often as its domain's traffic came. Half of each
batch is replay of all domains, evenly, since the shared adapter moves under silent domains' experts too.

The candidates of one update belong together: an expert was trained on the shared adapter as that update left
it. Like `moedraft.distill.single.trainer`, this reads storage and writes nothing.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice

import torch

from moedraft.core import SHARED, AdapterVersion, ReplayRecord
from moedraft.distill.averages import AveragingAdamW, averaged, weakened
from moedraft.distill.features.expert_vocabularies import Vocabularies
from moedraft.distill.features.feature_lessons import FeatureLessons
from moedraft.distill.joint.plan import JointPlan, Lessons
from moedraft.distill.lora.ranks import ALL
from moedraft.distill.resampling.further import Further, NoFurther, one_of, with_further
from moedraft.distill.rows.drawn import Drawn, owner_of, whose
from moedraft.distill.single.trainer import LAST_RATE, MEASURED, OnStep, distinct
from moedraft.drafting.experts.adapter import scaling
from moedraft.feature.vocabulary import union
from moedraft.storage.retention.holding import is_held_out
from moedraft.storage.store import TARGET_ID, Store
from moedraft.storage.versions.candidate import Candidate

SAMPLE = 512  # records of each kind that one update looks at, at most


@dataclass(frozen=True)
class JointUpdate:
    """What one update made: the shared adapter's candidate first, then those of the experts that learned."""

    candidates: tuple[Candidate, ...]
    last_id: int  # the newest replay record that the update knew of
    loss: float  # mean of its steps, nats


class JointTrainer:
    """Makes joint updates for the adapters of one home, on its own copies of draft base and target."""

    def __init__(
        self,
        lessons: Lessons,
        store: Store,
        plan: JointPlan | None = None,
        always: Collection[int] = (),
        further: Further | None = None,
    ) -> None:
        """always: tokens that every expert's vocabulary holds. further: None: no further answers."""
        self.lessons, self.student = lessons, lessons.student
        self.registry, self.replay, self.adapters = store.registry, store.replay, store.adapters
        self.plan, self.further = plan or JointPlan(), further or NoFurther()
        student = self.student
        self.vocabularies = Vocabularies(student.general, student.vocab_size, always, own=student.has_lists)
        self.versions: dict[str, int] = {}  # which version an adapter's weights were taken from
        self.last_id = 0  # of the records that the last update knew of
        self.drawn_id = 0  # of those that any update knew of, also one of a single expert
        self.seed = 0  # of the next draw of records
        self.learner: str | None = None  # the only expert that learns, see `only`
        self._chance = random.Random(0)  # whether a record that may be another domain's teaches an expert
        self._done = 0  # steps of the running update
        self.optimisers: dict[str, AveragingAdamW] = {}

    def update(self, *, steps: int | None = None, on_step: OnStep | None = None) -> JointUpdate | None:
        """Train for `steps` optimiser steps; None where there is nothing to learn from.

        Call `published` or `forget` for each candidate before the next update. Raises StorageError, and
        FloatingPointError where no step was finite; the next update starts from the live versions then.
        """
        steps, say = steps or self.plan.steps, on_step or (lambda done, loss: None)
        self.lessons.states.on_forward = lambda: say(self._done, None)
        self._done = 0
        last_id = self.replay.last_id()
        drawn = self.draw(steps, lambda: say(0, None))
        if not drawn.train:
            return None
        names = sorted({record.domain for record in drawn.train} - {SHARED})
        try:
            for name in (SHARED, *names):
                self._follow(name)
            self.further.prepare(drawn.train, lambda: say(0, None))
            self._see_lengths(drawn.fresh, lambda: say(0, None))
            self._choose_vocabularies(drawn.train)
            with self.averaged():
                before = self.measure(drawn.held_out, lambda: say(0, None))
            loss, used = self._train(drawn, steps, say)
            held_out = Counter(record.domain for record in drawn.held_out if record.domain != SHARED)
            sizes = used, held_out + Counter({SHARED: len(drawn.held_out)})
            with self.averaged():
                after = self.measure(drawn.held_out, lambda: say(steps, loss))
            rates = before, after
            made = []
            with averaged(self.optimisers.values()):
                for name in names if self.learner else (SHARED, *names):
                    made.append(self._candidate(name, sizes, steps, loss, rates))
                    say(steps, loss)
        except BaseException:
            for name in (SHARED, *names):
                self.forget(name)
            raise
        self.last_id = self.last_id if self.learner else last_id  # the shared adapter has not seen them
        self.drawn_id = last_id
        return JointUpdate(tuple(one for one in made if one.records), last_id, loss)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """A context in which the student drafts as the last candidates do: averaged, at their strength."""
        parts = (part for name in self.student.names for part in self.student.low_ranks(name).values())
        with averaged(self.optimisers.values()), weakened((part.b for part in parts), self.plan.strength):
            yield

    @contextmanager
    def only(self, name: str) -> Iterator[None]:
        """A context in which updates teach the expert `name` alone, above the shared adapter that is live.

        What was trained before and not published is dropped: its shared adapter is not the live one.
        """
        self.forget(SHARED)
        self.learner = name
        try:
            yield
        finally:
            self.learner = None

    def published(self, version: AdapterVersion) -> None:
        """Note that the candidate of this name is live as `version`; the next update starts from memory."""
        self.versions[version.domain] = version.version

    def kept(self, candidate: Candidate) -> None:
        """Note that the candidate was not published; the next update still continues from memory."""

    def forget(self, name: str) -> None:
        """Drop the candidate of `name`, unpublished; the next update starts from the live version.

        Without the shared adapter that they were trained on, the experts' weights go as well.
        """
        for other in list(self.versions) if name == SHARED else ():
            if other != SHARED:
                self.forget(other)
        self.versions.pop(name, None)
        self.optimisers.pop(name, None)
        self.student.remove(name)

    # -- the records -----------------------------------------------------------------------------

    def draw(self, steps: int, on_record: Callable[[], None] = lambda: None) -> Drawn:
        """Records that came since the last update, and as many of all domains in equal shares."""
        self.seed += 1
        target, most = self.registry.get_meta(TARGET_ID), min(SAMPLE, steps * self.plan.rows)
        newest = self.replay.newest(SAMPLE, self.last_id + 1, target)
        groups: list[list[ReplayRecord]] = []
        held_out: list[ReplayRecord] = []
        for found in (newest, self.replay.sample_stratified(most, self.seed, target)):
            groups.append([])
            # A feature drafter never guesses the first token of an answer.
            usable = (one for one in found if len(one.topk_ids) >= 2)
            for record in islice(distinct(usable), most):
                on_record()
                if self.learner not in (None, record.domain):
                    continue
                if target is not None and record.target_id != target:
                    continue
                if not is_held_out(record):
                    groups[-1].append(record)
                elif len(held_out) < MEASURED:
                    held_out.append(record)
        return Drawn(groups[0], groups[1], held_out)

    def batches(self, drawn: Drawn, steps: int) -> Iterator[list[ReplayRecord]]:
        """See `Drawn.batches`."""
        return drawn.batches(steps, self.plan.rows, self.plan.replayed, random.Random(self.seed))

    def _choose_vocabularies(self, records: Sequence[ReplayRecord]) -> None:
        """A list of tokens for each expert among these records; the student drafts all of them."""
        by_domain: dict[str, list[ReplayRecord]] = {record.domain: [] for record in records}
        for record in records:
            for name in whose(record) & by_domain.keys():
                by_domain[name].append(record)
        self.vocabularies.choose({name: with_further(some, self.further) for name, some in by_domain.items()})
        self.widen()
        found = {name: self.vocabularies.of(name) for name in by_domain if name != SHARED}
        self.student.use_lists({name: own for name, own in found.items() if own is not None})

    @torch.no_grad()
    def _see_lengths(self, records: Sequence[ReplayRecord], on_batch: Callable[[], None]) -> None:
        """Count what experts guess of new records, before these are learned from, by their lists' length."""
        nested = {name: self.vocabularies.nested(name) for name in {record.domain for record in records}}
        known = [one for one in records if nested[one.domain] and one.id > self.drawn_id]
        if not (known and isinstance(self.lessons, FeatureLessons)):
            return
        found: dict[str, torch.Tensor] = {}
        with self.averaged():
            for first in range(0, len(known), self.plan.rows):
                chosen = known[first : first + self.plan.rows]
                for name, counts in self.lessons.guessed_from(chosen, nested, self.plan.max_tokens):
                    found[name] = found.get(name, torch.zeros(len(counts))) + counts
                on_batch()
        for name, counts in found.items():
            *hits, guesses = counts.tolist()
            self.vocabularies.lengths.observe(name, hits, guesses)

    def widen(self, lists: Iterable[torch.Tensor] = ()) -> None:
        """Have the student draft every token that some adapter does, and those of these lists."""
        before = self.student.vocabulary
        every = union([self.vocabularies.all(), *(one.cpu().long() for one in lists)])
        wanted = union([before, every.to(before.device)])
        if len(wanted) > len(before):
            self.student.widen(wanted, self.optimisers.values())

    # -- the steps -------------------------------------------------------------------------------

    def _train(self, drawn: Drawn, steps: int, on_step: OnStep) -> tuple[float, Counter[str]]:
        """The mean loss, and how many different records taught each adapter. Raises FloatingPointError."""
        total, done, rng = 0.0, 0, random.Random(f"answers:{self.seed}")
        learners = {record.domain for record in drawn.train}  # whose weights are in memory, and published
        used: dict[tuple[int, ...], set[str]] = {}
        for number, chosen in enumerate(self.batches(drawn, steps)):
            owners = [owner_of(record, learners, self._chance) for record in chosen]
            texts = [one_of(record, self.further, rng) for record in chosen]
            loss = self._step(texts, owners, 1 - (1 - LAST_RATE) * number / steps)
            for record, owner in zip(chosen, owners, strict=True):
                used.setdefault(tuple(record.token_ids), set()).add(owner)
            if loss is not None:
                total, done = total + loss, done + 1
            self._done = number + 1
            on_step(self._done, total / max(done, 1))
        if not done:
            raise FloatingPointError("no step of the joint update had a finite loss.")
        counts = Counter(name for names in used.values() for name in names if name != SHARED)
        return total / done, counts + Counter({SHARED: len(used)})

    def _step(self, records: list[ReplayRecord], owners: list[str], rate: float) -> float | None:
        """One step of the owners' adapters and the shared one; None, and no step, where it is not finite."""
        plan, names = self.plan, self._learners(owners)
        loss = self.lessons.learn(records, owners, plan)
        parameters = [p for name in names for p in self.student.parameters(name)]
        norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        finite = math.isfinite(loss) and bool(norm.isfinite())
        for name in names:
            optimiser = self.optimiser(name)
            for group in optimiser.param_groups:
                group["lr"] = plan.learning_rate * rate * optimiser.rate
            if finite:
                optimiser.step()
        for name in {SHARED, *owners}:
            self.optimiser(name).zero_grad(set_to_none=True)
        return loss if finite else None

    def _learners(self, owners: Sequence[str]) -> list[str]:
        """The adapters that make a step after a batch with rows of these owners."""
        return sorted({SHARED, *owners} if self.learner is None else {*owners} - {SHARED})

    def optimiser(self, name: str) -> AveragingAdamW:
        """The optimiser of an adapter, kept between updates; an expert without records makes no steps."""
        if name not in self.optimisers:
            settled = self.versions.get(name, 0) > 0
            self.optimisers[name] = AveragingAdamW(self.student.parameters(name), settled=settled)
        return self.optimisers[name]

    @torch.no_grad()
    def measure(
        self, records: Sequence[ReplayRecord], on_batch: Callable[[], None] = lambda: None
    ) -> dict[str, tuple[float, float]]:
        """By domain, how many first guesses were accepted and how many were made; SHARED: all."""
        found: dict[str, tuple[float, float]] = {}
        for first in range(0, len(records), self.plan.rows):
            chosen = records[first : first + self.plan.rows]
            names = [record.domain for record in chosen]
            owners, guessed = self.lessons.guessed(chosen, names, 1, self.plan.max_tokens)
            for owner, (hits, tries) in zip(owners, guessed.counts[:, 0].tolist(), strict=True):
                for name in {owner, SHARED}:
                    before = found.get(name, (0.0, 0.0))
                    found[name] = before[0] + hits, before[1] + tries
            on_batch()
        return found

    def _follow(self, name: str) -> None:
        """Load the live version of `name`, unless that is what is in memory."""
        found = self.adapters.load_live(name, self.student.base_hash)
        version = found[0].version if found else 0
        if self.versions.get(name) == version:
            return
        self.forget(name)
        counts = self.vocabularies.counts(name)  # the records are there, whatever became of what they taught
        self.vocabularies.restore(name, found[1].vocabulary if found else None, counts)
        if found:
            stored = found[1]
            self.widen()
            self.student.load(name, version, stored.config, stored.tensors, stored.vocabulary)
            self.student.grow(name, scaling(stored.config, "", stored.config["r"]))
        else:
            self.student.add(name)
        self.versions[name] = version

    def _candidate(
        self,
        name: str,
        sizes: tuple[Counter[str], Counter[str]],
        steps: int,
        loss: float,
        rates: tuple[dict[str, tuple[float, float]], dict[str, tuple[float, float]]],
    ) -> Candidate:
        """Export `name`. sizes: records used and held out, by adapter; rates: `measure` before and after."""
        used, held_out = sizes
        vocabulary = self.vocabularies.of(name)
        kept = ALL if name == SHARED else self.plan.kept
        config, tensors = self.student.export(name, vocabulary, kept, self.plan.strength)
        before, after = (one.get(name, (0, 0)) for one in rates)
        return Candidate(
            expert=name,
            parent=self.versions[name],
            base_hash=self.student.base_hash,
            rank=config["r"],
            modules=self.student.modules(name),
            records=used[name],
            held_out=held_out[name],
            steps=steps,
            loss=loss,
            acceptance_before=before[0] / before[1] if before[1] else None,
            acceptance_after=after[0] / after[1] if after[1] else None,
            config=config,
            tensors=tensors,
            vocabulary=None if vocabulary is None else vocabulary.to(torch.int32),
        )
