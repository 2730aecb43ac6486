"""Joint updates: who is taught by which row, what comes out, and that PEFT and the engine take it."""

from __future__ import annotations

import copy
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from feature_records import EVERY, SOME, a_batch, a_draft, a_record, a_target, stir
from peft import PeftModel
from safetensors.torch import load_file, save_file

from moedraft.core import SHARED, CorruptAdapter, Domain, ReplayRecord
from moedraft.distill.averages import averaged
from moedraft.distill.export import export_adapter
from moedraft.distill.features.feature_batches import DraftVocabulary
from moedraft.distill.features.feature_lessons import FeatureLessons
from moedraft.distill.features.feature_loss import loss_of
from moedraft.distill.features.feature_student import HEAD, MODULES, FeatureStudent
from moedraft.distill.features.record_states import RecordStates
from moedraft.distill.features.unrolled import unroll
from moedraft.distill.joint.joint_trainer import JointTrainer, JointUpdate
from moedraft.distill.joint.plan import JointPlan
from moedraft.distill.lora.ranks import ALL, Kept
from moedraft.distill.measuring.measures import JointMeasure
from moedraft.distill.rows.drawn import owner_of, whose
from moedraft.drafting.base import FeatureBase
from moedraft.drafting.experts.adapter import read_adapter
from moedraft.drafting.experts.lora import ExpertBank
from moedraft.drafting.experts.modules import adaptable
from moedraft.feature.model import FeatureDraft
from moedraft.feature.vocabulary import checked, own_vocabulary, ranked, rows_for, union
from moedraft.models import LanguageModel
from moedraft.storage.retention.holding import is_held_out
from moedraft.storage.store import Store
from moedraft.storage.versions.candidate import CONFIG, Candidate, write_files

# Experts are published whole, so that what is published can be compared with what learns; see `test_ranks`.
PLAN = JointPlan(steps=12, rows=6, learning_rate=1e-2, unrolled=2, kept=ALL)


def a_student(draft: FeatureDraft, *names: str) -> FeatureStudent:
    student = FeatureStudent(copy.deepcopy(draft), "base", rank=4, shared_rank=6)
    for name in names:
        student.add(name)
    return student


class Home:
    """Two domains with records of their own, and a trainer."""

    def __init__(
        self, path: Path, counts: dict[str, int], plan: JointPlan = PLAN, vocabulary: torch.Tensor = EVERY
    ) -> None:
        self.target = a_target()
        self.draft = a_draft(self.target, vocabulary)
        self.store = Store.open(path)
        for name in ("code", "prose"):
            self.store.registry.add_domain(Domain(name, "", ("x",) * 8, 0.0))
        self.store.registry.set_meta("target_id", "tiny")
        self.put(counts)
        self.student = a_student(self.draft)
        self.trainer = JointTrainer(
            FeatureLessons(self.student, RecordStates(self.target, self.draft)), self.store, plan
        )

    def put(self, counts: dict[str, int], seed: int = 0) -> None:
        for name, count in counts.items():
            offset = seed + (1000 if name == "prose" else 0)
            records = [a_record(self.target, offset + i, domain=name, topk=8) for i in range(count)]
            self.store.replay.add(records)

    def publish(self, update: JointUpdate) -> None:
        for one in update.candidates:
            self.trainer.published(self.store.adapters.publish(one))

    def restarted(self) -> JointTrainer:
        """A trainer that goes on from what is published."""
        lessons = FeatureLessons(a_student(self.draft), self.trainer.lessons.states)
        return JointTrainer(lessons, self.store, self.trainer.plan)


def domains_of(records: list[ReplayRecord]) -> list[str]:
    return [record.domain for record in records]


def test_a_row_is_base_and_shared_and_its_own_expert_and_nothing_else() -> None:
    target = a_target()
    draft = a_draft(target)
    records = [a_record(target, seed, domain=name) for seed, name in enumerate(("prose", "code", "sql"))]
    student = a_student(draft, SHARED, "code", "prose")
    stir(student)
    batch = a_batch(target, draft, records)
    assert batch.owners == ["code", "prose", "sql"]  # side by side; nobody has learned sql
    together = [hidden.detach() for hidden in student.outputs(batch, 2)]
    for row, name in enumerate(batch.owners):
        alone = copy.deepcopy(draft)
        for module in MODULES:
            weight = alone.get_submodule(module).weight
            for part in (SHARED, name):
                low = student.layers[module].adapter(part)
                if low is not None:
                    weight.data += low.b.data @ low.a.data
        only = a_batch(target, draft, [next(r for r in records if r.domain == name)])
        plain = list(FeatureStudent(alone, "base").outputs(only, 2))
        for ours, theirs in zip(together, plain, strict=True):
            torch.testing.assert_close(ours[row : row + 1, :3], theirs.detach()[:, :3], rtol=1e-4, atol=1e-4)


