"""The feature drafter in the engine: exact answers, and guesses that are those of one whole pass."""

from __future__ import annotations

import random
from collections import Counter
from itertools import product

import numpy as np
import pytest
import torch
from slow_cases import case, slow

from moedraft.core import SamplingParams
from moedraft.drafting.drafter import NoDrafter, NoExperts
from moedraft.drafting.feature import MOST_WAITING, FeatureDrafter
from moedraft.engine.engine import Engine
from moedraft.evidence import Evidence
from moedraft.feature.config import config_for
from moedraft.feature.model import FeatureDraft
from moedraft.models import LanguageModel
from moedraft.routing.selector import FixedSelector

from random_features import LAYERS, SOME, STEADY, best_of, draft_for, generated, target_of
from random_models import prompts_of, random_model
from tiny import NumberTokenizer, TinyLM, random_table


class Noted:
    """Keeps what every round showed, with the texts as they stood before it."""

    def __init__(self) -> None:
        self.seen: list[tuple[Evidence, list[list[int]]]] = []

    def observe(self, evidence: Evidence) -> None:
        self.seen.append((evidence, [list(row.token_ids) for row in evidence.rows]))


def engine_of(target: LanguageModel, *, slots: int = 4, **options: object) -> tuple[Engine, Noted]:
    noted = Noted()
    drafter = FeatureDrafter(draft_for(target), NoExperts(), slots, target.vocab_size)
    made = Engine(
        target, NumberTokenizer(), drafter, FixedSelector(), learners=[noted], max_batch_size=slots, **options
    )  # type: ignore[arg-type]
    return made, noted


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *(case(kind, {}) for kind in ("llama", "qwen2", "gpt_neox", STEADY)),
        *(("llama", options) for options in ({"adaptive_budget": False}, {"prefill_chunk": 5})),
        *(slow(kind, {"adaptive_budget": False}) for kind in ("qwen2", "gpt_neox", STEADY)),
        *(slow(kind, {"prefill_chunk": 5}) for kind in ("qwen2", "gpt_neox", STEADY)),
    ],
)
def test_greedy_answers_are_the_targets_own(kind: str, options: dict[str, object]) -> None:
    """Ragged prompts, one of a single token; requests join as others leave, with lookup beside the model.

    They are those of transformers' own `generate`, without any fast path of ours.
    """
    one, noted = engine_of(target_of(kind), **options)
    prompts = [[5], *prompts_of(9, seed=3)]
    params = [SamplingParams(max_tokens=random.Random(i).randrange(1, 50)) for i in range(10)]
    found = one.generate(prompts, params)
    for prompt, each, output in zip(prompts, params, found, strict=True):
        assert output.token_ids == generated(kind, tuple(prompt), each.max_tokens)
    drafted = Counter(source for evidence, _ in noted.seen for source in evidence.proposal.sources)
    assert drafted["feature"] > 2  # the budget soon sees that a random drafter is worth little


@pytest.mark.parametrize(
    ("kind", "source", "adaptive"),
    [
        *product(("llama",), ("model", "auto"), (True, False)),
        *(case(kind, "model", False) for kind in ("gpt_neox", STEADY)),
        *(slow(*case) for case in product(("gpt_neox", STEADY), ("auto",), (True, False))),
        *(slow(*case) for case in product(("gpt_neox", STEADY), ("model",), (True,))),
    ],
)
def test_each_guess_is_that_of_one_pass_over_the_whole_text(kind: str, source: str, adaptive: bool) -> None:
    """Whatever was accepted, refused, looked up or decoded plainly before, in whatever slot.

    This pins which features and which tokens stand together: entry i holds the features at i and the token
    at i + 1, and guesses the token at i + 2.
    """
    target = target_of(kind)
    one, noted = engine_of(target, draft_source=source, adaptive_budget=adaptive)
    draft = one.chooser.model.draft  # type: ignore[union-attr]
    # As if drafting cost next to nothing: else the budget leaves it, sooner or later by this machine's times.
    one.chooser.budget.costs.slopes = lambda rows: np.array([0.0, 0.001, 0.001])  # type: ignore[method-assign]
    one.generate(prompts_of(7, seed=4), SamplingParams(max_tokens=30))
    compared, listed = 0, []
    for evidence, texts in noted.seen:
        for b in evidence.drafted_by("feature"):
            text = torch.tensor([texts[b]])
            states = target.hf(text, output_hidden_states=True).hidden_states
            features = torch.cat([states[layer] for layer in LAYERS], dim=-1)[:, :-1]
            hidden = draft.advance(draft.new_cache(1), 0, draft.fuse(features), text[:, 1:], [0])
            assert evidence.proposal.token_ids[b, 0] == best_of(draft, hidden[0, -1], texts[b])
            listed.append(int(evidence.proposal.token_ids[b, 0]) in SOME.tolist())
            compared += 1
    assert compared >= (6 if adaptive else 60)  # the budget asks others for most of them
    assert adaptive or {*listed} == {True, False}


