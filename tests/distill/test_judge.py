"""Candidates before the gate: the right records, exactly what would serve, and what becomes of each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from candidates import candidate
from distill_rig import record
from feature_records import a_batch, a_draft, a_record, a_target, stir

from moedraft.core import SHARED, Domain, InvalidRequest, ReplayRecord, StorageError
from moedraft.distill.features.feature_lessons import FeatureLessons
from moedraft.distill.features.feature_student import FeatureStudent
from moedraft.distill.features.record_states import RecordStates
from moedraft.distill.guessing.feature_guesses import acceptance
from moedraft.distill.guessing.text_guesses import runs
from moedraft.distill.joint.joint_loop import JointLoop
from moedraft.distill.joint.joint_trainer import JointTrainer, JointUpdate
from moedraft.distill.joint.plan import JointPlan
from moedraft.distill.judging.gate import MOST_KEPT
from moedraft.distill.judging.held_out import LEAST, LEAST_JUDGED, MOST, TOGETHER, HeldOut
from moedraft.distill.judging.judge import ENOUGH, OF_LATE, TAUGHT, Judge
from moedraft.distill.loop import LEAST_GAIN, DistillLoop
from moedraft.distill.measuring.figures import FEW, Measured
from moedraft.distill.measuring.measures import JointMeasure, Serving, TextMeasure, instead
from moedraft.distill.measuring.remembered import Remembered
from moedraft.distill.outlet import HomeOutlet
from moedraft.distill.single.trainer import Trainer
from moedraft.distill.text.batches import collate as collate_text
from moedraft.distill.warmstart import OnTrial
from moedraft.storage import changes
from moedraft.storage.filing import file_under, filed
from moedraft.storage.retention.holding import is_held_out
from moedraft.storage.store import Store
from moedraft.storage.versions import version_rows

from random_models import random_model


@pytest.fixture
def store(store: Store) -> Store:
    """With two domains."""
    for name in ("code", "prose"):
        store.registry.add_domain(Domain(name, "", ("x",) * 8, 0.0))
    store.registry.set_meta("target_id", "tiny")
    return store


def held_out(count: int, domain: str = "code", first: int = 0) -> list[ReplayRecord]:
    """Records of different prompts that no update is trained on."""
    found = (record(number, domain) for number in range(first, first + 20 * count + 200))
    return [replace(one, held_out=True) for one in found if is_held_out(one)][:count]


# -- the records -----------------------------------------------------------------------------------


def test_the_newest_held_out_records_of_a_domain_are_found(store: Store) -> None:
    store.replay.add([record(number) for number in range(400)])
    mine = [one for one in store.replay.records(newest_first=False) if is_held_out(one)]
    pool = HeldOut(store.replay)
    found = pool.records("code", 1, "tiny")
    assert [one.token_ids for one in found] == [one.token_ids for one in reversed(mine[-MOST:])]
    newer = held_out(2, first=1000)
    store.replay.add(newer)
    again = pool.records("code", 1, "tiny")
    assert [one.token_ids for one in again[:2]] == [newer[1].token_ids, newer[0].token_ids]
    assert len(again) == MOST
    assert len(pool.records("code", TOGETHER, "tiny")) == LEAST
    assert pool.records("prose", 1, "tiny") == []
    assert pool.records("code", 1, "other") == []


def test_one_prompt_counts_once_and_what_is_purged_is_gone(store: Store) -> None:
    one, *others = held_out(4)
    store.replay.add([one] * 30 + others + [replace(one, accepted=1)])
    pool = HeldOut(store.replay)
    found = pool.records("code", 1, None)
    assert len(found) == 4
    assert found[0].accepted == 1
    store.replay.purge("code")
    assert pool.records("code", 1, None) == []


def test_records_that_were_evicted_make_room_for_older_ones(tmp_path: Path) -> None:
    """With a policy that removes the newest records, those that are left still judge."""
    store = Store.open(tmp_path / "small", replay_capacity=60, replay_policy="hardest")
    store.registry.add_domain(Domain("code", "", ("x",) * 8, 0.0))
    store.replay.add([replace(one, drafted=9, accepted=0) for one in held_out(40)])
    pool = HeldOut(store.replay)
    pool.records("code", 1, None)
    store.replay.add([replace(one, drafted=9, accepted=5) for one in held_out(20, first=50_000)])
    assert len(pool.records("code", 1, None)) == MOST
    store.replay.add([replace(one, drafted=9, accepted=1) for one in held_out(40, first=90_000)])
    assert len(pool.records("code", 1, None)) == MOST
    store.close()


@pytest.mark.parametrize("pinned", [False, True])
def test_no_client_owns_the_held_out_records(store: Store, pinned: bool) -> None:
    """A flood of one client's prompts, all different, leaves the others their part."""
    others = [replace(one, source="others") for one in held_out(20)]
    flood = [replace(one, source="flood", pinned=pinned) for one in held_out(150, first=50_000)]
    store.replay.add(others)
    pool = HeldOut(store.replay)
    pool.records("code", 1, None)
    for first in range(0, len(flood), 50):
        store.replay.add(flood[first : first + 50])
        found = pool.records("code", 1, None)
    sources = Counter(one.source for one in found)
    assert len(found) >= MOST * 3 // 4
    assert sources["others"] >= len(found) // 2