def test_every_row_teaches_the_shared_adapter_and_its_own_expert_alone() -> None:
    target = a_target()
    draft = a_draft(target)
    student = a_student(draft, SHARED, "code", "prose")
    batch = a_batch(target, draft, [a_record(target, 0, domain="code")])
    loss_of(student, batch, DraftVocabulary(EVERY, 97)).backward()
    taught = {name: [p.grad is not None for p in student.parameters(name)] for name in student.names}
    assert all(taught[SHARED])
    assert all(taught["code"])
    assert not any(taught["prose"])
    learned = [name for name, p in student.draft.named_parameters() if p.grad is not None]
    assert all("adapters" in name for name in learned)  # nothing of the draft base


def test_only_modules_that_keep_the_cache_are_adapted(tmp_path: Path) -> None:
    """They are those that the engine puts experts on: keys and values are the same for all."""
    target = a_target()
    base = FeatureBase(a_draft(target), target, tmp_path)
    assert set(MODULES) == set(adaptable(base, "tail"))


def test_an_update_gives_a_candidate_for_everybody_who_learned(tmp_path: Path) -> None:
    home = Home(tmp_path, {"code": 16, "prose": 16})
    update = home.trainer.update()
    assert update is not None
    assert [one.expert for one in update.candidates] == [SHARED, "code", "prose"]
    shared, *experts = update.candidates
    assert shared.records == sum(one.records for one in experts)
    assert shared.rank == 6
    assert {one.rank for one in experts} == {4}
    assert {one.parent for one in update.candidates} == {0}
    versions = [home.store.adapters.publish(one) for one in update.candidates]
    for version in versions:
        home.trainer.published(version)
    again = home.trainer.update()
    assert again is not None
    assert {one.expert: one.parent for one in again.candidates} == {v.domain: v.version for v in versions}


def test_updates_teach(tmp_path: Path) -> None:
    """The same records again and again: the guesses come to be the target's."""
    home = Home(tmp_path, {"code": 6, "prose": 6})
    first = home.trainer.update()
    assert first is not None
    home.publish(first)
    second = home.trainer.update(steps=40)
    assert second is not None
    assert second.loss < 0.8 * first.loss


def test_one_expert_can_learn_alone_above_the_live_shared_adapter(tmp_path: Path) -> None:
    """As a warm start does: nothing else is taught, and what was not published is dropped first."""
    home = Home(tmp_path, {"code": 16, "prose": 16})
    first = home.trainer.update()
    assert first is not None
    for made in first.candidates:
        home.trainer.kept(made)  # the shared adapter in memory is not the one that serves: none is live
    seen = home.trainer.last_id
    with home.trainer.only("code"):
        update = home.trainer.update()
        assert update is not None
        assert [one.expert for one in update.candidates] == ["code"]
        assert all(not p.any() for p in home.student.parameters(SHARED)[1::2])  # B: as it was made
    assert home.trainer.last_id == seen, "the others have not learned from these records yet"
    again = home.trainer.update()
    assert again is not None
    assert SHARED in [one.expert for one in again.candidates]


def test_half_of_each_batch_is_replay_of_all_domains(tmp_path: Path) -> None:
    """One domain's traffic lasts; the other is still learned from."""
    home = Home(tmp_path, {"prose": 20})
    home.trainer.last_id = home.store.replay.last_id()
    home.put({"code": 20}, seed=500)
    drawn = home.trainer.draw(8)
    assert set(domains_of(drawn.fresh)) == {"code"}
    assert set(domains_of(drawn.replayed)) == {"code", "prose"}
    for batch in home.trainer.batches(drawn, 8):
        assert len(batch) == 6
        assert domains_of(batch[3:]) == ["code"] * 3
    home.trainer.last_id = home.store.replay.last_id()
    still = home.trainer.draw(8)
    assert not still.fresh
    assert all(len(batch) == 6 for batch in home.trainer.batches(still, 2))


