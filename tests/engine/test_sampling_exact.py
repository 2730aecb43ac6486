"""Sampled answers follow the target's distribution exactly, at every position; each test can fail."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from chi_squares import p_values
from slow_cases import slow

import moedraft.drafting.drawing as drawing_module
import moedraft.engine.verification as verification_module
from moedraft.core import SHARED, SamplingParams
from moedraft.drafting.drafter import NoExperts
from moedraft.drafting.lengths.budget import Budget, Plan
from moedraft.drafting.lookup.past_answers import PastAnswers
from moedraft.drafting.model import ModelDrafter
from moedraft.engine.engine import Engine
from moedraft.kernels.philox import ACCEPT, uniform
from moedraft.routing.selector import FixedSelector
from moedraft.sampling import SamplingBatch, filter_logits

from tiny import NumberTokenizer, TinyLM, random_table

VOCAB = 8
PROMPT = [3, 1]
REPEATING = [3, 1, 7, 3, 1]  # 7 is the likeliest token after 3, 1
LENGTH = 4
RUNS = 3000
MORE = 6000  # where a fault must show clearly
STRANGER = TinyLM(random_table(VOCAB, 5))  # a draft that knows nothing of the target


def exact(target: TinyLM, params: SamplingParams, prompt: list[int] = PROMPT) -> dict[tuple[int, ...], float]:
    """Probability of every answer of LENGTH tokens."""
    batch = SamplingBatch.of([params], [0], torch.device("cpu"))
    answers = {(): 1.0}
    for _ in range(LENGTH):
        grown = {}
        for answer, mass in answers.items():
            logits = filter_logits(target.logits_after([*prompt, *answer])[None], batch)
            for token, p in enumerate((logits / params.temperature).softmax(-1)[0].tolist()):
                if p > 0:
                    grown[(*answer, token)] = mass * p
        answers = grown
    return answers


def sample(
    target: TinyLM,
    draft: TinyLM,
    params: SamplingParams,
    adaptive: bool = False,
    *,
    source: str = "model",
    prompt: list[int] = PROMPT,
    verification: str = "chain",
    runs: int = RUNS,
    past: PastAnswers | None = None,
) -> list[tuple[int, ...]]:
    engine = Engine(
        target,
        NumberTokenizer(),
        ModelDrafter(draft, NoExperts(), 64, VOCAB),
        FixedSelector(),
        max_batch_size=64,
        num_speculative_tokens=3,
        adaptive_budget=adaptive,
        draft_source=source,  # type: ignore[arg-type]
        verification=verification,  # type: ignore[arg-type]
        past=past,
    )
    # Fixed costs, as of a target ten times the draft: the budget's choices then depend on confidence alone.
    slopes = np.array([0.0, 0.1, 0.01])
    engine.chooser.budget.costs.slopes = lambda rows: slopes  # type: ignore[method-assign]
    each = [
        SamplingParams(
            params.temperature, params.top_k, params.top_p, LENGTH, seed=None if adaptive else 1000 + i
        )
        for i in range(runs)
    ]
    outputs = engine.generate([prompt] * runs, each)
    least = runs if source == "model" else runs / 10  # speculation of each kind took place
    assert source == "lookup" or sum(o.speculation.num_draft_tokens for o in outputs) > least
    assert source == "model" or sum(o.speculation.num_lookup_tokens for o in outputs) > least
    return [tuple(o.token_ids) for o in outputs]


@pytest.fixture(scope="module")
def models() -> tuple[TinyLM, TinyLM]:
    target = TinyLM(random_table(VOCAB, 1))
    return target, TinyLM(0.6 * target.table + 0.6 * random_table(VOCAB, 2))


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(1.0),
        slow(SamplingParams(0.6)),
        slow(SamplingParams(1.7, top_k=4)),
        slow(SamplingParams(1.0, top_p=0.7)),
        SamplingParams(1.3, top_k=5, top_p=0.8),
    ],
    ids=["plain", "cool", "top_k", "top_p", "both"],
)
def test_distribution(models: tuple[TinyLM, TinyLM], params: SamplingParams) -> None:
    answers = sample(*models, params)
    assert min(p_values(answers, exact(models[0], params))) > 1e-4


def test_anti_correlated_draft(models: tuple[TinyLM, TinyLM]) -> None:
    params = SamplingParams(1.0)
    answers = sample(models[0], TinyLM(-models[0].table), params)
    assert min(p_values(answers, exact(models[0], params))) > 1e-4


@pytest.mark.usefixtures("unseeded")
def test_adaptive_budget_keeps_it_exact(models: tuple[TinyLM, TinyLM]) -> None:
    """Where to stop depends on the prefix and the logits only, so unseeded answers are exact too."""
    params = SamplingParams(1.0)
    answers = sample(*models, params, adaptive=True)
    assert min(p_values(answers, exact(models[0], params))) > 1e-4


@pytest.mark.parametrize(
    ("source", "verification"), [("lookup", "chain"), slow("auto", "chain"), ("auto", "block")]
)
@pytest.mark.usefixtures("unseeded")
def test_earlier_answers_keep_it_exact(models: tuple[TinyLM, TinyLM], source: str, verification: str) -> None:
    """After a pair of the first tokens the likeliest one is found; elsewhere the model drafts."""
    past = PastAnswers(1000)
    for first in range(VOCAB // 2):
        for second in range(VOCAB // 2):
            likeliest = int(models[0].logits_after([first, second]).argmax())
            past.add(SHARED, [first, second, likeliest])
    params = SamplingParams(1.0)
    made = {"source": source, "verification": verification, "past": past}
    answers = sample(models[0], STRANGER, params, adaptive=True, **made)
    assert min(p_values(answers, exact(models[0], params))) > 1e-4


@pytest.mark.parametrize(
    "params", [slow(SamplingParams(1.0)), SamplingParams(1.3, top_k=5, top_p=0.8)], ids=str
)
def test_verification_of_whole_drafts(models: tuple[TinyLM, TinyLM], params: SamplingParams) -> None:
    answers = sample(*models, params, verification="block")
    assert min(p_values(answers, exact(models[0], params))) > 1e-4


@pytest.mark.parametrize("source", [slow("model"), "auto"])
@pytest.mark.usefixtures("unseeded")
def test_verification_of_whole_drafts_whose_length_is_chosen(
    models: tuple[TinyLM, TinyLM], source: str
) -> None:
    params, prompt = SamplingParams(1.0), PROMPT if source == "model" else REPEATING
    draft = models[1] if source == "model" else STRANGER
    answers = sample(
        models[0], draft, params, adaptive=True, source=source, prompt=prompt, verification="block"
    )
    assert min(p_values(answers, exact(models[0], params, prompt))) > 1e-4


@pytest.mark.parametrize("source", ["auto", slow("lookup")])
@pytest.mark.usefixtures("unseeded")
def test_what_is_looked_up_keeps_it_exact(models: tuple[TinyLM, TinyLM], source: str) -> None:
    """Certain guesses, alone and beside rows that the model drafts for."""
    params = SamplingParams(1.0)
    answers = sample(models[0], STRANGER, params, adaptive=True, source=source, prompt=REPEATING)
    assert min(p_values(answers, exact(models[0], params, REPEATING))) > 1e-4


def test_negative_control_certain_guesses(
    models: tuple[TinyLM, TinyLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A guess that was certain, verified as if it had been drawn evenly, is caught."""
    real = verification_module.verify_chain

    def verify(target, draft, logits, **kw):  # type: ignore[no-untyped-def]
        return real(target, draft, None if logits is None else logits.nan_to_num(neginf=0.0), **kw)

    def plan(budget: Budget, experts: object, found: dict[int, list[float]], *_: object) -> Plan:
        """Always draft; on a busy machine the budget might find that it hardly pays."""
        return Plan(True, {row: len(chances) for row, chances in found.items()})

    monkeypatch.setattr(verification_module, "verify_chain", verify)
    monkeypatch.setattr(Budget, "plan", plan)
    params = SamplingParams(1.0)
    answers = sample(models[0], STRANGER, params, adaptive=True, source="auto", prompt=REPEATING, runs=MORE)
    assert min(p_values(answers, exact(models[0], params, REPEATING))) < 1e-6


