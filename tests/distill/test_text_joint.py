"""Joint updates of an independent draft model: who is taught by which row; PEFT and engine take it."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from distill_rig import Rig
from feature_records import a_record, a_target, stir
from peft import PeftModel
from safetensors.torch import save_file

from moedraft.core import SHARED, ReplayRecord
from moedraft.distill.assembly import WHOLE
from moedraft.distill.joint.joint_loop import JointLoop
from moedraft.distill.joint.joint_trainer import JointTrainer
from moedraft.distill.joint.plan import JointPlan
from moedraft.distill.judging.judge import Judge
from moedraft.distill.lora.ranks import ALL
from moedraft.distill.measuring.measures import JointMeasure
from moedraft.distill.outlet import HomeOutlet
from moedraft.distill.text.batches import RecordBatch, collate
from moedraft.distill.text.text_lessons import TextLessons
from moedraft.distill.text.text_student import TextStudent
from moedraft.drafting.experts.modules import adaptable
from moedraft.kernels import divergence
from moedraft.models import LanguageModel

from random_models import COMMON, CONFIGS, VOCAB, random_model

NAMES = (SHARED, "code", "prose")


def a_draft(kind: str = "llama") -> LanguageModel:
    return random_model(kind, seed=2, layers=2)


def a_student(kind: str = "llama", scope: str = "tail", names: Sequence[str] = NAMES) -> TextStudent:
    student = TextStudent(a_draft(kind), scope=scope, rank=3, shared_rank=4)
    for name in names:
        student.add(name)
    stir(student)
    return student


def some_records() -> list[ReplayRecord]:
    """Of three domains, unequal in length; nobody has learned sql."""
    target = a_target()
    return [
        a_record(target, 0, prompt=9, answer=4, domain="prose", topk=8),
        a_record(target, 1, prompt=3, answer=7, domain="code", topk=8),
        a_record(target, 2, prompt=5, answer=2, domain="sql", topk=8),
        a_record(target, 3, prompt=6, answer=5, domain="code", topk=8),
    ]


def batch_of(records: Sequence[ReplayRecord]) -> RecordBatch:
    return collate(list(records), torch.device("cpu"), 64, VOCAB)


def merged(student: TextStudent, kind: str, names: Sequence[str]) -> LanguageModel:
    """The draft model with these adapters in its own weights."""
    alone = a_draft(kind)
    for module, layer in student.layers.items():
        for name in names:
            low = layer.adapter(name)
            if low is not None:
                own = alone.hf.get_submodule(module)
                change = low.b.detach() @ low.a.detach()
                turned = change if isinstance(own, torch.nn.Linear) else change.T
                own.weight = torch.nn.Parameter(own.weight.detach() + turned)  # no longer the embedding's
    return alone


@pytest.mark.parametrize("scope", ["tail", "full"])
@pytest.mark.parametrize("kind", sorted(CONFIGS))
def test_a_row_is_base_and_shared_and_its_own_expert_and_nothing_else(kind: str, scope: str) -> None:
    student = a_student(kind, scope)
    records = sorted(some_records(), key=lambda record: record.domain)
    owners = [record.domain for record in records]
    batch = batch_of(records)
    together = torch.split(student.logits(batch, owners).detach(), batch.mask.sum(1).tolist())
    for record, ours in zip(records, together, strict=True):
        model = merged(student, kind, (SHARED, record.domain))
        theirs = model.hf(torch.tensor([record.token_ids])).logits[0, record.num_prompt_tokens - 1 : -1]
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)
    changed = merged(student, kind, (SHARED,))  # control: the experts do change something
    plain = changed.hf(torch.tensor([records[0].token_ids])).logits[0, records[0].num_prompt_tokens - 1 : -1]
    assert not torch.allclose(together[0], plain, atol=1e-2)


def test_experts_change_what_their_scope_says_and_the_shared_adapter_everything() -> None:
    student = a_student()
    assert set(student.modules(SHARED)) == set(adaptable(a_draft(), "full"))
    assert set(student.modules("code")) == set(adaptable(a_draft(), "tail"))


def test_every_row_teaches_the_shared_adapter_and_its_own_expert_alone() -> None:
    student = a_student()
    mine = [record for record in some_records() if record.domain == "code"]
    TextLessons(student).learn(mine, ["code"] * len(mine), JointPlan())
    taught = {name: [p.grad is not None for p in student.parameters(name)] for name in NAMES}
    assert all(taught[SHARED])
    assert all(taught["code"])
    assert not any(taught["prose"])
    learned = [name for name, p in student.draft.hf.named_parameters() if p.grad is not None]
    assert all("adapters" in name for name in learned)  # nothing of the draft base


def gradients(lessons: TextLessons, records: Sequence[ReplayRecord]) -> dict[str, list[torch.Tensor]]:
    student = lessons.student
    lessons.learn(records, [record.domain for record in records], JointPlan())
    found = {name: [p.grad.clone() for p in student.parameters(name) if p.grad is not None] for name in NAMES}
    for name in NAMES:
        for parameter in student.parameters(name):
            parameter.grad = None
    return found


def test_groups_of_records_add_up_to_the_whole_step() -> None:
    student, records = a_student(), some_records()
    whole, parts = (gradients(TextLessons(student, tokens), records) for tokens in (4096, 20))
    assert len(list(TextLessons(student, 20)._groups(records, [r.domain for r in records], 64))) > 1
    for name in NAMES:
        for ours, theirs in zip(parts[name], whole[name], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)


def test_the_loss_is_the_same_with_all_logits_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where logits are scaled or capped after the output layer, they have to exist."""
    student, records = a_student(), some_records()
    assert student.ends_in_head()
    fused = gradients(TextLessons(student), records)
    monkeypatch.setattr(student, "ends_in_head", lambda: False)
    plain = gradients(TextLessons(student), records)
    for name in NAMES:
        assert len(fused[name]) == len(plain[name]) > 0
        for ours, theirs in zip(fused[name], plain[name], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)


