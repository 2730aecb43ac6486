"""One run: a pattern of traffic is served in windows, and an arrangement learns from what was answered."""

from __future__ import annotations

import copy
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from evidence import tokens
from evidence.answers import TARGET, Answers
from evidence.arrangements import WIDE, Arrangement
from evidence.comparable import text_rate
from evidence.further import KeptFurther
from evidence.streams import Traffic
from moedraft.core import SHARED, Domain, ReplayRecord, UpdateRecord
from moedraft.distill.assembly import WHOLE
from moedraft.distill.features.expert_vocabularies import OWN_TOKENS
from moedraft.distill.features.feature_lessons import FeatureLessons
from moedraft.distill.features.feature_student import FeatureStudent
from moedraft.distill.joint.joint_loop import JointLoop
from moedraft.distill.joint.joint_trainer import JointTrainer
from moedraft.distill.joint.plan import JointPlan, Lessons
from moedraft.distill.judging.judge import Judge
from moedraft.distill.lora.ranks import LEADING
from moedraft.distill.measuring.measures import JointMeasure, Serving
from moedraft.distill.memory.trainer_memory import TrainerMemory
from moedraft.distill.outlet import HomeOutlet
from moedraft.distill.text.text_lessons import TextLessons
from moedraft.distill.text.text_student import TextStudent
from moedraft.feature.model import FeatureDraft
from moedraft.models import LanguageModel
from moedraft.storage.store import TARGET_ID, Store

DEPTH = 3  # tokens of a draft
BASE = "base"  # hash of the draft base, of which there is but one here


@dataclass(frozen=True)
class Plan:
    """How much is learned and measured in a run; the same for all arrangements."""

    every: int = 16  # requests of a window, after which an update follows
    steps: int = 8  # of an update
    rows: int = 12  # records of a step
    rank: int = 32  # of an expert; of the shared adapter and of one that stands alone see `Arrangement`
    measured: int = 5  # updates between two measurements on held-out prompts
    beforehand: int = 3  # times the updates of an online run, where all requests are known beforehand


@dataclass(frozen=True)
class Served:
    """A record and who would serve its prompt: a domain, or SHARED where the router knows none."""

    record: ReplayRecord
    routed: str
    weights: Mapping[str, float] = field(default_factory=dict)  # as a record's: whose text it may be


@dataclass(frozen=True)
class Bench:
    """What all runs have in common."""

    target: LanguageModel
    draft: FeatureDraft | LanguageModel
    answers: Answers
    plan: Plan
    strength: float = WHOLE  # with which adapters are published, see `JointPlan`
    own_tokens: int = OWN_TOKENS  # of an expert's list, of a feature drafter
    further: KeptFurther | None = None  # further answers to the requests
    untrained: dict[tuple[int, ...], list[int]] = field(default_factory=dict)  # counts, by token ids

    def lessons(self, rank: int, shared_rank: int) -> Lessons:
        """Of a new copy of the draft base, with adapters of these ranks."""
        if isinstance(self.draft, LanguageModel):
            student = TextStudent(copy.deepcopy(self.draft), rank=rank, shared_rank=shared_rank)
            return TextLessons(student)
        learner = FeatureStudent(_copy(self.draft), BASE, rank=rank, shared_rank=shared_rank)
        return FeatureLessons(learner, self.answers)


