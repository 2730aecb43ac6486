"""Verdicts on an independent draft's experts are those of a pass over the whole text with each alone."""

from __future__ import annotations

import pytest
import torch
from looking import Looking
from random_experts import publish_random
from slow_cases import slow

from moedraft.core import SHARED, SamplingParams
from moedraft.drafting.arms.model_judge import ModelJudge
from moedraft.drafting.base import first_guesses
from moedraft.drafting.experts.adapter import Adapter
from moedraft.drafting.experts.lora import ExpertBank
from moedraft.drafting.model import ModelDrafter
from moedraft.engine.engine import Engine
from moedraft.models import LanguageModel

from random_models import VOCAB, prompts_of, random_model
from rounds import row
from tiny import NumberTokenizer

EXPERTS: dict[str, torch.Tensor | None] = {"a": None, "b": None, "c": None}


def drafts(kind: str, *, fast: bool = True, layers: int = 2) -> tuple[LanguageModel, ExpertBank]:
    draft = random_model(kind, 0, layers=layers, cpu_fast_paths=fast)
    bank = ExpertBank(draft)
    publish_random(bank, EXPERTS, scale=0.15)
    return draft, bank


@pytest.mark.parametrize(
    ("kind", "fast", "source"),
    [
        *(("llama", fast, source) for fast in (True, False) for source in ("model", "auto")),
        ("gpt_neox", True, "model"),
        *(slow(kind, True, "model") for kind in ("qwen2", "gpt2")),
        *(slow(kind, True, "auto") for kind in ("qwen2", "gpt_neox", "gpt2")),
    ],
)
def test_verdicts_are_those_of_each_expert_alone(kind: str, fast: bool, source: str) -> None:
    """Rows of several lengths in changing slots, with other experts drafting than those compared."""
    target = random_model(kind, 0)
    draft, bank = drafts(kind, fast=fast, layers=3)
    drafter = ModelDrafter(draft, bank, 3, target.vocab_size, chunk=7)
    looking = Looking()
    looking.judge = ModelJudge(drafter, bank, clock=lambda: 0.0)
    engine = Engine(target, NumberTokenizer(), drafter, looking, max_batch_size=3, draft_source=source)
    for i, prompt in enumerate(prompts_of(6, seed=2)):
        engine.add(prompt, SamplingParams(max_tokens=30), expert=[SHARED, "a", "b"][i % 3], request_id=str(i))
    while engine.has_work:
        engine.step()
    assert looking.passes > 10
    compared = right = 0
    for one in looking.rows:
        for arm in looking.judge.arms:
            bank.select([arm])
            guesses = first_guesses(draft, one.token_ids, None)
            for entry, verdict in looking.verdicts.get(one.request_id, {}).items():
                assert verdict[arm] == (guesses[entry + 1] == one.token_ids[entry + 1])
                compared, right = compared + 1, right + int(verdict[arm])
    assert compared > 200
    assert right > 5


@pytest.mark.parametrize("kind", ["llama", "gpt_neox"])
def test_cache_and_bank_are_left_as_they_were(kind: str) -> None:
    """So that whoever drafts next finds what it would have found, in the neighbours' slots too."""
    draft, bank = drafts(kind)
    drafter = ModelDrafter(draft, bank, 3, VOCAB)
    rows = [row(slot, *prompts_of(3, seed=4)[slot], *range(20)) for slot in range(3)]
    for one in rows:
        drafter._read(one)
    judge = ModelJudge(drafter, bank)
    bank.select(["a", SHARED, "c"])
    products = {name: layer.product for name, layer in bank.layers.items()}
    before = [(layer.keys.clone(), layer.values.clone()) for layer in drafter.cache.layers]
    passage = judge.known(rows[1], 3, 24)
    assert passage.end == len(rows[1].token_ids) - 1
    kept = bank.recent
    judge.hits([passage], judge.arms)
    assert bank.recent == kept  # no expert's merged weights were made, used or thrown away for this
    assert {name: layer.product for name, layer in bank.layers.items()} == products
    for layer, (keys, values) in zip(drafter.cache.layers, before, strict=True):
        torch.testing.assert_close(layer.keys, keys)
        torch.testing.assert_close(layer.values, values)