OTHERS = {
    # gives its MLP the positions of all rows one after another
    "opt": transformers.OPTConfig(
        vocab_size=VOCAB, hidden_size=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4
    ),
    # so do the experts that this one always asks
    "qwen2_moe": transformers.Qwen2MoeConfig(
        **COMMON,
        num_key_value_heads=2,
        intermediate_size=48,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=24,
        num_experts=4,
    ),
    # scales its logits
    "cohere": transformers.CohereConfig(**COMMON, intermediate_size=48, logit_scale=0.25),
    "granite": transformers.GraniteConfig(**COMMON, intermediate_size=48, logits_scaling=4.0),
}


@pytest.mark.parametrize("kind", sorted(OTHERS))
@pytest.mark.parametrize("scope", ["tail", "full"])
def test_other_architectures_learn_as_their_own_forward_says(kind: str, scope: str) -> None:
    """The loss of all records together is that of each by itself, with its own logits."""
    torch.manual_seed(0)
    config = OTHERS[kind]
    config.bos_token_id = config.eos_token_id = config.pad_token_id = None
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.data.normal_(std=0.15)
    student = TextStudent(LanguageModel(model, None, kind, False), scope=scope, rank=3, shared_rank=4)
    for name in NAMES:
        student.add(name)
    stir(student)
    assert student.ends_in_head() == (kind not in ("cohere", "granite"))
    records = some_records()
    together = TextLessons(student).loss(records, [r.domain for r in records], JointPlan())
    total, count = 0.0, 0
    for record in records:
        student.routing.parts = [(record.domain, 1)]
        logits = model(torch.tensor([record.token_ids])).logits[0, record.num_prompt_tokens - 1 : -1].detach()
        teacher = torch.tensor(record.topk_ids), torch.tensor(record.topk_logprobs)
        total += float(divergence(logits, teacher_topk=teacher, kind="fkl", reduction="sum"))
        count += len(logits)
    assert together == pytest.approx(total / count, rel=1e-3)
    found = gradients(TextLessons(student), records)
    assert all(found[name] and all(bool(g.any()) for g in found[name]) for name in NAMES)


def test_there_is_a_heartbeat_after_each_group() -> None:
    """After what was computed of it, not before."""
    student, records, events = a_student(), some_records(), list[str]()
    lessons, owners = TextLessons(student, tokens=20), [record.domain for record in records]
    assert student.ends_in_head()  # its own forward of a few tokens is no group
    groups = len(list(lessons._groups(records, owners, 64)))
    assert groups > 1
    student.draft.hf.register_forward_pre_hook(lambda *_: events.append("group"))
    lessons.states.on_forward = lambda: events.append("beat")
    lessons.learn(records, owners, JointPlan())
    assert events[events.index("group") :] == ["group", "beat"] * groups
    events.clear()
    lessons.loss(records, owners, JointPlan())
    assert events == ["group", "beat"] * groups
    events.clear()
    lessons.guessed(records, owners, 2, 64)
    assert events == ["group", "beat"] * groups


def test_records_are_cut_to_the_tokens_that_are_read_at_a_time() -> None:
    long = a_record(a_target(), 5, prompt=30, answer=40, topk=8)
    _, found = TextLessons(a_student(), tokens=32).guessed([long], ["code"], 1, 64)
    assert found.counts[0, 0, 1] < 40


def test_a_long_prompt_keeps_its_first_token() -> None:
    """The draft sees it whenever it serves, however long the prompt is."""
    long = a_record(a_target(), 5, prompt=30, answer=8, topk=8)
    long = replace(long, token_ids=[96, *long.token_ids[1:]])
    batch = collate([long], torch.device("cpu"), 32)
    assert batch.token_ids[0].tolist() == [96, *long.token_ids[15:]]
    assert collate([long], torch.device("cpu"), 2).token_ids[0].tolist() == long.token_ids[29:31]
    assert long.token_ids[14] != 96