class Run:
    """An arrangement with a home of its own."""

    def __init__(self, bench: Bench, arrangement: Arrangement, store: Store, seed: int) -> None:
        if isinstance(bench.draft, LanguageModel):  # with a shared adapter as wide as a server's
            arrangement = replace(arrangement, shared=WIDE)
        self.bench, self.arrangement, self.store = bench, arrangement, store
        kind = arrangement.trainer or JointTrainer
        plan = bench.plan
        steps = max(1, round(plan.steps * arrangement.every))
        usual = JointPlan(steps=steps, rows=plan.rows, strength=bench.strength)
        if isinstance(bench.draft, LanguageModel):
            usual = replace(usual, learning_rate=text_rate(plan.steps), kept=LEADING)
        given = replace(usual, **arrangement.plan)
        ends, lessons = bench.target.eos_token_ids, bench.lessons(*arrangement.ranks(plan.rank))
        self.trainer = kind(lessons, store, given, ends, bench.further)
        self.trainer.vocabularies.size = min(bench.own_tokens, self.trainer.vocabularies.size)
        self.base = self.trainer.student.base_hash
        self.trainer.seed = 1000 * seed
        self.measure = JointMeasure(self.trainer, DEPTH)
        self.own_measure = self.trainer.measure  # for its log: no decision rests on it, see `learn`
        aside = isinstance(bench.draft, FeatureDraft) and (arrangement.experts or arrangement.withheld)
        if arrangement.withheld and not aside:
            raise ValueError("Only a feature drafter's base can serve single domains by itself.")
        self.judge = Judge(self.measure, store, base_serves=aside)
        judge = self.judge if arrangement.gate else None
        self.loop = JointLoop(self.trainer, store, HomeOutlet(store), 1, judge)
        self.memory = TrainerMemory(store.home.path, store.registry)
        self.loop.second_look = judge.second_look if judge and arrangement.second_look else None
        self.loop.beside_base = judge.beside_base if judge else None

    def owner(self, served: Served) -> str:
        """Whose expert drafts."""
        if not self.arrangement.experts:
            return served.routed if served.routed in self.store.registry.unadapted() else SHARED
        return served.record.domain if self.arrangement.true_labels else served.routed

    def feed(self, served: Sequence[Served]) -> None:
        """Store what was answered, under the domain that the arrangement knows of."""
        kept = [one.record if self.arrangement.true_labels else _under(one) for one in served]
        data, draft = self.arrangement.data, self.bench.draft
        if data != "target":
            assert isinstance(draft, LanguageModel), "a feature drafter cannot answer by itself"
            step = 1 if data == "draft" else 2
            kept[::step] = self.bench.answers.drafted(draft, kept[::step])
        self.store.replay.add(kept)

    def learn(self, whole: bool = False) -> dict[str, Any]:
        """One update: what it took, and what was decided.

        whole: with what the trainer measures before and after for its log; else that time is saved.
        """
        self.trainer.measure = self.own_measure if whole else lambda *_: {}  # type: ignore[method-assign]
        cpu, began = time.process_time(), time.monotonic()
        self.loop.run_once(SHARED)
        if self.loop.failures:
            raise RuntimeError(f"{self.arrangement.name}: {self.loop.state.reason}")
        if self.arrangement.withheld and not self.arrangement.gate:
            self.store.registry.set_unadapted(self.judge.untaught())
        if self.arrangement.restarted:
            self._restart()
        return {
            "cpu_seconds": round(time.process_time() - cpu, 2),
            "seconds": round(time.monotonic() - began, 2),
            "decisions": dict(Counter(one.decision or "publish" for one in self.loop.outcomes)),
            "outcomes": [_outcome(one) for one in self.loop.outcomes],
            "shared": next((o.decision or "publish" for o in self.loop.outcomes if o.expert == SHARED), ""),
        }

    def _restart(self) -> None:
        """Have the trainer lose what it has in memory, and get it back where the arrangement says so."""
        if self.arrangement.resumed:
            self.memory.keep(self.trainer, self.store.registry.purges(), now=True)  # there is no gate
        self.trainer.forget(SHARED)  # and all experts
        self.trainer.vocabularies.forget()
        if self.arrangement.resumed:
            self.memory.restore(self.trainer)

    @property
    def goes_on(self) -> bool:
        """Whether a server would make an update without new records: not after the gate threw one away."""
        return not self.arrangement.gate or bool(self.loop.again)

    def counts(self, served: Sequence[Served]) -> list[list[int]]:
        """By prompt: first guesses tried, and how many drafts had a right token number 1, 2 and 3."""
        found: list[list[int]] = [[] for _ in served]
        for owner in sorted({self.owner(one) for one in served}):
            mine = [i for i, one in enumerate(served) if self.owner(one) == owner]
            for i, row in zip(mine, self._counts(owner, [served[i].record for i in mine]), strict=True):
                found[i] = row
        return found

    def _counts(self, owner: str, records: list[ReplayRecord]) -> list[list[int]]:
        """As `counts`, of one owner. What nothing has changed is measured once for all runs."""
        serving = self.serving(owner)
        known = {} if any(serving.values()) else self.bench.untrained
        missing = [record for record in records if tuple(record.token_ids) not in known]
        counts = self.measure(serving, owner, missing, lambda: None).counts.tolist() if missing else []
        rows = ([row[0][1], *(hits for hits, _ in row)] for row in counts)
        known |= {tuple(record.token_ids): row for record, row in zip(missing, rows, strict=True)}
        return [known[tuple(record.token_ids)] for record in records]

    def serving(self, owner: str) -> Serving:
        """The adapters that draft for this owner now."""
        loaded = {name: self.store.adapters.load_live(name, self.base) for name in {SHARED, owner}}
        if owner in self.store.registry.unadapted():  # the base alone drafts for it
            loaded = dict.fromkeys(loaded)
        return {name: one[1] if one else None for name, one in loaded.items()}

    def tokens(self, served: Sequence[Served]) -> tokens.Counts:
        """Which tokens the target says there, and which are guessed."""
        found: list[tokens.Pair] = []
        for owner in sorted({self.owner(one) for one in served}):
            records = [one.record for one in served if self.owner(one) == owner]
            found += tokens.pairs(self.trainer, self.serving(owner), owner, records, self.measure.general)
        return tokens.counted(found)