def test_what_is_asked_again_and_again_teaches_once(tmp_path: Path) -> None:
    """Otherwise a health probe would fill half of every batch."""
    home = Home(tmp_path, {"prose": 20})
    home.trainer.last_id = home.store.replay.last_id()
    home.put({"code": 3}, seed=500)
    probe = replace(a_record(home.target, 900, domain="code", topk=8), held_out=False)
    home.store.replay.add([probe] * 30)
    drawn = home.trainer.draw(8)
    texts = [tuple(one.token_ids) for one in drawn.fresh]
    assert len(texts) == len(set(texts)) <= 4
    assert texts.count(tuple(probe.token_ids)) == 1
    fresh = dict.fromkeys(texts, 0)
    for batch in home.trainer.batches(drawn, 8):
        assert len(batch) == 6
        for one in batch[-3:]:
            fresh[tuple(one.token_ids)] += 1
    assert max(fresh.values()) - min(fresh.values()) <= 1
    home.trainer.last_id = home.store.replay.last_id()
    home.store.replay.add([probe] * 30)
    only = home.trainer.draw(8)
    assert [one.token_ids for one in only.fresh] == [probe.token_ids]
    for batch in home.trainer.batches(only, 8):
        assert len(batch) == 6
        assert domains_of(batch).count("prose") >= 1


def test_a_prompt_whose_newest_answer_teaches_nothing_is_learned_from_all_the_same(tmp_path: Path) -> None:
    """A client that repeats others' prompts with an answer of one token takes nothing away."""
    home = Home(tmp_path, {})
    whole = replace(a_record(home.target, 900, domain="code", topk=8), held_out=False)
    end = whole.num_prompt_tokens + 1
    short = replace(
        whole,
        token_ids=whole.token_ids[:end],
        topk_ids=whole.topk_ids[:1],
        topk_logprobs=whole.topk_logprobs[:1],
    )
    home.store.replay.add([replace(whole, source="one"), *[replace(short, source="two")] * 3])
    drawn = home.trainer.draw(8)
    for records in (drawn.fresh, drawn.replayed):
        assert [one.token_ids for one in records] == [whole.token_ids]


def test_a_record_teaches_its_expert_as_often_as_it_is_believed_to_be_its_domains(tmp_path: Path) -> None:
    """What stands for the shared draft speaks for no other domain; everything teaches the shared adapter."""
    home = Home(tmp_path, {})
    sure, unsure, lost = ({"code": 0.6, SHARED: 0.4}, {"code": 0.25, "prose": 0.75}, {"prose": 1.0})
    for number, weights in enumerate((sure, unsure, lost)):
        made = [a_record(home.target, 100 * number + i, topk=8) for i in range(8)]
        home.store.replay.add([replace(one, weights=weights) for one in made])
    owners: dict[float, Counter[str]] = {}
    chance = random.Random(0)
    for record in home.store.replay.records() * 25:
        owners.setdefault(record.belief, Counter())[owner_of(record, {"code"}, chance)] += 1
    assert owners[1.0] == {"code": 200}
    assert owners[0.0] == {SHARED: 200}
    assert 30 <= owners[0.25]["code"] <= 70
    update = home.trainer.update()
    assert update is not None
    records = {one.expert: one.records for one in update.candidates}
    assert 8 <= records["code"] < records[SHARED] <= 24


def test_a_record_teaches_the_other_expert_as_often_as_it_is_believed_to_be_its(tmp_path: Path) -> None:
    """Only experts with records of their own in the update are taught by those of others."""
    home = Home(tmp_path, {"prose": 8})
    unsure = {"code": 0.25, "prose": 0.5, "unknown": 0.25, SHARED: 0.0}
    made = [a_record(home.target, i, topk=8) for i in range(8)]
    home.store.replay.add([replace(one, weights=unsure) for one in made])
    update = home.trainer.update()
    assert update is not None
    assert {one.expert for one in update.candidates} == {SHARED, "code", "prose"}
    record = next(one for one in home.store.replay.records() if one.weights)
    chance = random.Random(0)
    taught = Counter(owner_of(record, {"code", "prose", SHARED}, chance) for _ in range(400))
    assert taught.keys() == {"code", "prose", SHARED}
    assert 60 <= taught["code"] <= 140
    assert 160 <= taught["prose"] <= 240
    assert 60 <= taught[SHARED] <= 140, "nobody's, since that domain has no records here"


def test_a_list_of_tokens_counts_records_that_may_be_its_domains() -> None:
    target = a_target()
    unsure = {"code": 0.5, "prose": 0.3, "unknown": 0.15, SHARED: 0.05}
    record = replace(a_record(target, 0, topk=8), weights=unsure)
    assert whose(record) == {"code", "prose"}
    assert whose(replace(record, weights={})) == {"code"}