@pytest.mark.parametrize("kind", ["llama", "gpt_neox", STEADY])
@pytest.mark.parametrize("adaptive", [True, False])
def test_an_answer_may_fill_the_context_to_its_last_position(kind: str, adaptive: bool) -> None:
    one, noted = engine_of(target_of(kind), adaptive_budget=adaptive, max_model_len=256)
    prompts = [
        [random.Random(seed).randrange(90) for _ in range(length)] for seed, length in ((4, 230), (5, 250))
    ]
    found = one.generate(prompts, SamplingParams(max_tokens=500, ignore_eos=True))
    for prompt, output in zip(prompts, found, strict=True):
        assert output.finish_reason == "length"
        assert output.token_ids == generated(kind, tuple(prompt), 256 - len(prompt))
    assert any(evidence.drafted_by("feature") for evidence, _ in noted.seen)


@pytest.mark.parametrize("longest", [12, 24])
def test_no_guess_stands_behind_what_the_drafter_can_read(longest: int) -> None:
    """The answer goes on without drafts; other rows of the batch are drafted for."""
    one, noted = engine_of(random_model("llama", 0), adaptive_budget=False)
    one.chooser.model.max_len = longest
    prompts = prompts_of(6, seed=6, longest=10)
    found = one.generate(prompts, SamplingParams(max_tokens=40, ignore_eos=True))
    assert [o.token_ids for o in found] == [generated("llama", tuple(prompt), 40) for prompt in prompts]
    ends = []
    for evidence, texts in noted.seen:
        for b in evidence.drafted_by("feature"):
            ends.append(len(texts[b]) + evidence.proposal.lengths[b])
    assert max(ends) == longest
    assert any(len(text) > longest for _, texts in noted.seen for text in texts)


def test_a_cache_of_the_drafter_that_is_not_right_changes_guesses_and_no_answer() -> None:
    """A negative control of the test above: a shifted cache is noticed in the guesses, and only there."""
    prompt = [5, 6, 7, 8]

    def guessed(shifts: bool) -> tuple[list[list[int]], list[int]]:
        one, noted = engine_of(random_model("llama", 0), slots=1, adaptive_budget=False, draft_source="model")
        one.add(prompt, SamplingParams(max_tokens=40, ignore_eos=True), request_id="x")
        outputs = [each for _ in range(5) for each in one.step()]
        if shifts:
            layer = one.chooser.model.cache.layers[0]  # type: ignore[union-attr]
            with torch.inference_mode():
                layer.keys[0] = layer.keys[0].roll(1, dims=0)
        while one.has_work:
            outputs += one.step()
        return [evidence.proposal.token_ids[0].tolist() for evidence, _ in noted.seen], outputs[-1].token_ids

    (right, answer), (wrong, same) = guessed(False), guessed(True)
    assert right != wrong
    assert answer == same == generated("llama", tuple(prompt), 40)


def test_a_cache_of_the_target_that_is_not_right_is_noticed() -> None:
    """A negative control: the answers are compared with something that a wrong cache changes."""
    one, _ = engine_of(random_model("llama", 0), slots=1)
    one.add([5, 6, 7, 8], SamplingParams(max_tokens=40, ignore_eos=True), request_id="x")
    for _ in range(3):
        one.step()
    layer = one.runner.cache.layers[0]
    with torch.inference_mode():
        layer.keys[0] = layer.keys[0].roll(1, dims=0)
    outputs = []
    while one.has_work:
        outputs += one.step()
    assert outputs[-1].token_ids != generated("llama", (5, 6, 7, 8), 40)


def test_what_waits_for_a_row_that_is_not_drafted_for_stays_bounded() -> None:
    """Plain decoding keeps features for the next draft; they are read into the cache from time to time."""
    target = random_model("llama", 0)
    one, noted = engine_of(target, slots=1, max_speculative_tokens=0)
    one.generate([[1, 2, 3]], SamplingParams(max_tokens=3 * MOST_WAITING - 100, ignore_eos=True))
    drafter = one.chooser.model
    assert not drafter._waiting  # type: ignore[union-attr]  # nothing is kept of what has ended
    row = noted.seen[-1][0].rows[0]
    assert row.draft_cached >= MOST_WAITING
    assert not any(noted.seen[-1][0].proposal.lengths)