def test_a_draft_that_lacks_tokens_of_the_target_learns() -> None:
    small = random_model("llama", 2, layers=2, vocab=50)
    student = TextStudent(small, rank=3, shared_rank=4)
    for name in NAMES:
        student.add(name)
    stir(student)
    lessons, records = TextLessons(student), some_records()
    assert all(found for found in gradients(lessons, records).values())
    _, found = lessons.guessed(records, [record.domain for record in records], 1, 64)
    assert found.chances.isfinite().all()


def test_guesses_are_counted_by_owner_in_order() -> None:
    student, records = a_student(), some_records()
    owners, found = TextLessons(student, tokens=20).guessed(records, [r.domain for r in records], 2, 64)
    assert owners == ["code", "code", "prose", "sql"]
    assert found.counts[:, 0, 1].tolist() == [7, 5, 4, 2]
    alone = [TextLessons(student).guessed([r], [r.domain], 2, 64)[1] for r in records]
    for place, number in enumerate((1, 3, 0, 2)):
        assert found.counts[place].tolist() == alone[number].counts[0].tolist()
        torch.testing.assert_close(found.chances[place], alone[number].chances[0])


# advice of PEFT and transformers
@pytest.mark.filterwarnings("ignore:.*(tie_word_embeddings|is_gradient_checkpointing|fan_in_fan_out)")
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_peft_loads_what_is_exported(kind: str, tmp_path: Path) -> None:
    student = a_student(kind)
    tokens = torch.randint(VOCAB, (1, 12), generator=torch.Generator().manual_seed(0))
    for name, parts in ((SHARED, []), ("code", [("code", 1)])):
        config, tensors = student.export(name)
        (folder := tmp_path / name).mkdir()
        (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
        save_file(tensors, folder / "adapter_model.safetensors")
        loaded = PeftModel.from_pretrained(a_draft(kind).hf, folder)
        student.routing.parts, student.routing.shared = parts, name == SHARED
        ours = student.draft.hf(tokens).logits
        torch.testing.assert_close(loaded(tokens).logits, ours, rtol=1e-3, atol=1e-3)


def test_a_version_that_was_loaded_is_what_was_exported() -> None:
    student, other = a_student(), a_student(names=())
    for name in (SHARED, "code"):
        other.load(name, 1, *student.export(name))
    record = some_records()[1]
    ours = student.logits(batch_of([record]), ["code"]).detach()
    torch.testing.assert_close(other.logits(batch_of([record]), ["code"]).detach(), ours)
    assert other.modules("code") == student.modules("code")


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path / "home")


def joint_loop(rig: Rig, *, gate: bool = False) -> JointLoop:
    student = TextStudent(random_model("llama", 1, layers=2), rank=16, shared_rank=16)
    plan = JointPlan(steps=30, learning_rate=1e-2, strength=WHOLE)
    trainer = JointTrainer(TextLessons(student), rig.store, plan)
    judge = Judge(JointMeasure(trainer, 4), rig.store) if gate else None
    return JointLoop(trainer, rig.store, HomeOutlet(rig.store), 16, judge)


@pytest.mark.parametrize("gate", [False, True])
def test_one_update_teaches_all_domains_and_the_engine_drafts_better(rig: Rig, gate: bool) -> None:
    loop = joint_loop(rig, gate=gate)
    loop.trainer.plan = replace(loop.trainer.plan, steps=60)
    before = {name: rig.serve(name, 24, seed) for seed, name in enumerate(("code", "prose"))}
    assert loop.due() == SHARED
    assert loop.run_once(SHARED) is not None
    live = {name: rig.store.registry.live(name) for name in NAMES}
    assert all(version is not None and version.version == 1 for version in live.values())
    for _ in range(2):
        loop.run_once(SHARED)
    after = {name: rig.serve(name, 24, seed) for seed, name in enumerate(("code", "prose"))}
    assert all(after[name] > before[name] + 0.1 for name in before), (before, after)


def test_the_engine_drafts_as_the_trainer_guesses(rig: Rig) -> None:
    """The bank's logits with the published versions are those of the student."""
    for seed, name in enumerate(("code", "prose")):
        rig.serve(name, 24, seed)
    loop = joint_loop(rig)
    loop.trainer.plan = replace(loop.trainer.plan, kept=ALL)
    assert loop.run_once(SHARED) is not None
    record = rig.store.replay.records("code")[0]
    student: TextStudent = loop.trainer.student  # type: ignore[assignment]
    with loop.trainer.averaged():
        ours = student.logits(batch_of([record]), ["code"]).detach()
    alone = copy.deepcopy(random_model("llama", 1, layers=2))
    for name in (SHARED, "code"):
        stored = rig.store.adapters.load_live(name, student.base_hash)
        assert stored is not None
        for module in student.modules(name):
            key = f"base_model.model.{module}.lora_"
            a, b = (stored[1].tensors[f"{key}{side}.weight"] for side in "AB")
            alone.hf.get_submodule(module).weight.data += b @ a
    theirs = alone.hf(torch.tensor([record.token_ids])).logits[0, record.num_prompt_tokens - 1 : -1]
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)
