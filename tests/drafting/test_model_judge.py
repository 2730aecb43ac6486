"""Verdicts on an independent draft's experts are those of a pass over the whole text with each alone."""

from __future__ import annotations

import pytest
import torch
from looking import Looking
from random_experts import publish_random

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


@pytest.mark.parametrize("source", ["model", "auto"])
@pytest.mark.parametrize(
    ("kind", "fast"), [("llama", True), ("llama", False), ("qwen2", True), ("gpt_neox", True), ("gpt2", True)]
)
def test_verdicts_are_those_of_each_expert_alone(kind: str, fast: bool, source: str) -> None:
    """Rows of several lengths in changing slots, with other experts drafting than those compared."""
    target = random_model(kind, 0)
    draft, bank = drafts(kind, fast=fast, layers=3)
    drafter = ModelDrafter(draft, bank, 3, target.vocab_size, chunk=7)
    looking = Looking()
    looking.judge = ModelJudge(drafter, bank)
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
def test_the_cache_is_left_as_it_was(kind: str) -> None:
    """So that whoever drafts next finds what it would have found."""
    draft, bank = drafts(kind)
    drafter = ModelDrafter(draft, bank, 1, VOCAB)
    running = row(0, *prompts_of(1, seed=4)[0], *range(20))
    drafter._read(running)
    judge = ModelJudge(drafter, bank)
    before = [(layer.keys.clone(), layer.values.clone()) for layer in drafter.cache.layers]
    passage = judge.known(running, 3, 24)
    assert passage.end == len(running.token_ids) - 1
    judge.hits([passage], judge.arms)
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
    [name] = [one for one in bank.layers if one.endswith("1.self_attn.k_proj")]
    out, inner = bank.layers[name].base_weight().shape
    bank.publish("a", Adapter(9, {name: (torch.ones(1, inner), torch.ones(out, 1))}))
    known = judge.known(running, 5, 8)
    assert known.end == known.first


def test_what_only_the_targets_vocabulary_has_is_never_guessed() -> None:
    draft, bank = drafts("llama")
    judge = ModelJudge(ModelDrafter(draft, bank, 1, VOCAB + 5), bank)
    running = row(0, 1, 2, 3, *[VOCAB + 2] * 9)
    judge.drafter._read(running)
    [found] = judge.hits([judge.known(running, 2, 8)], judge.arms)
    assert found.keys() == {SHARED, "a", "b", "c"}
    assert not any(map(any, found.values()))