def test_the_list_of_an_expert_counts_what_may_be_its_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = Home(tmp_path, {})
    mine, unsure = (a_record(home.target, i, domain=name, topk=8) for i, name in enumerate(("prose", "code")))
    unsure = replace(unsure, weights={"code": 0.5, "prose": 0.5})
    counted: dict[str, int] = {}

    def choose(records: dict[str, Iterator[ReplayRecord]]) -> None:
        counted.update({name: len(list(some)) for name, some in records.items()})

    monkeypatch.setattr(home.trainer.vocabularies, "choose", choose)
    home.trainer._choose_vocabularies([mine, unsure])
    assert counted == {"prose": 2, "code": 1}


def test_what_is_nobodys_teaches_no_expert() -> None:
    record = replace(a_record(a_target(), 0, topk=8), weights={"code": 0.1, "": 0.9})
    chance = random.Random(0)
    taught = Counter(owner_of(record, {"code", "prose"}, chance) for _ in range(400))
    assert taught.keys() == {"code", SHARED}
    assert taught["code"] <= 80


def test_the_only_expert_that_learns_is_taught_by_its_own_records(tmp_path: Path) -> None:
    home = Home(tmp_path, {"prose": 8})
    made = [a_record(home.target, i, topk=8) for i in range(8)]
    home.store.replay.add([replace(one, weights={"code": 0.5, "prose": 0.5}) for one in made])
    with home.trainer.only("code"):
        update = home.trainer.update()
    assert update is not None
    assert [one.expert for one in update.candidates] == ["code"]
    assert "prose" not in home.trainer.versions


def test_a_record_that_teaches_the_shared_adapter_alone_gives_no_expert_a_gradient(tmp_path: Path) -> None:
    home = Home(tmp_path, {})
    made = [a_record(home.target, i, topk=8) for i in range(12)]
    home.store.replay.add([replace(one, weights={"prose": 1.0}) for one in made])
    assert home.trainer.update() is not None
    moved = {
        name: any(bool(part.b.any()) for part in home.student.low_ranks(name).values())
        for name in (SHARED, "code")
    }
    assert moved == {SHARED: True, "code": False}


def test_an_expert_is_published_with_few_directions_and_learns_on_with_all(tmp_path: Path) -> None:
    home = Home(tmp_path, {"code": 16}, replace(PLAN, kept=Kept(0.5)))
    update = home.trainer.update()
    assert update is not None
    ranks = {one.expert: one.rank for one in update.candidates}
    assert ranks[SHARED] == 6
    assert 1 <= ranks["code"] < 4
    for candidate in update.candidates:
        home.store.adapters.publish(candidate)
    home.trainer.forget(SHARED)  # as after a restart
    home.trainer._follow("code")
    assert {len(part.a) for part in home.student.low_ranks("code").values()} == {4}
    again = home.trainer.update()
    assert again is not None
    assert {one.expert: one.parent for one in again.candidates} == {SHARED: 1, "code": 1}


@pytest.mark.parametrize("strength", [0.8, 1.0])  # 1: as versions from before there was a choice
def test_what_was_learned_is_published_weaker_and_learned_on_whole(tmp_path: Path, strength: float) -> None:
    home = Home(tmp_path, {"code": 16}, replace(PLAN, strength=strength))
    update = home.trainer.update()
    assert update is not None
    with averaged(home.trainer.optimisers.values()):
        learned = {
            name: {module: part.b @ part.a for module, part in home.student.low_ranks(name).items()}
            for name in ("code", SHARED)
        }
    weights = {module: layer.weight for module, layer in home.student.layers.items()}
    home.publish(update)
    for candidate in update.candidates:
        served = read_adapter(1, candidate.config, candidate.tensors, weights, candidate.vocabulary).deltas
        for module in MODULES[:-1]:  # the output layer's rows are those of a list of tokens
            a, b = served[module]
            whole = learned[candidate.expert][module]
            torch.testing.assert_close(b @ a, strength * whole, rtol=1e-3, atol=1e-5)
    student, plan = a_student(home.draft), replace(PLAN, strength=0.8)
    other = JointTrainer(FeatureLessons(student, home.trainer.lessons.states), home.store, plan)
    for name in ("code", SHARED):
        other._follow(name)
        for module in MODULES[:-1]:
            part = student.low_ranks(name)[module]
            torch.testing.assert_close(part.b @ part.a, learned[name][module], rtol=1e-3, atol=1e-5)