@pytest.mark.parametrize("pinned", [False, True])
def test_a_flood_hides_nobody_from_a_single_look(store: Store, pinned: bool) -> None:
    """Ten records of others, and then so many of one client that all of the newest are its own."""
    store.replay.add([replace(one, source="others") for one in held_out(10)])
    flood = [replace(record(50_000 + n), source="flood", pinned=pinned) for n in range(300)]
    store.replay.add(flood)
    found = HeldOut(store.replay).records("code", 1, None)
    assert Counter(one.source for one in found) == {"others": 10, "flood": 10}


def test_one_client_has_no_more_of_the_held_out_records_than_all_others_or_three(store: Store) -> None:
    store.replay.add([replace(one, source="flood", pinned=True) for one in held_out(12, first=50_000)])
    pool = HeldOut(store.replay)
    assert len(pool.records("code", 1, None)) == 12  # where there are no others
    store.replay.add([replace(one, source="others") for one in held_out(1)])
    assert Counter(one.source for one in pool.records("code", 1, None)) == {"others": 1, "flood": 3}
    store.replay.add([replace(one, source="third") for one in held_out(3, first=9000)])
    sources = Counter(one.source for one in pool.records("code", 1, None))
    assert sources == {"others": 1, "third": 3, "flood": 4}


# -- what is measured ------------------------------------------------------------------------------


def test_runs_are_drafts_from_every_token_on() -> None:
    right = np.array([True, True, False, True])
    assert runs(right, 3).tolist() == [[3, 4], [1, 2], [0, 1]]
    assert runs(right[:1], 3).tolist() == [[1, 1], [0, 0], [0, 0]]


def a_joint_trainer(store: Store) -> tuple[JointTrainer, Any]:
    target = a_target()
    draft = a_draft(target)
    student = FeatureStudent(draft, "base", rank=4, shared_rank=6)
    plan = JointPlan(steps=3, rows=4, learning_rate=1e-3, unrolled=2)
    return JointTrainer(FeatureLessons(student, RecordStates(target, draft)), store, plan), target


def test_a_joint_measure_is_what_would_serve_and_leaves_no_trace(store: Store) -> None:
    trainer, target = a_joint_trainer(store)
    student = trainer.student
    measure = JointMeasure(trainer, 3)
    for name in (SHARED, "code"):
        student.add(name)
    stir(student)
    stored = {
        name: candidate(name, config=c, tensors=t)
        for name in (SHARED, "code")
        for c, t in [student.export(name)]
    }
    records = [a_record(target, seed) for seed in range(FEW - 1)]
    with student.precision():
        expected = acceptance(student, a_batch(target, student.draft, records), 3)
    stir(student, seed=1)  # what learns is something else by now
    parameters = {name: student.parameters(name) for name in (SHARED, "code")}
    values = {name: [p.clone() for p in own] for name, own in parameters.items()}
    found = measure(stored, "code", records, lambda: None)
    assert found.counts.tolist() == expected.tolist()
    assert found.loss is not None
    plain = measure({SHARED: None, "code": None}, "code", records, lambda: None)
    assert plain.loss != found.loss
    for name, own in parameters.items():
        assert all(now is before for now, before in zip(student.parameters(name), own, strict=True))
        assert all(torch.equal(p, v) for p, v in zip(own, values[name], strict=True))
    assert student.names == {SHARED, "code"}


def test_an_experts_own_tokens_and_those_of_the_text_are_all_that_it_drafts(store: Store) -> None:
    trainer, target = a_joint_trainer(store)
    trainer.student.add("code")
    config, tensors = trainer.student.export("code", torch.tensor([1, 2, 3]))
    own = candidate(
        "code", config=config, tensors=tensors, vocabulary=torch.tensor([1, 2, 3], dtype=torch.int32)
    )
    some = a_record(target, 1, answer=12)
    measure = JointMeasure(trainer, 2)
    other = replace(some, token_ids=[1, 2, 3, 1, 2, 3, *range(5, 17)])  # no token stands before itself
    found = measure({SHARED: None, "code": own}, "code", [other], lambda: None)
    assert found.counts[0, :, 0].tolist() == [0, 0]
    assert found.counts[0, 0, 1] == 11
    again = replace(some, token_ids=[1, 2, 3, 1, 2, 3, *[5] * 12])
    found = measure({SHARED: None, "code": own}, "code", [again], lambda: None)
    assert found.chances is not None
    assert found.chances[0, 0] > 0, "it stands in the text from the second time on"


