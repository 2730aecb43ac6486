"""The distillation loop: the right logits are supervised, learning works, versions are immutable."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from moedraft.core import SHARED, Domain, SamplingParams
from moedraft.distill.loop import DistillLoop
from moedraft.distill.trainer import Trainer, collate
from moedraft.drafting.drafter import Drafter
from moedraft.drafting.lora import ExpertBank
from moedraft.engine.engine import Engine
from moedraft.engine.recorder import AdapterLoader, Recorder
from moedraft.kernels import divergence
from moedraft.storage.store import Store

from random_models import VOCAB, prompts_of, random_model
from tiny import FixedSelector, NumberTokenizer


class Rig:
    """Engine and trainer over one home, put together by hand so that no file of a model is needed."""

    def __init__(self, home: Path, kind: str = "llama", scope: str = "tail") -> None:
        self.store = Store.open(home)
        for name in ("code", "prose"):
            self.store.registry.add_domain(Domain(name, "", ("x",) * 8, 0.0))
        self.target = random_model(kind, 0)
        draft = random_model(kind, 1, layers=2)
        self.bank = ExpertBank(draft, scope)
        self.engine = Engine(
            self.target, NumberTokenizer(), Drafter(draft, self.bank, 8, VOCAB), FixedSelector(), topk=12
        )
        self.loader = AdapterLoader(self.store, self.bank)
        self.engine.refresh = lambda: self.loader.refresh(self.engine.sequences.values(), now=True)
        self.recorder = Recorder(self.store, "tiny")
        self.engine.sinks.append(self.recorder)
        self.trainer = Trainer(
            random_model(kind, 1, layers=2),
            self.store.registry,
            self.store.adapters,
            self.store.replay,
            scope=scope,
            rank=16,
            shared_rank=16,
            learning_rate=1e-2,
            steps=30,
            tokens_per_step=512,
        )
        self.loop = DistillLoop(self.trainer, self.store, every=16)

    def serve(self, expert: str, count: int, seed: int, length: int = 24) -> float:
        """Answer prompts of a "domain" (its own corner of the vocabulary); returns the acceptance rate."""
        low = {"code": 0, "prose": 48, SHARED: 0}[expert]
        prompts = [[low + token % 24 for token in prompt] for prompt in prompts_of(count, seed, 12)]
        outputs = self.engine.generate(prompts, SamplingParams(max_tokens=length), expert=expert, learn=True)
        return sum(o.num_accepted_tokens for o in outputs) / sum(o.num_draft_tokens for o in outputs)


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
    model = rig.engine.drafter.model  # type: ignore[union-attr]
    for name in (SHARED, "code", "prose"):
        rig.bank.select([name])
        logits[name] = model.forward(model.new_cache(1), 0, ids, [0])
    assert torch.equal(logits[SHARED], logits["code"])
    rig.loop.run_once("code")
    rig.loader.refresh([], now=True)
    rig.bank.select(["code"])
    alone = model.forward(model.new_cache(1), 0, ids, [0])
    assert not torch.allclose(alone, logits[SHARED], atol=1e-3)
    trained = rig.trainer
    trained._activate("code")
    torch.testing.assert_close(alone, trained.model(ids).logits, atol=1e-4, rtol=1e-4)
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
    model = rig.engine.drafter.model  # type: ignore[union-attr]
    rig.trainer._activate("code")
    got = model.forward(model.new_cache(1), 0, ids, [0])
    torch.testing.assert_close(got, rig.trainer.model(ids).logits, atol=1e-4, rtol=1e-4)


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
    assert DistillLoop(rig.trainer, rig.store, every=16).due() is None  # after a restart
    assert rig.loop.run_once() is None
    assert rig.loop.run_once("prose") is None  # nothing to learn from


def test_a_restarted_trainer_goes_on_from_the_live_version(rig: Rig) -> None:
    rig.serve("code", 20, seed=1)
    first = rig.loop.run_once("code")
    other = Trainer(
        random_model("llama", 1, layers=2),
        rig.store.registry,
        rig.store.adapters,
        rig.store.replay,
        rank=16,
        shared_rank=16,
    )
    other._activate("code")
    assert first is not None
    tensors = rig.store.adapters.load(first.version).tensors
    state = {k: v for k, v in other.model.named_parameters() if "adapter_code" in k}
    for name, value in tensors.items():
        held = next(v for k, v in state.items() if k.replace(".adapter_code", "") == name)
        assert torch.equal(held, value)


def test_full_disk_pauses_learning_and_serving_goes_on(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    from moedraft.storage import StorageFull

    def full(*_: object, **__: object) -> None:
        raise StorageFull("The disk of the home is full.")

    with monkeypatch.context() as broken:
        broken.setattr(rig.store.replay, "add", full)
        broken.setattr(rig.store.adapters, "publish", full)
        rig.serve("code", 2, seed=1)
        assert rig.recorder.status == "paused: The disk of the home is full."
    rig.serve("code", 20, seed=1)
    assert rig.recorder.status == "learning"
    with monkeypatch.context() as broken:
        broken.setattr(rig.store.adapters, "publish", full)
        assert rig.loop.run_once("code") is None
        assert rig.loop.status.startswith("paused")
    assert rig.loop.run_once("code") is not None