def _wrong_draft_distribution(real: Callable) -> Callable:
    """Verifies against a draft distribution other than the one sampled from."""

    def verify(target, draft, logits, **kw):  # type: ignore[no-untyped-def]
        return real(target, draft, None if logits is None else logits.flip(-1), **kw)

    return verify


def _wrong_target_distribution(real: Callable) -> Callable:
    def verify(target, draft, logits, **kw):  # type: ignore[no-untyped-def]
        return real(target * 1.15, draft, logits, **kw)

    return verify


@pytest.mark.parametrize(
    ("fault", "rule"),
    [
        (_wrong_draft_distribution, "chain"),
        slow(_wrong_draft_distribution, "block"),
        slow(_wrong_target_distribution, "chain"),
        (_wrong_target_distribution, "block"),
    ],
)
def test_negative_controls(
    models: tuple[TinyLM, TinyLM], monkeypatch: pytest.MonkeyPatch, fault: Callable, rule: str
) -> None:
    name = f"verify_{rule}"
    monkeypatch.setattr(verification_module, name, fault(getattr(verification_module, name)))
    params = SamplingParams(1.0)
    answers = sample(*models, params, verification=rule, runs=MORE)
    assert min(p_values(answers, exact(models[0], params))) < 1e-6


def test_negative_control_shared_noise(
    models: tuple[TinyLM, TinyLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draft that uses the verifier's uniforms (here: the very same counters) is caught."""

    def draw(logits, temperature, seed, position, cuts):  # type: ignore[no-untyped-def]
        scaled = logits / temperature[:, None]
        u = uniform(seed, position, ACCEPT)
        tokens = (scaled.softmax(-1).cumsum(-1) < u[:, None]).sum(-1).clamp_max(VOCAB - 1)
        return tokens, scaled.logsumexp(-1), scaled.softmax(-1).amax(-1)

    monkeypatch.setattr(drawing_module, "sample_draft", draw)
    params = SamplingParams(1.0)
    assert min(p_values(sample(*models, params, runs=MORE), exact(models[0], params))) < 1e-6


@pytest.mark.parametrize("rule", ["chain", "block"])
def test_same_seed_same_answer_alone_or_in_a_batch(models: tuple[TinyLM, TinyLM], rule: str) -> None:
    target, draft = models

    def run(prompts: list[list[int]], slots: int) -> list[list[int]]:
        drafter = ModelDrafter(draft, NoExperts(), slots, VOCAB)
        engine = Engine(
            target, NumberTokenizer(), drafter, FixedSelector(), max_batch_size=slots,
            verification=rule,  # type: ignore[arg-type]
        )  # fmt: skip
        each = [SamplingParams(1.0, max_tokens=10 + i, seed=i) for i in range(len(prompts))]
        return [o.token_ids for o in engine.generate(prompts, each)]

    prompts = [[i % VOCAB, (i * 3) % VOCAB][: 1 + i % 2] for i in range(12)]
    alone, together = run(prompts, 1), run(prompts, 8)
    assert alone == together
    assert len({tuple(a[:8]) for a in alone}) > 6


@pytest.mark.parametrize(
    "params", [slow(SamplingParams(1.0)), SamplingParams(1.3, top_k=5, top_p=0.8)], ids=str
)
def test_coupled_sampling(models: tuple[TinyLM, TinyLM], params: SamplingParams) -> None:
    for draft in (models[1], TinyLM(-models[0].table)):
        answers = sample(models[0], draft, params, verification="coupled")
        assert min(p_values(answers, exact(models[0], params))) > 1e-4


def test_negative_control_coupled_sampling(
    models: tuple[TinyLM, TinyLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        verification_module, "verify_coupled", _wrong_target_distribution(verification_module.verify_coupled)
    )
    params = SamplingParams(1.0)
    answers = sample(*models, params, verification="coupled", runs=MORE)
    assert min(p_values(answers, exact(models[0], params))) < 1e-6


def test_coupled_a_seed_fixes_the_answer_whatever_drafts_and_however_much(
    models: tuple[TinyLM, TinyLM],
) -> None:
    """Another draft, another length, a chosen length, lookups, and no draft; a chain's answers differ."""

    def run(draft: TinyLM, length: int, rule: str = "coupled", **how: object) -> list[list[int]]:
        drafter = ModelDrafter(draft, NoExperts(), 8, VOCAB)
        engine = Engine(
            models[0], NumberTokenizer(), drafter, FixedSelector(), max_batch_size=8,
            num_speculative_tokens=length, verification=rule, **how,  # type: ignore[arg-type]
        )  # fmt: skip
        each = [SamplingParams(1.0, top_p=0.9, max_tokens=12, seed=i) for i in range(40)]
        return [o.token_ids for o in engine.generate([PROMPT] * 40, each)]

    wanted = run(models[1], 3, adaptive_budget=False)
    for draft, length in ((models[1], 1), (STRANGER, 4), (models[0], 6), (STRANGER, 0)):
        assert run(draft, length, adaptive_budget=False) == wanted
    assert run(models[1], 3, adaptive_budget=True) == wanted
    assert run(models[1], 3, adaptive_budget=True, draft_source="lookup") == wanted
    assert len({tuple(answer) for answer in wanted}) > 30
    chain = run(models[1], 3, "chain", adaptive_budget=False)
    assert chain != run(STRANGER, 3, "chain", adaptive_budget=False)


def test_filters_match_transformers() -> None:
    """top-k, top-p and both, against transformers' own warpers."""
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    logits = 3 * torch.randn(5, 50, generator=torch.Generator().manual_seed(0))
    cases = [(1.0, 5, 1.0), (0.7, 0, 0.8), (1.4, 9, 0.6), (1.0, 1, 1.0), (1.0, 0, 0.01)]
    params = [SamplingParams(t, k, p) for t, k, p in cases]
    got = filter_logits(logits, SamplingBatch.of(params, [0] * 5, torch.device("cpu")))
    for row, (t, k, p) in enumerate(cases):
        want = (
            TemperatureLogitsWarper(t)(None, logits[row : row + 1].clone())
            if t != 1
            else logits[row : row + 1]
        )
        want = TopKLogitsWarper(k)(None, want) if k else want
        want = TopPLogitsWarper(p)(None, want) if p < 1 else want
        torch.testing.assert_close((got[row : row + 1] / t).softmax(-1), want.softmax(-1))