def test_what_stood_instead_goes_even_after_an_error(store: Store) -> None:
    student = a_joint_trainer(store)[0].student
    student.add("code")
    own = student.parameters("code")

    def fail() -> None:
        with instead(student, {SHARED: None, "code": None}):
            assert student.names == set()
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert all(now is before for now, before in zip(student.parameters("code"), own, strict=True))


def test_a_text_measure_is_what_would_serve_and_leaves_no_trace(store: Store) -> None:
    trainer = Trainer(
        random_model("llama", 1, layers=2), store, rank=4, shared_rank=4, steps=2, learning_rate=0.05
    )
    store.replay.add([record(number) for number in range(24)])
    first = trainer.update("code")
    assert first is not None
    records = held_out(FEW - 1)
    measure = TextMeasure(trainer, 4)
    found = measure({SHARED: None, "code": first}, "code", records, lambda: None)
    assert trainer.measure(records, lambda: None) == pytest.approx(
        found.counts[:, 0, 0].sum() / found.counts[:, 0, 1].sum()
    )
    plain = measure({SHARED: None}, "code", records, lambda: None)
    assert plain.loss is not None
    assert found.loss is not None
    assert found.loss < plain.loss
    now = trainer.student.export("code")[1]
    assert all(torch.equal(first.tensors[name], now[name]) for name in now)
    assert set(trainer.student.model.peft_config) == {"adapter_shared", "adapter_code"}


@pytest.mark.parametrize("first", [None, SHARED, "code"])
def test_what_serves_can_be_measured_before_and_after_anything_was_learned(
    store: Store, first: str | None
) -> None:
    """Versions are looked at again in a trainer that has just begun, and after updates that were dropped."""
    plain, trainer = random_model("llama", 1, layers=2), Trainer(random_model("llama", 1, layers=2), store)
    store.replay.add([record(number) for number in range(24)])
    if first is not None:
        assert trainer.update(first, steps=1) is not None
        for name in ("code", SHARED):
            trainer.forget(name)
    records = held_out(FEW - 1)
    measure = TextMeasure(trainer, 4)
    found = measure({SHARED: None}, "code", records, lambda: None)
    batch = collate_text(records, plain.device, trainer.tokens_per_step, plain.vocab_size)
    with torch.no_grad():
        best = plain.hf(batch.token_ids).logits[:, -batch.keep :][batch.mask].argmax(-1)
    assert found.counts[:, 0, 0].sum() == (best == batch.topk_ids[:, 0]).sum()
    made = trainer.update("code", steps=1)
    assert made is not None
    trainer.forget("code")
    measure({SHARED: None, "code": made}, "code", records, lambda: None)
    measure({SHARED: None}, "code", records, lambda: None)


def test_an_expert_is_not_trained_on_a_shared_adapter_that_is_only_kept(store: Store) -> None:
    trainer = Trainer(
        random_model("llama", 1, layers=2), store, rank=4, shared_rank=4, steps=2, learning_rate=0.05
    )
    store.replay.add([record(number) for number in range(24)])
    made = trainer.update(SHARED)
    assert made is not None
    trainer.kept(made)
    trainer.student.activate("code")
    assert not trainer.student.export(SHARED)[1]["base_model.model.lm_head.lora_B.weight"].any()
    trainer.student.activate(SHARED)
    again = trainer.student.export(SHARED)[1]
    assert all(torch.equal(made.tensors[name], again[name]) for name in again)


# -- what becomes of a candidate ------------------------------------------------------------------


@dataclass
class Figures:
    """Measures what its table says: the share of right guesses of what serves, by domain."""

    share: Callable[[Serving, str], float]
    asked: list[str] = field(default_factory=list)
    records: list[int] = field(default_factory=list)

    def __call__(
        self, serving: Serving, domain: str, records: Sequence[ReplayRecord], on_batch: Callable[[], None]
    ) -> Measured:
        self.asked.append(domain)
        self.records.append(len(records))
        share, tries = self.share(serving, domain), 100
        right = [round(tries * share) + (index % 3) for index in range(len(records))]
        return Measured(np.array([[[one, tries]] for one in right]).reshape(-1, 1, 2), 1 - share)