AtEnd = Callable[[Run, Sequence[Served]], Any]


def _outcome(one: UpdateRecord) -> dict[str, Any]:
    """One decision and what the gate had measured, in tokens per step."""
    figures = {"gain": one.gain, "low": one.gain_low, "high": one.gain_high, "witness": one.witness}
    rounded = {name: None if value is None else round(value, 5) for name, value in figures.items()}
    who = {"expert": one.expert, "decision": one.decision or "publish"}
    return who | rounded | {"records": one.gate_records}


def run(
    bench: Bench,
    arrangement: Arrangement,
    traffic: Traffic,
    routed: Sequence[str],
    held: Sequence[Served],
    seed: int,
    *,
    weights: Sequence[Mapping[str, float]] = (),
    tell_tokens: bool = False,
    at_end: AtEnd | None = None,
) -> dict[str, Any]:
    """Serve the traffic; `routed` is the router's answer to each request. What was found, as JSON.

    weights: of each request, whose text it may be; none: as it was routed. tell_tokens: also which tokens of
    the held-out prompts' answers are guessed, before and after. at_end: is shown the run and the held-out
    prompts when all is learned; what it returns is there as "at_end".
    """
    torch.manual_seed(seed)
    records = bench.answers.records(traffic.queries)
    if bench.further:
        bench.further.prepare(records, lambda: None)
    each = weights or [{}] * len(records)
    served = [Served(*one) for one in zip(records, routed, each, strict=True)]
    with new_home(traffic.registered) as store:
        one = Run(bench, arrangement, store, seed)
        found: dict[str, Any] = {"curve": [], "stream": [], "updates": [], "operations": 0}
        found["strength"] = one.trainer.plan.strength
        found["unsure"] = sum(bool(one.weights) for one in served)
        found["resampled"] = len(bench.further.more) if bench.further else 0
        found["text_tokens"] = one.trainer.student.has_lists  # whether they are guessed beside a list
        found["learning_rate"] = one.trainer.plan.learning_rate
        found["own_tokens"] = bench.own_tokens if one.trainer.student.has_lists else None
        known = round(len(served) * arrangement.beforehand)
        before = one.tokens(held) if tell_tokens else None
        _learn_beforehand(one, served[:known], found)
        _go_online(one, served, known, held, found, traffic.turns)
        if tell_tokens:
            found["tokens"] = {"before": before, "after": one.tokens(held)}
        if at_end:
            found["at_end"] = at_end(one, held)
    words = {"held_out": [h.record.domain for h in held], "domains": [s.record.domain for s in served]}
    return words | {"routed": list(routed), "target_operations": _target_operations(bench, records)} | found