def test_long_answers_of_lookup_alone_are_the_targets_own() -> None:
    """What waits is read while tokens that were just accepted are not in the text yet."""
    target = random_model("llama", 0)
    one, noted = engine_of(target, slots=2, draft_source="lookup")
    params = SamplingParams(max_tokens=3 * MOST_WAITING, ignore_eos=True)
    prompts = [[7, 8, 9, 10] * 4, [5, 6] * 8]
    found = one.generate(prompts, params)
    plain = Engine(target, NumberTokenizer(), NoDrafter(), FixedSelector()).generate(prompts, params)
    assert [o.token_ids for o in found] == [o.token_ids for o in plain]
    assert sum(sum(evidence.accepted) for evidence, _ in noted.seen) > 2 * MOST_WAITING
    assert all(row.draft_cached >= MOST_WAITING for row in noted.seen[0][0].rows)


def test_a_row_that_wants_no_draft_keeps_no_features() -> None:
    one, _ = engine_of(random_model("llama", 0))
    one.add([1, 2, 3, 4], SamplingParams(max_tokens=20), draft=False)
    for _ in range(5):
        one.step()
    assert not one.chooser.model._waiting  # type: ignore[union-attr]


class TinyFeatures(FeatureDraft):
    """A random drafter for a table of logits, whose hidden state is a pair of tokens."""

    def __init__(self, vocab: int) -> None:
        torch.manual_seed(3)
        heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 3}
        shape = {"hidden_size": 16, "intermediate_size": 32, "vocab_size": vocab, "head_dim": 8}
        fake = type("Config", (), heads | shape | {"max_position_embeddings": 512})()
        size = vocab - 2  # two tokens are never drafted
        config = config_for(fake, draft_vocab_size=size, feature_layers=LAYERS, feature_size=2)
        super().__init__(config, torch.arange(size), torch.randn(vocab, 16), torch.randn(vocab, 16))
        self.eval().requires_grad_(False)


@pytest.mark.parametrize(
    ("adaptive", "rule"), [(True, "chain"), slow(False, "chain"), (False, "block"), (False, "coupled")]
)
@pytest.mark.usefixtures("unseeded")
def test_sampled_answers_follow_the_target(adaptive: bool, rule: str) -> None:
    """χ² over all pairs of tokens; the negative control is another target's law."""
    vocab, runs = 6, 4000 if rule == "chain" else 2000
    target, other = TinyLM(random_table(vocab, 1)), TinyLM(random_table(vocab, 2))
    drafter = FeatureDrafter(TinyFeatures(vocab), NoExperts(), 32, vocab)
    one = Engine(
        target,
        NumberTokenizer(),
        drafter,
        FixedSelector(),
        max_batch_size=32,
        adaptive_budget=adaptive,
        draft_source="model",
        verification=rule,  # type: ignore[arg-type]
    )
    one.chooser.budget.costs.slopes = lambda rows: np.array([0.0, 0.1, 0.01])  # type: ignore[method-assign]
    params = [
        SamplingParams(temperature=1.0, max_tokens=3, seed=None if adaptive else i) for i in range(runs)
    ]
    outputs = one.generate([[3, 1]] * runs, params)
    assert sum(o.speculation.num_draft_tokens for o in outputs) > (100 if adaptive else runs)
    counts = Counter(tuple(o.token_ids[1:]) for o in outputs)

    def chi2(model: TinyLM) -> float:
        first = model.logits_after([3, 1]).softmax(-1)
        mass: Counter[tuple[int, int]] = Counter()
        for a in range(vocab):
            second = model.logits_after([1, a]).softmax(-1)
            for b in range(vocab):
                third = model.logits_after([a, b]).softmax(-1)
                for c in range(vocab):
                    mass[b, c] += float(first[a] * second[b] * third[c])
        return sum((counts[key] - runs * p) ** 2 / (runs * p) for key, p in mass.items())

    assert chi2(target) < 35 + 4.5 * (2 * 35) ** 0.5
    assert chi2(other) > 35 + 20 * (2 * 35) ** 0.5


def test_a_drafter_that_gives_no_numbers_is_given_up() -> None:
    target = random_model("llama", 0)
    one, _ = engine_of(target, draft_source="model")
    one.chooser.model.draft.norm.weight.fill_(torch.nan)  # type: ignore[union-attr]
    prompts = prompts_of(3, seed=5)
    outputs = one.generate(prompts, SamplingParams(max_tokens=12))
    plain = Engine(target, NumberTokenizer(), NoDrafter(), FixedSelector())
    assert [o.token_ids for o in outputs] == [
        o.token_ids for o in plain.generate(prompts, SamplingParams(max_tokens=12))
    ]