@dataclass
class FakeTrainer:
    """Learns at once; its candidates say by their tensor how good they are."""

    value: dict[str, float] = field(default_factory=dict)
    parents: dict[str, int] = field(default_factory=dict)
    outcomes: list[str] = field(default_factory=list)
    seed: int = 0
    last_id: int = 0

    def candidate(self, name: str) -> Any:
        return candidate(name, self.value.get(name, 0.0), parent=self.parents.get(name, 0))

    def published(self, version: Any) -> None:
        self.parents[version.domain] = version.version
        self.outcomes.append(f"{version.domain} v{version.version}")

    def kept(self, made: Any) -> None:
        self.outcomes.append(f"{made.expert} kept")

    def forget(self, name: str) -> None:
        self.outcomes.append(f"{name} forgotten")


class One(FakeTrainer):
    def update(self, expert: str, **_: object) -> Any:
        return self.candidate(expert)


class Together(FakeTrainer):
    learner: str | None = None

    def update(self, **_: object) -> Any:
        return JointUpdate(tuple(self.candidate(name) for name in (SHARED, "code")), last_id=7, loss=0.5)


def by_tensors(serving: Serving, domain: str) -> float:
    """Half, and what the values of the adapters that serve say."""
    found = [one.tensors["lora_A"].mean().item() for one in serving.values() if one is not None]
    return 0.5 + sum(found)


def loop_of(store: Store, kind: type[FakeTrainer] = One, count: int = 8, **value: float) -> tuple[Any, Any]:
    """A loop and its trainer, in a home with `count` held-out records of each of two domains."""
    for name in ("code", "prose"):
        store.replay.add(held_out(count, name, first=0 if name == "code" else 5000))
    trainer = kind({"shared": 0.0, **value})
    loop = JointLoop if kind is Together else DistillLoop
    figures = Figures(by_tensors)
    judge = Judge(figures, store)
    judge.measure = figures  # tests change its table; what is remembered has tests of its own
    return loop(trainer, store, HomeOutlet(store), 4, judge), trainer  # type: ignore[arg-type]


def test_what_is_better_is_published_with_its_figures(store: Store) -> None:
    loop, _ = loop_of(store, code=0.1)
    update = loop.run_once("code")
    assert update is not None
    assert update.version == store.registry.live("code")
    [one] = store.updates.recent()
    assert (one.decision, one.version, one.parent, one.stood_on) == ("promote", 1, 0, 0)
    assert one.gain == pytest.approx(0.1, abs=0.02)
    assert one.gain_low is not None
    assert one.gain_low > 0
    assert one.gate_records == 8
    assert set(loop.judge.measure.asked) == {"code"}
    assert loop.outcomes == [one]


def test_what_is_worse_is_thrown_away_and_its_records_still_get_their_turn(store: Store) -> None:
    loop, trainer = loop_of(store, code=-0.1, prose=-0.1, shared=-0.1)
    assert loop.run_once("code") is None
    assert not loop.state.is_paused
    assert trainer.outcomes == ["code forgotten"]
    assert store.registry.live("code") is None
    [one] = store.updates.recent()
    assert (one.decision, one.version) == ("discard", 0)
    assert one.gain_high is not None
    assert one.gain_high < 0
    tried = []
    for start in range(100, 1000, 50):
        store.replay.add([record(start + n, name) for n in range(8) for name in ("code", "prose")])
        tried.append(loop.due())
        loop.run_once()
    assert min(tried.count(name) for name in (SHARED, "code", "prose")) >= 2
    assert store.registry.versions() == []
    assert max(loop.gains.values()) < LEAST_GAIN


def test_looks_without_new_records_do_not_use_up_a_candidates_time(store: Store) -> None:
    loop, trainer = loop_of(store, code=0.0)
    for _ in range(3 * MOST_KEPT):
        loop.run_once("code")
    assert trainer.outcomes == ["code kept"] * 3 * MOST_KEPT


def test_what_makes_no_difference_is_trained_on_for_a_while(store: Store) -> None:
    loop, trainer = loop_of(store, code=0.0)
    for number in range(MOST_KEPT + 2):
        store.replay.add([record(5000 + number)])
        assert loop.run_once("code") is None
    assert trainer.outcomes == [*["code kept"] * MOST_KEPT, "code forgotten", "code kept"]
    trainer.value["code"] = 0.1
    assert loop.run_once("code") is not None


def test_a_shared_adapter_is_measured_on_every_domain(store: Store) -> None:
    loop, _ = loop_of(store)
    loop.judge.measure.share = lambda serving, domain: (
        0.5 if serving[SHARED] is None else {"code": 0.9, "prose": 0.3}[domain]
    )
    assert loop.run_once(SHARED) is None  # it helps one domain at the cost of the other
    assert set(loop.judge.measure.asked) == {"code", "prose"}
    assert store.updates.recent()[-1].decision == "keep"
    loop.judge.measure.share = lambda serving, domain: 0.5 if serving[SHARED] is None else 0.6
    assert loop.run_once(SHARED) is not None


