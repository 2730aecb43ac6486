"""The distillation loop: the right logits are supervised, learning works, versions are immutable."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from candidates import candidate
from distill_rig import Rig

from moedraft.core import SHARED, SamplingParams, UnsupportedModel
from moedraft.distill.loop import DistillLoop
from moedraft.distill.outlet import HomeOutlet
from moedraft.distill.single.trainer import Trainer
from moedraft.distill.text.batches import collate
from moedraft.drafting.experts.lora import ExpertBank
from moedraft.kernels import divergence, linear_divergence
from moedraft.learning_state import paused
from moedraft.models import LanguageModel
from moedraft.system.recorder import LEARNING
from moedraft.system.sources.loader import AdapterLoader

from random_models import VOCAB, random_model


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path / "home")


def test_records_hold_the_targets_own_distributions(rig: Rig) -> None:
    """Position i of the top-k is what the target says after prompt + answer[:i], not one beside it."""
    rig.serve("code", 6, seed=1)
    records = rig.store.replay.records("code")
    assert len(records) == 6
    for record in records:
        logits = rig.target.hf(torch.tensor([record.token_ids])).logits[0].log_softmax(-1)
        first = record.num_prompt_tokens
        for i, (ids, logprobs) in enumerate(zip(record.topk_ids, record.topk_logprobs, strict=True)):
            values, want = logits[first + i - 1].topk(12)
            assert ids == want.tolist()
            torch.testing.assert_close(
                torch.tensor(logprobs), values, atol=0.02, rtol=2e-3
            )  # kept as float16
            assert record.token_ids[first + i] == ids[0]  # greedy answers
        assert len(record.topk_ids) == 24


def test_off_by_one_is_pinned(rig: Rig) -> None:
    """The target as its own student has no loss where it is supervised; one position aside it has much."""
    rig.serve("code", 6, seed=1)
    batch = collate(rig.store.replay.records("code"), torch.device("cpu"))
    logits = rig.target.hf(batch.token_ids, logits_to_keep=batch.keep).logits
    topk = (batch.topk_ids, batch.topk_logprobs)
    right = divergence(logits[batch.mask], teacher_topk=topk)
    wrong = divergence(logits.roll(1, dims=1)[batch.mask], teacher_topk=topk)
    assert right < 1e-3
    assert wrong > 0.03 + 1000 * right


def test_learning_raises_acceptance_and_is_loaded_between_steps(rig: Rig) -> None:
    before = rig.serve("code", 24, seed=1)
    update = rig.loop.run_once("code")
    assert update is not None
    assert update.version.version == 1
    rig.engine.add([3, 4, 5], SamplingParams(max_tokens=200), expert="code", request_id="long")
    rig.engine.step()
    again = rig.loop.run_once("code")  # a version published while a request is in flight
    assert again is not None
    assert again.version.parent == 1
    rig.engine.step()
    assert rig.bank.version("code") == 2
    rig.engine.abort("long")
    after = rig.serve("code", 24, seed=1)  # a random target has no rules to generalise; the traffic repeats
    assert after > before + 0.05
    states = {v.version: v.state for v in rig.store.registry.versions("code")}
    assert states == {1: "retired", 2: "live"}


def test_experts_stand_on_the_shared_adapter(rig: Rig) -> None:
    """draft = base + shared + expert, and a new expert is exactly the shared draft."""
    rig.serve("code", 20, seed=1)
    rig.loop.run_once(SHARED)
    rig.loader.refresh([], now=True)
    ids, logits = torch.tensor([[3, 4, 5, 6]]), {}
    model = rig.engine.chooser.model.model  # type: ignore[union-attr]
    for name in (SHARED, "code", "prose"):
        rig.bank.select([name])
        logits[name] = model.forward(model.new_cache(1), 0, ids, [0])
    assert torch.equal(logits[SHARED], logits["code"])
    rig.loop.run_once("code")
    rig.loader.refresh([], now=True)
    rig.bank.select(["code"])
    alone = model.forward(model.new_cache(1), 0, ids, [0])
    assert not torch.allclose(alone, logits[SHARED], atol=1e-3)
    student = rig.trainer.student
    student.activate("code")
    torch.testing.assert_close(alone, student.model(ids).logits, atol=1e-4, rtol=1e-4)
    rig.bank.select(["code", "prose", SHARED])  # merged and mixed paths agree
    mixed = model.forward(model.new_cache(3), 0, ids.expand(3, -1), [0, 0, 0])
    torch.testing.assert_close(mixed[0], alone[0], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(mixed[1], logits[SHARED][0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["gpt_neox", "gpt2", "qwen2"])
@pytest.mark.parametrize("scope", ["tail", "full"])
def test_other_architectures_learn_too(tmp_path: Path, kind: str, scope: str) -> None:
    rig = Rig(tmp_path / "home", kind, scope)
    rig.serve("code", 12, seed=1)
    shared, own = rig.loop.run_once(SHARED), rig.loop.run_once("code", steps=10)
    assert shared is not None
    assert own is not None
    rig.loader.refresh([], now=True)
    rig.bank.select(["code"])
    ids = torch.tensor([[3, 4, 5, 6]])
    model = rig.engine.chooser.model.model  # type: ignore[union-attr]
    student = rig.trainer.student
    student.activate("code")
    got = model.forward(model.new_cache(1), 0, ids, [0])
    torch.testing.assert_close(got, student.model(ids).logits, atol=1e-4, rtol=1e-4)


def test_the_loop_chooses_by_promise_and_remembers(rig: Rig) -> None:
    assert rig.loop.due() is None
    rig.serve("code", 20, seed=1)
    assert rig.loop.due() == SHARED
    assert rig.loop.run_once() is not None
    rig.loop.gains[SHARED] = 0.0
    rig.serve("code", 20, seed=2)
    assert rig.loop.due() == "code"
    rig.loop.run_once("code")
    rig.loop.run_once(SHARED)
    assert loop_of(rig, rig.trainer).due() is None  # after a restart
    assert rig.loop.run_once() is None
    assert rig.loop.run_once("prose") is None  # nothing to learn from


def test_a_restarted_trainer_goes_on_from_the_live_version(rig: Rig) -> None:
    rig.serve("code", 20, seed=1)
    first = rig.loop.run_once("code")
    student = trainer_of(rig, random_model("llama", 1, layers=2)).student
    student.activate("code")
    assert first is not None
    tensors = rig.store.adapters.load(first.version).tensors
    state = {k: v for k, v in student.model.named_parameters() if "adapter_code" in k}
    for name, value in tensors.items():
        held = next(v for k, v in state.items() if k.replace(".adapter_code", "") == name)
        assert torch.equal(held, value)


def test_full_disk_pauses_learning_and_serving_goes_on(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    from moedraft.storage import StorageFull

    def full(*_: object, **__: object) -> None:
        raise StorageFull("The disk of the home is full.")

    with monkeypatch.context() as broken:
        broken.setattr(rig.store.replay, "add", full)
        broken.setattr(rig.store.adapters, "publish_together", full)
        rig.serve("code", 2, seed=1)
        assert rig.recorder.state == paused("The disk of the home is full.")
    rig.serve("code", 20, seed=1)
    assert rig.recorder.state == LEARNING
    with monkeypatch.context() as broken:
        broken.setattr(rig.store.adapters, "publish_together", full)
        assert rig.loop.run_once("code") is None
        assert rig.loop.state.is_paused
    assert rig.loop.run_once("code") is not None


def test_an_update_publishes_nothing_and_hands_out_copies(rig: Rig) -> None:
    rig.serve("code", 12, seed=1)
    trainer = trainer_of(rig, random_model("llama", 1, layers=2))
    made = trainer.update("code")
    assert made is not None
    assert (made.expert, made.parent, made.base_hash) == ("code", 0, rig.bank.base_hash)
    assert made.records + made.held_out == 12
    assert (made.steps, made.config["r"], made.rank) == (4, 16, 16)
    assert rig.store.registry.versions() == []
    before = {name: tensor.clone() for name, tensor in made.tensors.items()}
    for parameter in trainer.student.parameters():
        parameter.data.fill_(7.0)
    assert all(torch.equal(made.tensors[name], tensor) for name, tensor in before.items())


def test_the_next_update_goes_on_from_the_outcome(rig: Rig) -> None:
    """From the weights in memory where they were published, else from the live version."""
    rig.serve("code", 12, seed=1)
    trainer = trainer_of(rig, random_model("llama", 1, layers=2))
    first = trainer.update("code")
    assert first is not None
    trainer.published(rig.store.adapters.publish(first))
    adam = trainer.student.optimiser("code")
    second = trainer.update("code")
    assert second is not None
    assert second.parent == 1
    assert trainer.student.optimiser("code") is adam
    trainer.forget("code")
    trainer.student.activate("code")
    _, tensors = trainer.student.export("code")
    assert all(torch.equal(first.tensors[name], tensor) for name, tensor in tensors.items())


def loop_of(rig: Rig, trainer: Trainer) -> DistillLoop:
    return DistillLoop(trainer, rig.store, HomeOutlet(rig.store), every=16)


def trainer_of(rig: Rig, draft: LanguageModel, rank: int = 16, scope: str = "tail") -> Trainer:
    return Trainer(draft, rig.store, scope=scope, rank=rank, shared_rank=rank, steps=4)


def test_a_smaller_vocabulary_of_the_draft(rig: Rig) -> None:
    rig.serve("code", 12, seed=1)
    batch = collate(rig.store.replay.records("code"), torch.device("cpu"), vocab=40)
    assert batch.token_ids.max() < 40
    assert batch.topk_ids.max() < 40
    assert bool((batch.topk_logprobs[batch.topk_ids < 0] == -torch.inf).all())
    first = [top[0] for record in rig.store.replay.records("code") for top in record.topk_ids]
    assert max(first) >= 40
    assert [i == -1 for i in batch.topk_ids[:, 0].tolist()] == [i >= 40 for i in first]  # never a hit
    made = trainer_of(rig, random_model("llama", 1, layers=2, vocab=40)).update("code")
    assert made is not None
    assert made.loss == made.loss


@pytest.mark.parametrize("kind", ["qwen3_moe", "deepseek_v3"])
def test_a_mixture_of_experts_learns_or_is_refused_by_name(rig: Rig, kind: str) -> None:
    rig.serve("code", 12, seed=1)
    common = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    small = {"intermediate_size": 64, "moe_intermediate_size": 16, "num_experts_per_tok": 2}
    if kind == "qwen3_moe":
        config = transformers.Qwen3MoeConfig(
            **common, **small, num_key_value_heads=2, head_dim=8, num_experts=4
        )
    else:
        heads = {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "num_key_value_heads": 4}
        ranks = {"q_lora_rank": 16, "kv_lora_rank": 16, "first_k_dense_replace": 1}
        groups = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1}
        config = transformers.DeepseekV3Config(**common, **small, **heads, **ranks, **groups)

    def made() -> LanguageModel:
        torch.manual_seed(2)
        hf = transformers.AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
        return LanguageModel(hf, None, kind)

    bank, trainer = ExpertBank(made()), trainer_of(rig, made(), scope="full")
    if kind == "deepseek_v3":
        for _ in range(2):
            with pytest.raises(UnsupportedModel, match="deepseek_v3: PEFT and the engine"):
                trainer.update("code")
        assert rig.store.registry.versions("code") == []
        return
    for _ in range(2):
        update = loop_of(rig, trainer).run_once("code")
        assert update is not None
        stored = rig.store.adapters.load(update.version)
        assert bank.read(update.version.version, stored.config, stored.tensors).deltas


def test_rank_and_scope_are_those_of_what_is_stored(rig: Rig) -> None:
    rig.serve("code", 12, seed=1)
    rig.loop.run_once(SHARED)
    first = rig.loop.run_once("code")
    assert first is not None
    other = trainer_of(rig, random_model("llama", 1, layers=2), rank=4, scope="full")
    second = loop_of(rig, other).run_once("code")
    assert second is not None
    old, new = (rig.store.adapters.load(u.version) for u in (first, second))
    assert {k: v.shape for k, v in old.tensors.items()} == {k: v.shape for k, v in new.tensors.items()}
    assert new.manifest["rank"] == 16


def test_weights_that_are_not_finite_are_forgotten(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.serve("code", 12, seed=1)
    assert rig.loop.run_once("code") is not None

    def poison(optimiser: torch.optim.Optimizer) -> None:
        for group in optimiser.param_groups:
            for parameter in group["params"]:
                parameter.data.fill_(float("nan"))

    with monkeypatch.context() as broken:
        broken.setattr(torch.optim.AdamW, "step", poison)
        assert rig.loop.run_once("code", steps=2) is None
        assert rig.loop.state.is_paused
    again = rig.loop.run_once("code", steps=2)
    assert again is not None
    assert again.version.parent == 1


def test_a_step_that_is_not_finite_is_skipped(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.serve("code", 12, seed=1)
    calls = 0

    def sometimes(*args: Any, **options: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return linear_divergence(*args, **options) * (float("nan") if calls == 2 else 1.0)

    monkeypatch.setattr("moedraft.distill.single.trainer.linear_divergence", sometimes)
    update = rig.loop.run_once("code", steps=3)
    assert update is not None
    assert update.summary.loss == update.summary.loss
    nothing = "moedraft.distill.single.trainer.linear_divergence"
    monkeypatch.setattr(nothing, lambda *a, **o: linear_divergence(*a, **o) * float("nan"))
    assert rig.loop.run_once("code", steps=2) is None
    assert "finite" in rig.loop.state.reason


def test_whatever_fails_in_learning_pauses_it(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(error: BaseException) -> Any:
        def update(*_: object, **__: object) -> None:
            raise error

        return update

    monkeypatch.setattr(rig.trainer, "update", fail(RuntimeError("out of memory")))
    for _ in range(2):
        assert rig.loop.run_once("code") is None
        assert rig.loop.state == paused("RuntimeError: out of memory")
    assert sum("Learning is paused" in message for message in caplog.messages) == 1
    monkeypatch.setattr(rig.trainer, "update", fail(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        rig.loop.run_once("code")


def test_an_adapter_the_bank_refuses_gives_way_to_its_ancestor(rig: Rig) -> None:
    rig.serve("code", 12, seed=1)
    first = rig.loop.run_once("code", steps=2)
    assert first is not None
    loaded = rig.store.adapters.load(first.version)
    config, base = {"lora_alpha": "abc"}, rig.bank.base_hash
    odd = candidate(parent=1, base_hash=base, config=config, tensors=loaded.tensors)
    rig.store.adapters.publish(odd)
    bank = ExpertBank(random_model("llama", 1, layers=2))  # after a restart
    AdapterLoader(rig.store, bank).refresh([], now=True)
    assert bank.version("code") == 1
    live = rig.store.registry.live("code")
    assert live is not None
    assert live.version == 1


def test_two_draft_bases_keep_their_experts(rig: Rig) -> None:
    rig.serve("code", 12, seed=1)
    rig.loop.run_once("code", steps=2)
    other = loop_of(rig, trainer_of(rig, random_model("llama", 7, layers=2)))
    for _ in range(7):
        assert other.run_once("code", steps=1) is not None
    bank = ExpertBank(random_model("llama", 1, layers=2))
    AdapterLoader(rig.store, bank).refresh([], now=True)
    assert bank.version("code") == 1
    again = rig.loop.run_once("code", steps=1)
    assert again is not None
    assert again.version.parent == 1
