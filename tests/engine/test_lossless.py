"""Greedy answers equal transformers' own generate, token for token, whatever the experts do."""

from __future__ import annotations

import random
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from slow_cases import slow

from moedraft.core import SHARED, RequestOutput, SamplingParams
from moedraft.drafting.drafter import NoDrafter, NoExperts
from moedraft.drafting.experts.adapter import Adapter
from moedraft.drafting.experts.lora import ExpertBank
from moedraft.drafting.model import ModelDrafter
from moedraft.engine.engine import Engine
from moedraft.models import LanguageModel
from moedraft.routing.selector import FixedSelector

from random_models import CONFIGS, VOCAB, prompts_of, random_model
from tiny import NumberTokenizer


def expected(model: LanguageModel, prompt: list[int], count: int) -> list[int]:
    ids = torch.tensor([prompt])
    out = model.hf.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, pad_token_id=0
    )
    return out[0, len(prompt) :].tolist()


@cache
def answer_of(kind: str, prompt: tuple[int, ...], count: int) -> list[int]:
    """What transformers alone answers with the target that most tests use, without any of our fast paths."""
    return expected(plain_target(kind), list(prompt), count)


@cache
def plain_target(kind: str) -> LanguageModel:
    return random_model(kind, 0, cpu_fast_paths=False)


def random_adapter(bank: ExpertBank, version: int, scale: float, names: list[str]) -> Adapter:
    deltas = {}
    for name in names:
        out, inner = bank.layers[name].base_weight().shape
        deltas[name] = (torch.randn(4, inner) * scale, torch.randn(out, 4) * scale)
    return Adapter(version, deltas)


def engine_of(
    target: LanguageModel, draft: LanguageModel, *, scope: str = "tail", slots: int = 8, **kw
) -> Engine:
    bank = ExpertBank(draft)
    drafter = ModelDrafter(draft, bank, slots, target.vocab_size)
    return Engine(target, NumberTokenizer(), drafter, FixedSelector(), max_batch_size=slots, **kw)


def greedy_cases() -> list[Any]:
    """(kind, batch, adaptive, fast). The fast tests run all kinds in one way, and one kind in all ways."""
    cases = product(CONFIGS, (1, 8), ((True, True), (False, True), (True, False)))
    return [
        (kind, batch, *ways) if kind == "llama" or (batch == 8 and all(ways)) else slow(kind, batch, *ways)
        for kind, batch, ways in cases
    ]


@pytest.mark.parametrize(("kind", "batch", "adaptive", "fast"), greedy_cases())
def test_greedy_equals_transformers(kind: str, batch: int, adaptive: bool, fast: bool) -> None:
    """A random draft (its guesses are mostly wrong) and ragged prompts; requests join as others leave."""
    target = random_model(kind, 0, cpu_fast_paths=fast)
    draft = random_model(kind, 1, layers=2, cpu_fast_paths=fast)
    engine = engine_of(target, draft, slots=batch, adaptive_budget=adaptive)
    prompts = prompts_of(6 if batch == 1 else 14, seed=batch)
    lengths = [random.Random(i).randrange(1, 60) for i in range(len(prompts))]
    outputs = engine.generate(prompts, [SamplingParams(max_tokens=n) for n in lengths])
    for prompt, length, output in zip(prompts, lengths, outputs, strict=True):
        assert output.token_ids == answer_of(kind, tuple(prompt), length)
        assert output.finish_reason == "length"


@pytest.mark.parametrize("kind", ["llama", "gpt_neox", "gpt2"])
@pytest.mark.parametrize("fast", [True, False])
def test_good_draft_is_accepted(kind: str, fast: bool) -> None:
    """The target as its own draft: everything is accepted, and the answer is still the target's."""
    target, draft = (random_model(kind, 0, cpu_fast_paths=fast) for _ in range(2))
    engine = engine_of(target, draft, adaptive_budget=False)
    prompts = prompts_of(8, seed=3)
    outputs = engine.generate(prompts, SamplingParams(max_tokens=40))
    assert [o.token_ids for o in outputs] == [answer_of(kind, tuple(p), 40) for p in prompts]
    assert (
        sum(o.speculation.num_accepted_tokens for o in outputs)
        == sum(o.speculation.num_draft_tokens for o in outputs)
        > 0
    )