def test_a_joint_update_is_published_together(store: Store) -> None:
    loop, trainer = loop_of(store, Together, shared=0.1, code=0.1)
    assert loop.run_once() is not None
    assert trainer.outcomes == ["shared v1", "code v1"]
    found = {one.expert: one for one in store.updates.recent()}
    assert (found["code"].stood_on, found[SHARED].stood_on) == (1, None)
    assert found["code"].gain == pytest.approx(0.2, abs=0.03)
    assert found[SHARED].gate_records == 16


def traffic(store: Store) -> dict[str, float]:
    return store.replay.traffic(OF_LATE, LEAST_JUDGED, filed(store.registry))


def test_half_of_the_traffic_is_that_of_late(store: Store) -> None:
    """After a shift an update is judged for those who ask now, without forgetting the others."""
    assert traffic(store) == {}
    store.replay.add([record(n, "prose") for n in range(3 * OF_LATE)])
    assert traffic(store) == {"prose": 1.0}
    store.replay.add([record(1000 + n, "code") for n in range(OF_LATE)])
    assert traffic(store) == {"code": 0.625, "prose": 0.375}
    store.replay.add([record(2000 + n, SHARED) for n in range(OF_LATE // 2)])
    shares = traffic(store)
    assert shares == pytest.approx({"code": 1 / 9 + 1 / 4, "prose": 1 / 3, SHARED: 1 / 18 + 1 / 4})
    store.replay.purge("code")
    assert set(traffic(store)) == {"prose", SHARED}


def test_neither_one_prompt_nor_one_client_nor_filing_is_the_traffic_of_late(store: Store) -> None:
    calm = [replace(record(n, "prose"), source="one") for n in range(OF_LATE)]
    store.replay.add(calm)
    store.replay.add([record(1000, "code")] * OF_LATE)
    probed = traffic(store)
    assert probed["code"] == pytest.approx((1 / 2 + 1 / OF_LATE) / 2), "a prompt that comes again is one"
    store.replay.purge("code")
    store.replay.add([replace(record(2000 + n, "code"), source="two") for n in range(OF_LATE)])
    assert traffic(store)["code"] == pytest.approx((1 / 2 + 1 / 2) / 2)
    store.replay.purge("code")
    store.replay.add([record(3000 + n, SHARED) for n in range(4)])
    old = store.replay.last_id()
    store.replay.add([replace(record(4000 + n, "prose"), source="three") for n in range(OF_LATE)])
    assert file_under(store, "code", list(range(old - 3, old + 1))) == 4
    assert traffic(store)["code"] == pytest.approx(4 / (2 * OF_LATE + 4) / 2)


@pytest.mark.parametrize("base_serves", [True, False])
def test_the_base_serves_a_domain_until_something_was_learned_of_it(store: Store, base_serves: bool) -> None:
    """What the shared adapter learned of others does harm there; with an independent draft it does not."""
    store.replay.add([*held_out(8, "prose", first=5000), *held_out(TAUGHT - 1)])
    trainer = Together({"shared": 0.1, "code": 0.1})
    judge = Judge(Figures(by_tensors), store, base_serves=base_serves)
    loop = JointLoop(trainer, store, HomeOutlet(store), 4, judge)  # type: ignore[arg-type]
    assert loop.run_once() is not None
    assert store.registry.unadapted() == ({"code"} if base_serves else set())
    assert trainer.outcomes == ["shared v1", *([] if base_serves else ["code v1"])]
    store.replay.add([record(9999, "code")])
    if base_serves:
        assert store.registry.unadapted() == {"code"}, "nothing was published since"
        assert loop.run_once() is not None
    assert store.registry.unadapted() == set()
    assert store.registry.live("code") is not None


def test_nobody_is_left_to_the_base_against_a_persons_choice(store: Store) -> None:
    store.replay.add(held_out(8, "prose", first=5000))
    changes.pin(store, "code")
    judge = Judge(Figures(by_tensors), store, base_serves=True)
    loop = JointLoop(Together({"shared": 0.1}), store, HomeOutlet(store), 4, judge)  # type: ignore[arg-type]
    assert loop.run_once() is not None
    assert store.registry.unadapted() == set()


def test_a_warm_start_of_few_answers_is_judged_too(store: Store) -> None:
    """It teaches one expert alone, so there is no shared adapter that its domain would be kept from."""

    class OfOne(Together):
        learner = "code"

        def update(self, **_: object) -> Any:
            return JointUpdate((self.candidate("code"),), last_id=7, loss=0.5)

    store.replay.add(held_out(2))
    judge = Judge(Figures(by_tensors), store, base_serves=True)
    trainer = OfOne({"code": 0.1})
    loop = JointLoop(trainer, store, HomeOutlet(store), 4, judge)  # type: ignore[arg-type]
    loop.run_once("code")
    assert not loop.failures
    assert trainer.outcomes


def test_a_pinned_shared_adapter_serves_the_domains_that_it_was_kept_from(store: Store) -> None:
    """No later publication could end that."""
    store.replay.add(held_out(8, "prose", first=5000))
    loop = JointLoop(
        Together({"shared": 0.1}),  # type: ignore[arg-type]
        store,
        HomeOutlet(store),
        4,
        Judge(Figures(by_tensors), store, base_serves=True),
    )
    loop.run_once()
    assert store.registry.unadapted() == {"code"}
    changes.pin(store, SHARED)
    assert store.registry.unadapted() == set()


def test_an_expert_that_learned_badly_stays_behind(store: Store) -> None:
    loop, trainer = loop_of(store, Together, shared=0.1, code=-0.3)
    update = loop.run_once("code")
    assert update is not None
    assert update.expert == SHARED
    assert trainer.outcomes == ["shared v1", "code forgotten"]
    assert store.registry.live("code") is None


def test_a_joint_update_that_harms_is_thrown_away_as_a_whole(store: Store) -> None:
    loop, trainer = loop_of(store, Together, shared=-0.2, code=-0.1)
    assert loop.run_once() is None
    assert trainer.outcomes == ["shared forgotten", "code forgotten"]
    assert store.registry.versions() == []


# -- people win over the gate ---------------------------------------------------------------------


@pytest.mark.parametrize("gate", [True, False])
def test_a_pinned_adapter_gets_no_version(store: Store, gate: bool) -> None:
    loop, trainer = loop_of(store, code=0.1)
    loop.judge = loop.judge if gate else None
    changes.pin(store, "code")
    assert loop.run_once("code") is None
    assert trainer.outcomes == ["code forgotten"]
    with pytest.raises(InvalidRequest, match="'code' is pinned"):
        loop.outlet.publish([trainer.candidate("code")])
    assert loop.due() != "code"
    changes.pin(store, "code", pinned=False)
    assert loop.run_once("code") is not None


def test_a_pinned_expert_of_a_joint_update_stays_while_the_others_go(store: Store) -> None:
    loop, trainer = loop_of(store, Together, shared=0.1, code=0.1)
    changes.pin(store, "code")
    assert loop.run_once() is not None
    assert trainer.outcomes == ["shared v1", "code forgotten"]
    changes.pin(store, SHARED)
    assert loop.due() is None
    assert loop.run_once(SHARED) is None


def test_a_pin_goes_with_its_domain(store: Store) -> None:
    changes.pin(store, "code")
    store.registry.remove_domain("code")
    store.registry.add_domain(Domain("code", "", ("x",) * 8, 0.0))
    assert not changes.is_pinned(store.registry, "code")
    with pytest.raises(InvalidRequest):
        changes.pin(store, "law")


# -- after a restart ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [One, Together])
def test_a_new_loop_knows_what_the_one_before_learned(store: Store, kind: type[FakeTrainer]) -> None:
    loop, before = loop_of(store, kind, shared=0.1, code=0.1)
    loop.run_once("code")
    before.value = {"code": -0.3, "shared": -0.3}
    loop.run_once("code")
    again, trainer = loop_of(store, kind)
    again.resume()
    assert again.gains == loop.gains
    assert {one.decision for one in store.updates.recent("code")} == {"promote", "discard"}
    assert trainer.seed == len(store.updates.recent())
    assert trainer.last_id == (7 if kind is Together else 0)


# -- the whole ------------------------------------------------------------------------------------


def test_a_poisoned_joint_update_changes_nothing_that_serves(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, target = a_joint_trainer(store)
    records = [a_record(target, seed, domain="code", topk=8) for seed in range(70)]
    store.replay.add([greedy(one) for one in records])
    judge = Judge(JointMeasure(trainer, 3), store)
    loop = JointLoop(trainer, store, HomeOutlet(store), 4, judge)
    trainer.plan = replace(trainer.plan, learning_rate=2e-2)
    for _ in range(4):
        loop.run_once(SHARED, steps=10)
    before = {name: store.registry.live(name) for name in (SHARED, "code")}
    train = trainer._train

    def poisoned(*args: Any) -> Any:
        done = train(*args)
        for name in trainer.student.names:
            for parameter in trainer.student.parameters(name):
                parameter.data.copy_(torch.randn_like(parameter))
        return done

    monkeypatch.setattr(trainer, "_train", poisoned)
    for _ in range(3):
        assert loop.run_once(SHARED, steps=1) is None
    assert {name: store.registry.live(name) for name in (SHARED, "code")} == before
    last = store.updates.recent()[-2:]
    assert {one.expert for one in last} == {SHARED, "code"}
    assert all(one.decision in ("keep", "discard") for one in last)


def greedy(one: ReplayRecord) -> ReplayRecord:
    """An easy text: the answer is one token again and again, and the target is sure of it."""
    answer = len(one.topk_ids)
    token = 3
    return replace(
        one,
        token_ids=[*one.token_ids[: one.num_prompt_tokens], *[token] * answer],
        topk_ids=[[token, 4]] * answer,
        topk_logprobs=[[-0.01, -5.0]] * answer,
    )


# -- the draft without any adapter, and who may be published -----------------------------------------


def test_an_expert_below_the_untrained_draft_loses_its_version(store: Store) -> None:
    loop, trainer = loop_of(store, Together, shared=0.1, code=0.1)
    assert loop.run_once() is not None
    prose = store.adapters.publish(candidate("prose", -0.3))
    assert prose.stood_on == 1
    trainer.value = {SHARED: 0.2, "code": 0.15}
    assert loop.run_once() is not None
    assert store.registry.live("prose") is None
    [one] = store.updates.recent("prose")
    assert (one.decision, one.version, one.parent, one.records) == ("reset", 0, 1, 0)
    assert one.static_gain is not None
    assert one.static_gain < 0
    assert "without any adapter" in (one.reason or "")
    assert "prose forgotten" in trainer.outcomes
    assert loop.run_once() is None or store.registry.live("prose") is None


def test_a_pinned_expert_below_the_untrained_draft_stays(store: Store) -> None:
    loop, trainer = loop_of(store, Together, shared=0.1, code=0.1)
    loop.run_once()
    prose = store.adapters.publish(candidate("prose", -0.3))
    changes.pin(store, "prose")
    trainer.value = {SHARED: 0.2, "code": 0.15}
    loop.run_once()
    assert store.registry.live("prose") == prose


def test_an_expert_that_learned_alone_is_measured_against_the_untrained_draft(store: Store) -> None:
    loop, _ = loop_of(store, code=0.1)
    store.adapters.publish(candidate("code", -0.4))
    loop.trainer.parents["code"] = 1
    loop.trainer.value["code"] = -0.2  # better than what serves, and worse than nothing
    assert loop.run_once("code") is None
    assert store.registry.live("code") is None
    [one] = store.updates.recent("code")
    assert (one.decision, one.version) == ("reset", 0)


def test_what_serves_and_the_untrained_draft_are_measured_on_new_records_alone(store: Store) -> None:
    loop, trainer = loop_of(store, Together, shared=0.1, code=0.1)
    figures = loop.judge.measure
    loop.judge.measure = Remembered(figures)
    assert loop.run_once() is not None

    def measured_on(value: float) -> list[int]:
        """How many records of "code" were measured each time in an update that is not published."""
        figures.asked.clear()
        figures.records.clear()
        trainer.value = {SHARED: value, "code": value}
        assert loop.run_once() is None
        asked = zip(figures.asked, figures.records, strict=True)
        return [count for domain, count in asked if domain == "code"]

    candidates = [8, 8, 8]  # above the new shared adapter: the new expert, the one that serves, and none
    assert measured_on(0.05) == candidates
    store.replay.add(held_out(3, "code", first=9000))
    assert sorted(measured_on(0.04)) == [3, 3, *(11 for _ in candidates)]


def test_what_was_measured_of_purged_records_is_forgotten(store: Store) -> None:
    loop, trainer = loop_of(store, shared=0.1, code=0.1, prose=0.1)
    loop.judge.measure = measure = Remembered(loop.judge.measure)
    assert loop.run_once("code") is not None
    assert loop.run_once("prose") is not None
    assert {"code", "prose"} <= measure._known.keys()
    store.replay.purge("prose")
    trainer.value["code"] = 0.05
    loop.run_once("code")
    assert set(measure._known) == {"code"}


def test_a_joint_update_that_cannot_be_stored_leaves_all_as_it_was(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, trainer = loop_of(store, Together, shared=0.1, code=0.1)
    loop.run_once()
    before = [store.registry.live(name) for name in (SHARED, "code")]
    trainer.value = {SHARED: 0.3, "code": 0.3}
    insert = version_rows.insert_version

    def broken(connection: Any, version: Any) -> None:
        if version.domain == "code":
            raise StorageError("The disk is full.")
        insert(connection, version)

    monkeypatch.setattr("moedraft.storage.registry.insert_version", broken)
    assert loop.run_once() is None
    assert loop.state.is_paused
    assert [store.registry.live(name) for name in (SHARED, "code")] == before
    assert trainer.outcomes[-2:] == ["shared forgotten", "code forgotten"]


def test_a_trial_publishes_no_other_domains_adapter(store: Store) -> None:
    loop, trainer = loop_of(store, Together, 1, shared=-0.2, code=-0.1)
    loop.judge = OnTrial(loop.judge, "code")
    assert loop.run_once("code") is not None
    assert store.registry.live("code") is not None
    assert store.registry.live(SHARED) is None
    assert sorted(trainer.outcomes) == ["code v1", "shared kept"]
    [one] = store.updates.recent("code")
    assert one.decision == "along"
    assert "trial" in (one.reason or "")
    changes.pin(store, "code")
    assert loop.run_once("code") is None


@pytest.mark.parametrize("count", [8, FEW])
def test_what_the_gate_can_judge_is_not_published_on_trial(store: Store, count: int) -> None:
    loop, _ = loop_of(store, count=count, code=-0.1)
    loop.judge = OnTrial(loop.judge, "code")
    assert loop.run_once("code") is None
    assert store.registry.live("code") is None


def test_a_pinned_shared_adapter_says_why_nothing_is_due(store: Store) -> None:
    joint, _ = loop_of(store, Together)
    alone, _ = loop_of(store, One)
    assert joint.held_up() is None
    changes.pin(store, SHARED)
    assert "adapter unpin shared" in joint.held_up()
    assert alone.held_up() is None


# -- the base alone --------------------------------------------------------------------------------


def harmed(serving: Serving, domain: str) -> float:
    """Adapters help everybody but "code", which they harm."""
    return 0.5 if all(one is None for one in serving.values()) else {"code": 0.3, "prose": 0.8}[domain]


def test_a_domain_that_adapters_harm_is_left_to_the_base_until_they_help(store: Store) -> None:
    loop, trainer = loop_of(store, Together, shared=0.1, code=0.1)
    store.replay.add([*held_out(ENOUGH, "code", first=9000), *held_out(ENOUGH, "prose", first=14000)])
    loop.judge.base_serves, loop.judge.measure.share = True, harmed
    loop.run_once()
    assert store.registry.live(SHARED) is not None
    assert store.registry.live("code") is None
    assert store.registry.unadapted() == {"code"}
    assert trainer.outcomes == ["shared v1", "code kept"]
    [own] = [one for one in store.updates.recent() if one.expert == "code"]
    assert own.decision == "keep"
    assert "without any adapter" in (own.reason or "")
    loop.run_once()  # it is measured against the base, which serves it: nothing is lost, nothing is gained
    assert store.registry.unadapted() == {"code"}
    loop.judge.measure.share = lambda serving, domain: 0.5 + 0.3 * any(serving.values())
    trainer.value["shared"] = 0.2
    loop.run_once()
    assert store.registry.unadapted() == frozenset()
    assert store.registry.live("code") is not None


@pytest.mark.parametrize(("more", "left"), [(0, frozenset()), (1, frozenset({"code"}))])
def test_a_few_records_leave_no_domain_to_the_base(
    store: Store, monkeypatch: pytest.MonkeyPatch, more: int, left: frozenset[str]
) -> None:
    loop, _ = loop_of(store, Together, shared=0.1, code=0.1)
    found = loop.judge.held_out.records("code", len(store.replay.sizes()), None, lambda: None)
    monkeypatch.setattr("moedraft.distill.judging.judge.ENOUGH", len(found) + 1 - more)
    loop.judge.base_serves, loop.judge.measure.share = True, harmed
    loop.run_once()
    assert store.registry.unadapted() == left


def test_what_a_person_has_chosen_is_not_left_to_the_base(store: Store) -> None:
    loop, _ = loop_of(store, Together, shared=0.1, code=0.1)
    store.replay.add([*held_out(ENOUGH, "code", first=9000), *held_out(ENOUGH, "prose", first=14000)])
    loop.judge.base_serves = True
    loop.run_once()
    changes.promote(store, "code", 1)
    loop.judge.measure.share = harmed
    store.replay.add(held_out(ENOUGH, "code", first=19000))
    loop.run_once()
    assert store.registry.unadapted() == frozenset()


def test_a_pinned_expert_serves_whatever_the_base_would_do(store: Store) -> None:
    loop, _ = loop_of(store, Together, shared=0.1, code=0.1)
    store.replay.add([*held_out(ENOUGH, "code", first=9000), *held_out(ENOUGH, "prose", first=14000)])
    loop.judge.base_serves, loop.judge.measure.share = True, harmed
    changes.pin(store, "code")
    loop.run_once()
    assert store.registry.unadapted() == frozenset()


def test_without_a_gate_every_adapter_serves(store: Store) -> None:
    loop, _ = loop_of(store, Together, shared=0.1, code=0.1)
    store.registry.set_unadapted(["code"])
    loop.judge = None
    loop.run_once()
    assert store.registry.unadapted() == frozenset()