def test_the_figures_of_an_update_are_those_of_what_serves(tmp_path: Path) -> None:
    """After an update, and before the next one by a trainer that was started again."""
    home = Home(tmp_path, {"code": 60}, replace(PLAN, strength=0.5))
    measure = JointMeasure(home.trainer, 1)
    update = home.trainer.update()
    assert update is not None
    held_out = home.trainer.draw(PLAN.steps).held_out
    made = {one.expert: one for one in update.candidates}
    tried, right = measure(made, "code", held_out, lambda: None).counts[:, 0].sum(0)[[1, 0]]
    assert made["code"].acceptance_after == pytest.approx(right / tried)
    home.publish(update)
    other = home.restarted()
    again = other.update()
    assert again is not None
    before = next(one.acceptance_before for one in again.candidates if one.expert == "code")
    assert before == pytest.approx(made["code"].acceptance_after)


def test_no_records_no_update(tmp_path: Path) -> None:
    assert Home(tmp_path, {}).trainer.update() is None


def test_a_candidate_that_was_not_published_is_forgotten(tmp_path: Path) -> None:
    home = Home(tmp_path, {"code": 12})
    first = home.trainer.update()
    assert first is not None
    for candidate in first.candidates:
        home.trainer.forget(candidate.expert)
    assert not home.student.names
    again = home.trainer.update()
    assert again is not None
    assert {one.parent for one in again.candidates} == {0}


def test_records_of_another_target_teach_nothing(tmp_path: Path) -> None:
    home = Home(tmp_path, {"code": 12})
    home.store.registry.set_meta("target_id", "other")
    assert home.trainer.update() is None


def written(student: FeatureStudent, name: str, folder: Path, vocabulary: torch.Tensor | None = None) -> None:
    """The two files of an adapter."""
    config, tensors = student.export(name, vocabulary)
    candidate = Candidate(name, 0, "base", 4, MODULES, 1, 0, 1, 0.0, None, None, config, tensors, vocabulary)
    folder.mkdir()
    write_files(candidate, folder)