@pytest.mark.parametrize(
    ("scope", "kind", "fast"),
    [
        ("tail", "llama", True),
        ("tail", "llama", False),
        slow("tail", "qwen2", True),
        slow("tail", "gpt_neox", True),
        ("full", "llama", True),
        ("full", "llama", False),
        slow("full", "qwen2", True),
        ("full", "gpt_neox", True),
    ],
)
def test_adapter_swaps_in_mid_answer(kind: str, fast: bool, scope: str) -> None:
    """Experts good, random and adversarial, swapped every few steps; more than 2 000 tokens in all."""
    target, draft = (random_model(kind, 0, cpu_fast_paths=fast) for _ in range(2))
    engine = engine_of(target, draft, scope=scope)
    bank = engine.chooser.model.bank
    assert bank.grouped == fast
    prompts = prompts_of(24, seed=5)
    names = ["a", "b", SHARED]
    ids = [
        engine.add(prompt, SamplingParams(max_tokens=90), expert=names[i % 3])
        for i, prompt in enumerate(prompts)
    ]
    modules = [n for n in bank.layers if scope == "full" or n in bank.tail]
    done, step = {}, 0
    while engine.has_work:
        if step % 7 == 3:
            scale = [0.01, 0.3, 30.0][(step // 7) % 3]  # nearly the base; random; adversarial
            who = ["a", "b", SHARED][(step // 7) % 3]
            adapter = random_adapter(bank, step, scale, list(bank.layers) if who == SHARED else modules)
            stale = bank.publish(who, adapter)
            for sequence in engine.sequences:
                if stale and (who == SHARED or sequence.expert == who):
                    sequence.draft_cached = 0
        done |= {o.request_id: o for o in engine.step() if o.finish_reason}
        step += 1
    total = 0
    for request_id, prompt in zip(ids, prompts, strict=True):
        assert done[request_id].token_ids == answer_of(kind, tuple(prompt), 90)
        total += len(done[request_id].token_ids)
    assert total > 2000


def test_no_draft_is_plain_decoding() -> None:
    target = random_model("llama", 0)
    engine = Engine(target, NumberTokenizer(), NoDrafter(), FixedSelector())
    prompts = prompts_of(5, seed=1)
    outputs = engine.generate(prompts, SamplingParams(max_tokens=30))
    assert [o.token_ids for o in outputs] == [expected(target, p, 30) for p in prompts]
    assert all(o.speculation.num_drafts == 0 and o.speculation.draft_acceptance_rate is None for o in outputs)


def test_draft_off_for_one_request() -> None:
    target, draft = random_model("llama", 0), random_model("llama", 0)
    engine = engine_of(target, draft)
    plain = engine.add([1, 2, 3], SamplingParams(max_tokens=20), draft=False)
    fast = engine.add([1, 2, 3], SamplingParams(max_tokens=20))
    done = {}
    while engine.has_work:
        done |= {o.request_id: o for o in engine.step() if o.finish_reason}
    assert done[plain].token_ids == done[fast].token_ids == expected(target, [1, 2, 3], 20)
    stats = {name: done[name].speculation for name in done}
    guessed = {name: one.num_draft_tokens + one.num_lookup_tokens for name, one in stats.items()}
    assert guessed[plain] == 0 < guessed[fast]


@pytest.mark.parametrize("fast", [True, False])
def test_chunked_prefill_and_growth(fast: bool) -> None:
    """Prompts longer than a chunk and than the cache's first capacity, beside short ones."""
    target, draft = (random_model("llama", 0, cpu_fast_paths=fast) for _ in range(2))
    engine = engine_of(target, draft, prefill_chunk=16)
    rng = random.Random(9)
    prompts = [[rng.randrange(VOCAB) for _ in range(n)] for n in (300, 3, 17, 200, 1, 2, 64, 33, 5)]
    outputs = engine.generate(prompts, SamplingParams(max_tokens=25))
    assert [o.token_ids for o in outputs] == [expected(target, p, 25) for p in prompts]


def test_smaller_draft_vocabulary() -> None:
    """Padded vocabularies differ between sizes of one family; the draft's is cut or padded."""
    target = random_model("llama", 0)
    for size in (VOCAB - 9, VOCAB + 9):
        draft = random_model("llama", 1, vocab=size)
        engine = engine_of(target, draft)
        outputs = engine.generate(prompts_of(4, seed=2), SamplingParams(max_tokens=30))
        assert [o.token_ids for o in outputs] == [expected(target, p, 30) for p in prompts_of(4, seed=2)]
        sampled = engine.generate([[1, 2]], SamplingParams(max_tokens=30, temperature=1.0, seed=1))
        assert all(0 <= token < VOCAB for token in sampled[0].token_ids)


def test_context_limit_is_exact() -> None:
    """The answer may fill the context to the last position and not beyond."""
    target, draft = random_model("gpt2", 0), random_model("gpt2", 0)
    engine = engine_of(target, draft)
    prompt = [random.Random(4).randrange(VOCAB) for _ in range(230)]
    [output] = engine.generate([prompt], SamplingParams(max_tokens=500))
    assert output.finish_reason == "length"
    assert len(output.token_ids) == 256 - 230
    assert output.token_ids == expected(target, prompt, 26)


def test_negative_control_stale_cache_is_noticed() -> None:
    """If rejected entries were not overwritten the answers would differ: shift the target's cache once."""
    target, draft = random_model("llama", 0), random_model("llama", 1)
    engine = engine_of(target, draft)
    engine.add([5, 6, 7, 8], SamplingParams(max_tokens=40), request_id="x")
    for _ in range(3):
        engine.step()
    layer = engine.runner.cache.layers[0]
    with torch.inference_mode():
        layer.keys[0] = layer.keys[0].roll(1, dims=0)
    last = None
    while engine.has_work:
        last = engine.step()
    assert last is not None
    assert last[-1].token_ids != expected(target, [5, 6, 7, 8], 40)


def test_no_experts_bank() -> None:
    target, draft = random_model("llama", 0), random_model("llama", 0)
    engine = Engine(target, NumberTokenizer(), ModelDrafter(draft, NoExperts(), 8, VOCAB), FixedSelector())
    [output] = engine.generate([[1, 2, 3]], SamplingParams(max_tokens=9))
    assert output.token_ids == expected(target, [1, 2, 3], 9)
    assert output.adapter_version == 0


# -- rows that are no numbers --------------------------------------------------------------------

NOT_A_NUMBER = VOCAB - 1  # the token whose embedding is none; no model says it


def silent(kind: str, seed: int) -> LanguageModel:
    model = random_model(kind, seed)
    model.hf.get_output_embeddings().weight[NOT_A_NUMBER] = 0
    return model


def poisoned(kind: str, seed: int) -> LanguageModel:
    model = silent(kind, seed)
    model.hf.get_input_embeddings().weight[NOT_A_NUMBER] = torch.nan
    return model


def short_beside_long(engine: Engine) -> list[tuple[list[int], RequestOutput]]:
    """Prompts without that token, and their outputs; the short ones' slots are read far past their end."""
    rng, params = random.Random(5), SamplingParams(max_tokens=12)
    prompts, outputs = {}, list[RequestOutput]()
    for length in (50, 3, 2, 4):
        prompt = [rng.randrange(NOT_A_NUMBER) for _ in range(length)]
        prompts[engine.add(prompt, params)] = prompt
        outputs += engine.step()  # each is read alone: padding would overwrite what stands in the slot
    while engine.has_work:
        outputs += engine.step()
    return [(prompts[output.request_id], output) for output in outputs if output.finish_reason]


@pytest.mark.parametrize("kind", ["llama", "gpt_neox"])
@pytest.mark.parametrize("leaves", [True, False])
def test_what_a_broken_row_leaves_in_its_slot_harms_nobody(kind: str, leaves: bool) -> None:
    target, draft = poisoned(kind, 0), silent(kind, 1)
    engine = engine_of(target, draft, slots=4, prefill_chunk=64)
    bad = [[NOT_A_NUMBER] * 40] * 4
    if leaves:  # while its prompt is being read
        ids = [engine.add(prompt) for prompt in bad]
        engine.step()
        assert [engine.abort(one).finish_reason for one in ids] == ["abort"] * 4  # type: ignore[union-attr]
    else:
        assert {output.finish_reason for output in engine.generate(bad)} == {"error"}
    for prompt, output in short_beside_long(engine):
        assert output.token_ids == expected(target, prompt, 12)


@pytest.mark.parametrize("adaptive", [True, False])
def test_what_a_broken_draft_leaves_in_its_slot_spoils_no_other_draft(adaptive: bool) -> None:
    target, draft = silent("llama", 0), poisoned("llama", 0)
    engine = engine_of(target, draft, slots=4, adaptive_budget=adaptive)
    bad = [[NOT_A_NUMBER] * 40] * 4
    for output in engine.generate(bad, SamplingParams(max_tokens=12)):
        assert output.token_ids == expected(target, bad[0], 12)
        assert output.speculation.num_accepted_tokens == 0
    engine.chooser.budget.acceptance.clear()  # it has learned that this draft is worth nothing
    outputs = [output for _, output in short_beside_long(engine)]
    assert len(outputs) == 4
    assert (
        sum(o.speculation.num_accepted_tokens for o in outputs)
        == sum(o.speculation.num_draft_tokens for o in outputs)
        > 0
    )