def _learn_beforehand(one: Run, known: Sequence[Served], found: dict[str, Any]) -> None:
    """Many updates from requests that are known before any is served."""
    plan = one.bench.plan
    for start in range(0, len(known), plan.every):
        one.feed(known[start : start + plan.every])
    for _ in range(plan.beforehand * (len(known) // plan.every)):
        found["updates"].append({"requests": 0, **_counted(one, found)})


def _go_online(
    one: Run,
    served: Sequence[Served],
    known: int,
    held: Sequence[Served],
    found: dict[str, Any],
    turns: Sequence[int],
) -> None:
    """Windows of requests, each followed by an update; held-out prompts before, now and then, and after.

    Where the traffic turns, what serves is measured twice: at the turn itself, before anything that comes
    later was learned from, and at the end of the window, when all that came before was. On a window's end
    the two are one.
    """
    plan, arrangement = one.bench.plan, one.arrangement
    width = max(1, round(plan.every * arrangement.every))
    learns = arrangement.trainer is not None
    _note(one, known, held, found)
    for number, begin in enumerate(range(known, len(served), width), start=1):
        window = served[begin : begin + width]
        done = begin + len(window)
        turned = [turn for turn in turns if begin < turn <= done]
        for turn in turned:
            if learns and turn < done:
                _note(one, turn, held, found)
        found["stream"] += one.counts(window)
        if learns:
            one.feed(window)
            found["updates"].append({"requests": done, **_counted(one, found)})
            for _ in range(arrangement.further):
                if one.goes_on:
                    found["updates"].append({"requests": done, **_counted(one, found)})
        due = turned or number % max(1, round(plan.measured / arrangement.every)) == 0
        if done == len(served) or (due and learns):
            _note(one, done, held, found)


def _note(one: Run, done: int, held: Sequence[Served], found: dict[str, Any]) -> None:
    found["curve"].append({"requests": done, "updates": len(found["updates"]), "counts": one.counts(held)})


def _counted(one: Run, found: dict[str, Any]) -> dict[str, Any]:
    """An update; of the second one the operations are counted, which all others are taken to be like."""
    if len(found["updates"]) != 1:
        return one.learn()
    with FlopCounterMode(display=False) as counter:
        update = one.learn(whole=True)
    found["operations"] = counter.get_total_flops()
    return update


def _target_operations(bench: Bench, records: Sequence[ReplayRecord]) -> int:
    """Of the target for these requests: two for each weight and token, attention left out."""
    weights: int = sum(parameter.numel() for parameter in bench.target.hf.parameters())
    return 2 * weights * sum(len(record.token_ids) for record in records)


def _under(served: Served) -> ReplayRecord:
    return replace(served.record, domain=served.routed, expert=served.routed, weights=dict(served.weights))


def _copy(draft: FeatureDraft) -> FeatureDraft:
    """A copy that shares the target's own matrices."""
    shared = (draft.embeddings, draft.lm_head.weight, draft.output)
    return copy.deepcopy(draft, {id(tensor): tensor for tensor in shared})


@contextmanager
def new_home(domains: Sequence[str]) -> Iterator[Store]:
    """A new home in a temporary folder, with these domains."""
    with tempfile.TemporaryDirectory(prefix="evidence-") as folder:
        store = Store.open(Path(folder))
        for name in domains:
            store.registry.add_domain(Domain(name, "", ("example",) * 2, 0.0))
        store.registry.set_meta(TARGET_ID, TARGET)
        try:
            yield store
        finally:
            store.close()