def test_peft_loads_an_expert_on_the_drafter_itself(tmp_path: Path) -> None:
    target = a_target()
    draft = a_draft(target)
    student = a_student(draft, "code")
    stir(student)
    written(student, "code", tmp_path / "code")
    assert (tmp_path / "code" / CONFIG).exists()
    batch = a_batch(target, draft, [a_record(target, 0, domain="code")])
    ours = next(iter(student.outputs(batch, 1)))
    guesses = student.logits(ours[0], ["code"], [len(ours[0])])
    peft = PeftModel.from_pretrained(copy.deepcopy(draft), str(tmp_path / "code")).base_model.model
    theirs = next(unroll(peft, batch, 1))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(guesses, peft.logits(theirs[0]), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(guesses, draft.logits(theirs[0]), atol=1e-2)


@pytest.fixture
def whole_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine does not round weights to half precision here; test_heads.py measures what that changes."""
    monkeypatch.setattr("moedraft.cpu.products.halves", lambda weight: False)


@pytest.mark.usefixtures("whole_weights")
def test_the_engines_bank_takes_an_expert(tmp_path: Path) -> None:
    target = a_target()
    draft = a_draft(target)
    student = a_student(draft, "code")
    stir(student)
    bank = ExpertBank(FeatureBaseInMemory(copy.deepcopy(draft), target))
    bank.publish("code", bank.read(1, *student.export("code")))
    assert bank.shares_cache
    hidden = torch.randn(2, 1, 32, generator=torch.Generator().manual_seed(0))
    bank.select(["code", SHARED])
    theirs = bank.layers[HEAD](hidden)
    student.routing.parts = [("code", 1), (SHARED, 1)]
    torch.testing.assert_close(student.layers[HEAD](hidden), theirs, rtol=1e-4, atol=1e-4)


class FeatureBaseInMemory(FeatureBase):
    """A draft base without a folder."""

    def __init__(self, draft: FeatureDraft, target: LanguageModel) -> None:
        super().__init__(draft, target, Path("nowhere"))

    def weights_hash(self) -> str:
        return "base"


def test_what_was_exported_is_taken_up_again() -> None:
    draft = a_draft(a_target())
    student, other = a_student(draft, "code"), a_student(draft)
    stir(student)
    other.load("code", 1, *student.export("code"))
    for ours, theirs in zip(student.parameters("code"), other.parameters("code"), strict=True):
        torch.testing.assert_close(ours, theirs)


# -- a vocabulary of its own ----------------------------------------------------------------------


def test_a_domains_tokens_come_first_and_general_ones_fill_up() -> None:
    counts = Counter({40: 3, 41: 9, 42: 1})
    chosen = own_vocabulary(counts, 5, general=[7, 8, 9], always=[2])
    assert chosen.tolist() == [2, 7, 40, 41, 42]
    assert own_vocabulary(counts, 2, general=[7]).tolist() == [40, 41]
    assert ranked(torch.tensor([3, 8, 9, 41]), Counter({9: 1, 41: 5})) == [41, 9, 3, 8]


def test_an_expert_with_its_own_output_rows_drafts_as_the_union_restricted_to_them(tmp_path: Path) -> None:
    """Trained over the union of all lists, published with its own rows; PEFT takes those as well."""
    target = a_target()
    own = torch.tensor([1, 4, 5, 40, 90])
    wide = a_draft(target, SOME)
    wide.use_vocabulary(union([SOME, own]))
    student = a_student(wide, "code")
    stir(student)
    written(student, "code", tmp_path / "code", own)
    narrow = a_draft(target, SOME)
    narrow.use_vocabulary(own)
    peft = PeftModel.from_pretrained(narrow, str(tmp_path / "code")).base_model.model
    hidden = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
    places = torch.searchsorted(student.draft.vocabulary, own)
    with torch.no_grad():
        all_of_them = student.logits(hidden, ["code"], [3])
        torch.testing.assert_close(peft.logits(hidden), all_of_them[:, places], rtol=1e-4, atol=1e-4)
    other = a_student(wide)
    other.load("code", 1, *student.export("code", own), vocabulary=own.int())
    part, before = other.layers[HEAD].adapter("code"), student.layers[HEAD].adapter("code")
    assert part is not None
    assert before is not None
    torch.testing.assert_close(part.b[places], before.b[places])
    assert part.b.count_nonzero() == part.b[places].count_nonzero()


def test_rows_of_another_list() -> None:
    rows = torch.tensor([[1.0], [2.0], [3.0]])
    assert rows_for(rows, torch.tensor([2, 5, 9]), torch.tensor([1, 5, 9, 11])).tolist() == [
        [0],
        [2],
        [3],
        [0],
    ]


@pytest.mark.parametrize(
    "wrong",
    [
        None,
        torch.tensor([1.0]),
        torch.tensor([[1]]),
        torch.tensor([], dtype=torch.int32),
        torch.tensor([3, 3]),
        torch.tensor([-1, 3]),
        torch.tensor([3, 97]),
    ],
)
def test_a_list_that_is_none_is_refused(wrong: torch.Tensor | None) -> None:
    with pytest.raises(CorruptAdapter, match="vocabulary"):
        checked(wrong, 97)


def test_a_vocabulary_is_published_and_loaded_with_its_adapter(tmp_path: Path) -> None:
    home = Home(tmp_path, {"code": 8})
    update = home.trainer.update()
    assert update is not None
    own = torch.tensor([1, 4, 5], dtype=torch.int32)
    version = home.store.adapters.publish(replace(update.candidates[1], vocabulary=own))
    loaded = home.store.adapters.load(version)
    assert loaded.vocabulary is not None
    assert torch.equal(loaded.vocabulary, own)
    file = home.store.adapters.folder("code", version.version) / "vocabulary.safetensors"
    save_file({"vocabulary": own + 1}, file)
    with pytest.raises(CorruptAdapter, match="manifest"):
        home.store.adapters.load(version)


def test_what_was_learned_stays_when_more_can_be_drafted() -> None:
    """In the adapter, and in the optimiser: the next step is what it would have been."""
    target = a_target()
    students = [a_student(a_draft(target, SOME), "code") for _ in range(2)]
    wider = union([SOME, torch.tensor([0, 40, 90])])
    known = torch.searchsorted(wider, SOME)
    hidden = torch.randn(5, 32, generator=torch.Generator().manual_seed(0))
    found = []
    for student, widens in zip(students, (False, True), strict=True):
        torch.manual_seed(3)
        stir(student)
        optimiser = torch.optim.AdamW(student.parameters("code"), lr=0.1)
        for step in range(3):
            if widens and step == 1:
                student.widen(wider, [optimiser])
            logits = student.logits(hidden, ["code"], [5])
            logits = logits[:, known] if logits.shape[1] == len(wider) else logits
            optimiser.zero_grad()
            logits.square().sum().backward()  # type: ignore[no-untyped-call]
            optimiser.step()
        found.append(logits.detach())
    torch.testing.assert_close(*found)
    assert torch.equal(students[1].draft.vocabulary, wider)


def test_a_version_with_a_short_list_is_taken_up_with_a_longer_one(tmp_path: Path) -> None:
    """As a trainer's next version is where new records have shown that a longer one guesses more."""
    home = Home(tmp_path, {"code": 16}, vocabulary=SOME)
    home.trainer.vocabularies.size = 5
    first = home.trainer.update()
    assert first is not None
    home.publish(first)
    other = home.restarted()
    kept = other.update()
    assert kept is not None
    other.vocabularies.lengths.observe("code", [0, 0, 0, 0, 300], 1000)
    again = other.update()
    assert again is not None
    for made, size in ((first, 5), (kept, 5), (again, len(SOME))):
        code = next(one for one in made.candidates if one.expert == "code")
        assert code.vocabulary is not None
        assert len(code.vocabulary) == size
        rows = code.tensors[f"base_model.model.{HEAD}.lora_B.weight"]
        assert len(rows) == size
        assert bool(rows.isfinite().all())
    held_out = other.draw(PLAN.steps).held_out
    for update in (first, again):
        serving = {one.expert: one for one in update.candidates}
        assert JointMeasure(other, 1)(serving, "code", held_out, lambda: None).records == len(held_out)


def test_what_the_gate_throws_away_takes_no_tokens_of_the_records_with_it(tmp_path: Path) -> None:
    home = Home(tmp_path, {"code": 16}, vocabulary=SOME)
    update = home.trainer.update()
    assert update is not None
    home.publish(update)
    held_once = torch.tensor([[95], [8000]])  # by records that are no longer drawn
    home.trainer.vocabularies.restore("code", home.trainer.vocabularies.of("code"), held_once)
    home.trainer.forget(SHARED)
    assert home.trainer.update() is not None
    counts, tokens = home.trainer.vocabularies.counts("code"), home.trainer.vocabularies.of("code")
    assert counts is not None
    assert tokens is not None
    assert dict(counts.T.tolist())[95] == 4000
    assert 95 in tokens


def test_each_expert_gets_the_tokens_of_its_own_traffic(tmp_path: Path) -> None:
    home = Home(tmp_path, {"code": 30, "prose": 30}, vocabulary=SOME)
    update = home.trainer.update()
    assert update is not None
    lists = {one.expert: one.vocabulary for one in update.candidates}
    for name in ("code", "prose"):
        tokens = lists[name]
        assert tokens is not None
        assert len(tokens) == len(SOME)
        records = home.store.replay.records()
        learned = [r for r in records if r.domain == name and not is_held_out(r)]
        counts = Counter(token for r in learned for token in r.token_ids[r.num_prompt_tokens :])
        often = {token for token, _ in counts.most_common(5)}
        assert often <= set(tokens.tolist())
    assert lists["code"] is not None
    assert lists["prose"] is not None
    assert not torch.equal(lists["code"], lists["prose"])
    shared = lists[SHARED]
    assert shared is not None
    theirs = {*SOME.tolist(), *lists["code"].tolist(), *lists["prose"].tolist()}
    records = home.store.replay.records()
    seen = {token for record in records for token in record.token_ids}
    possible = {token for record in records for row in record.topk_ids for token in row}
    # What records hold beside it, or might have held; but held-out ones.
    assert theirs < set(shared.tolist()) <= theirs | seen | possible


@pytest.mark.usefixtures("whole_weights")
def test_lists_outlive_the_trainer_and_reach_the_engine(tmp_path: Path) -> None:
    home = Home(tmp_path, {"code": 30, "prose": 30}, vocabulary=SOME)
    update = home.trainer.update()
    assert update is not None
    bank = ExpertBank(FeatureBaseInMemory(copy.deepcopy(home.draft), home.target))
    home.publish(update)
    for candidate in update.candidates:
        found = home.store.adapters.load_live(candidate.expert, "base")
        assert found is not None
        bank.publish(candidate.expert, bank.read(1, found[1].config, found[1].tensors, found[1].vocabulary))
    hidden = torch.randn(1, 1, 32, generator=torch.Generator().manual_seed(0))
    bank.select(["code"])
    tokens = bank.heads.draft.vocabulary if bank.heads else SOME
    assert torch.equal(tokens.int(), next(c.vocabulary for c in update.candidates if c.expert == "code"))
    home.student.routing.parts = [("code", 1)]
    with home.trainer.averaged():
        expected = home.student.layers[HEAD](hidden)
    places = torch.searchsorted(home.student.draft.vocabulary, tokens)
    torch.testing.assert_close(bank.layers[HEAD](hidden), expected[..., places], rtol=1e-4, atol=1e-4)
    other = JointTrainer(FeatureLessons(a_student(home.draft), home.trainer.lessons.states), home.store, PLAN)
    home.put({"code": 5}, seed=500)
    again = other.update(steps=1)
    assert again is not None
    shared = next(c.vocabulary for c in again.candidates if c.expert == SHARED)
    assert shared is not None
    before = next(c.vocabulary for c in update.candidates if c.expert == SHARED)
    assert before is not None
    assert set(before.tolist()) <= set(shared.tolist()), "what silent domains had stays"


def test_a_base_that_drafts_every_token_needs_no_lists(tmp_path: Path) -> None:
    home = Home(tmp_path, {"code": 8})
    draft = a_draft(home.target, EVERY)
    trainer = JointTrainer(
        FeatureLessons(a_student(draft), RecordStates(home.target, draft)), home.store, PLAN
    )
    update = trainer.update(steps=1)
    assert update is not None
    assert all(candidate.vocabulary is None for candidate in update.candidates)


def test_an_expert_guesses_and_learns_over_its_own_list_alone() -> None:
    """As the logits of all tokens, cut to the list; the loss is that of a drafter with these rows."""
    target = a_target()
    draft = a_draft(target, SOME)
    lists = {"code": SOME[::2].clone(), "prose": SOME[1::3].clone()}
    records = [
        a_record(target, seed, domain=name) for seed, name in enumerate(("prose", "code", "sql", "code"))
    ]
    student = a_student(draft, SHARED, "code", "prose")
    stir(student)
    batch = a_batch(target, draft, records)
    vocabulary = DraftVocabulary(draft.vocabulary, draft.config.vocab_size)
    hidden, counts = torch.randn(8, 32, generator=torch.Generator().manual_seed(0)), [3, 1, 2, 2]
    student.routing.shared = True
    whole = student.logits(hidden, batch.owners, counts)
    student.use_lists(lists)
    for one in student.guesses(hidden, batch.owners, counts):
        expected = whole[one.rows] if one.numbers is None else whole[one.rows][:, one.numbers]
        torch.testing.assert_close(one.logits, expected, rtol=1e-4, atol=1e-4)
    loss = loss_of(student, batch, vocabulary, steps=1, emitted=0.25)
    total, count = 0.0, 0
    for name in ("code", "prose", "sql"):
        own = lists.get(name, SOME)
        narrow = copy.deepcopy(draft)
        narrow.use_vocabulary(own)
        other = a_student(narrow)
        for adapter in (SHARED, name):
            if adapter in student.names:
                other.load(adapter, 1, *student.export(adapter, own))
        mine = a_batch(target, narrow, [record for record in records if record.domain == name])
        rows = int((mine.lengths - 1).sum())
        found = loss_of(other, mine, DraftVocabulary(own, draft.config.vocab_size), steps=1, emitted=0.25)
        total, count = total + found.item() * rows, count + rows
    assert loss.item() == pytest.approx(total / count, rel=1e-4)
    loss.backward()  # type: ignore[no-untyped-call]
    part = student.layers[HEAD].adapter("code")
    assert part is not None
    assert part.b.grad is not None
    learned = part.b.grad.abs().sum(1).nonzero()[:, 0]
    assert set(SOME[learned].tolist()) <= set(lists["code"].tolist())


@pytest.mark.usefixtures("whole_weights")
@pytest.mark.parametrize("expert_only", [False, True])
def test_an_exported_expert_does_in_peft_what_the_bank_does(tmp_path: Path, expert_only: bool) -> None:
    """With the shared adapter below it, whose output rows are those of other tokens."""
    home = Home(tmp_path / "home", {"code": 20, "prose": 20}, vocabulary=SOME)
    update = home.trainer.update()
    assert update is not None
    bank = ExpertBank(FeatureBaseInMemory(copy.deepcopy(home.draft), home.target))
    for candidate in update.candidates:
        version = home.store.adapters.publish(candidate)
        found = home.store.adapters.load(version)
        if candidate.expert != SHARED or not expert_only:
            bank.publish(candidate.expert, bank.read(1, found.config, found.tensors, found.vocabulary))
    export_adapter(home.store, "code", tmp_path / "out", expert_only=expert_only)
    own = load_file(tmp_path / "out" / "vocabulary.safetensors")["vocabulary"].to(torch.int64)
    plain = copy.deepcopy(home.draft)
    plain.use_vocabulary(own)
    peft = PeftModel.from_pretrained(plain, str(tmp_path / "out")).base_model.model
    hidden = torch.randn(1, 1, 32, generator=torch.Generator().manual_seed(0))
    bank.select(["code"])
    assert bank.heads is not None
    with torch.no_grad():
        torch.testing.assert_close(peft.logits(hidden), bank.heads.draft.logits(hidden), rtol=1e-4, atol=1e-4)