def test_nothing_is_compared_where_an_expert_has_keys_of_its_own() -> None:
    """Its queries would meet the keys of whoever drafted before."""
    draft, bank = drafts("llama")
    judge = ModelJudge(ModelDrafter(draft, bank, 1, VOCAB), bank)
    running = row(0, *range(1, 30))
    running.draft_cached = 20
    known = judge.known(running, 0, 8)
    assert (known.first, known.end) == (12, 20)
    assert judge.comparable
    [name] = [one for one in bank.layers if one.endswith("1.self_attn.k_proj")]
    out, inner = bank.layers[name].base_weight().shape
    bank.publish("a", Adapter(9, {name: (torch.ones(1, inner), torch.ones(out, 1))}))
    known = judge.known(running, 5, 8)
    assert known.end == known.first
    assert not judge.comparable


def test_what_only_the_targets_vocabulary_has_is_never_guessed() -> None:
    draft, bank = drafts("llama")
    drafter = ModelDrafter(draft, bank, 1, VOCAB + 5)
    judge = ModelJudge(drafter, bank, clock=lambda: 0.0)  # there is time for all, however slow the machine is
    bank.select([SHARED])
    running = row(0, 1, 2, 3, VOCAB + 2)
    guesses = first_guesses(draft, [1, 2, 3, 0], None)  # the draft reads such a token as its first one
    logits = draft.forward(draft.new_cache(1), 0, torch.tensor([[1, 2, 3, 0]]), [0])
    running.token_ids += [int(logits[0, -1].argmax()), VOCAB + 3, VOCAB + 3]
    judge.drafter._read(running)
    [found] = judge.hits([judge.known(running, 1, 8)], judge.arms)
    assert found.keys() == {SHARED, "a", "b", "c"}
    assert found[SHARED] == [float(guesses[2] == 3), 0.0, 1.0, 0.0, 0.0]


def test_where_time_is_short_the_leader_is_compared_with_one_other() -> None:
    """Another one from time to time, so that none is forgotten."""
    draft, bank = drafts("llama")
    seconds = iter(range(1000))
    judge = ModelJudge(ModelDrafter(draft, bank, 1, VOCAB), bank, clock=lambda: float(next(seconds)))
    running = row(0, *range(1, 30))
    judge.drafter._read(running)
    passage = judge.known(running, 0, 8)
    seen = [frozenset(judge.hits([passage], ["b", "a", SHARED, "c"])[0]) for _ in range(30)]
    assert set(seen) == {frozenset({"b", other}) for other in ("a", SHARED, "c")}


def test_nothing_is_read_again_of_a_row_whose_draft_is_no_number() -> None:
    """Its slot was emptied, and what is written there the slot's next row would read."""
    draft, bank = drafts("llama")
    judge = ModelJudge(ModelDrafter(draft, bank, 1, VOCAB), bank)
    running = row(0, *range(1, 30))
    judge.drafter._read(running)
    assert judge.known(running, 0, 8).end > judge.known(running, 0, 8).first
    running.draft = False
    assert judge.known(running, 0, 8).end == judge.known(running, 0, 8).first


@pytest.mark.parametrize("megabytes", [0, 512])
def test_arms_are_ready_though_no_weights_are_merged(megabytes: int) -> None:
    draft = random_model("llama", 0, layers=2)
    bank = ExpertBank(draft, merged_cache_mb=megabytes)
    publish_random(bank, EXPERTS, scale=0.15)
    judge = ModelJudge(ModelDrafter(draft, bank, 1, VOCAB), bank)
    assert set(judge.ready) == set(judge.arms) == {SHARED, "a", "b", "c"}
