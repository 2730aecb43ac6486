"""Answers stay the target's own although evidence changes who drafts in mid-answer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from random_experts import bank_of, base_of, publish_random
from slow_cases import case, slow

from moedraft import core
from moedraft.core import SHARED, SamplingParams
from moedraft.drafting.arms.feature_judge import FeatureJudge
from moedraft.drafting.arms.model_judge import ModelJudge
from moedraft.drafting.drafter import Another, ExpertDrafter
from moedraft.drafting.experts.adapter import HEAD, Adapter
from moedraft.drafting.experts.lora import ExpertBank
from moedraft.drafting.feature import FeatureDrafter
from moedraft.drafting.kept import ReadStates
from moedraft.drafting.model import ModelDrafter
from moedraft.engine.engine import Engine
from moedraft.evidence import Evidence, Proposal, Rows
from moedraft.feature.config import config_for
from moedraft.feature.model import FeatureDraft
from moedraft.models import LanguageModel
from moedraft.routing.router import Route
from moedraft.selecting import contest
from moedraft.selecting.selector import ArmJudge, EvidenceSelector

from random_features import STEADY, generated, target_of
from random_models import prompts_of, random_model
from tiny import NumberTokenizer, TinyLM, random_table

VOCABULARY, RUNS = 6, 4000
OTHER_WAYS: tuple[dict[str, object], ...] = ({"adaptive_budget": False}, {"prefill_chunk": 5})


class Undecided:
    """A router that knows three domains and finds all of them alike."""

    domains = ("a", "b", "c")
    fits = 0

    def route(self, texts: list[str]) -> list[Route]:
        return [Route("a", 0.4, {"a": 0.4, "b": 0.2, "c": 0.2, SHARED: 0.2}) for _ in texts]


class Noted(EvidenceSelector):
    """Remembers who drafted in each round."""

    def __init__(self, judge: ArmJudge) -> None:
        super().__init__(Undecided(), judge, time_share=None)  # type: ignore[arg-type]
        self.drafted: dict[str, list[str]] = {}

    def assign(self, sequences: list[core.Sequence]) -> None:
        super().assign(sequences)
        for routed, _ in self._open:
            routed.result()

    def observe(self, evidence: Evidence) -> None:
        for row, expert in zip(evidence.rows, evidence.proposal.experts, strict=True):
            self.drafted.setdefault(row.request_id, []).append(expert)

    @property
    def switched(self) -> int:
        """Answers that more than one expert drafted."""
        return sum(len(set(experts)) > 1 for experts in self.drafted.values())


@pytest.fixture(params=[0, 1], ids=["after every round", "after every refusal"])
def often(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """The arms are compared very often, and up to the end of an answer."""
    monkeypatch.setattr(contest, "REFUSALS", (request.param,))
    monkeypatch.setattr(contest, "FEW_LEFT", 0)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *(case(kind, {}) for kind in ("llama", "qwen2", "gpt_neox", STEADY)),
        *(("llama", options) for options in OTHER_WAYS),
        *(slow(kind, options) for kind in ("qwen2", "gpt_neox", STEADY) for options in OTHER_WAYS),
    ],
)
@pytest.mark.usefixtures("often")
def test_greedy_answers_are_the_targets_own(tmp_path: Path, kind: str, options: dict[str, object]) -> None:
    """They are those of transformers' own `generate`, without any fast path of ours."""
    target = target_of(kind)
    base = base_of(target, tmp_path / "draft")
    bank = bank_of(base)
    drafter = FeatureDrafter(base.hf, bank, 4, target.vocab_size, states=ReadStates())
    answers_as_transformers(kind, target, drafter, FeatureJudge(drafter, bank), options)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *((kind, {}) for kind in ("llama", "qwen2", "gpt_neox", "gpt2")),
        ("llama", {"adaptive_budget": False}),
        *(slow(kind, {"adaptive_budget": False}) for kind in ("qwen2", "gpt_neox", "gpt2")),
    ],
)
@pytest.mark.usefixtures("often")
def test_greedy_answers_beside_an_independent_draft(kind: str, options: dict[str, object]) -> None:
    target, draft = target_of(kind), target_of(kind)
    bank = ExpertBank(draft)
    publish_random(bank, dict.fromkeys("abc"), scale=0.15)
    drafter = ModelDrafter(draft, bank, 4, target.vocab_size)
    answers_as_transformers(kind, target, drafter, ModelJudge(drafter, bank), options)


def answers_as_transformers(
    kind: str, target: LanguageModel, drafter: ExpertDrafter, judge: ArmJudge, options: dict[str, object]
) -> None:
    """The engine's answers are those of `generate`, while evidence exchanges who drafts."""
    selector = Noted(judge)
    engine = Engine(
        target, NumberTokenizer(), drafter, selector, learners=[selector], max_batch_size=4, **options
    )  # type: ignore[arg-type]
    prompts, params = [[5], *prompts_of(9, seed=3)], SamplingParams(max_tokens=40)
    found = engine.generate(prompts, params)
    assert [one.token_ids for one in found] == [generated(kind, tuple(prompt), 40) for prompt in prompts]
    assert selector.comparisons > 3
    if options.get("adaptive_budget") is False:
        assert selector.switched >= 3
    selector.close()


class TinyFeatures(FeatureDraft):
    """A random drafter for a table of logits, whose hidden state is a pair of tokens."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 3}
        shape = {"hidden_size": 16, "intermediate_size": 32, "vocab_size": VOCABULARY, "head_dim": 8}
        fake = type("Config", (), heads | shape | {"max_position_embeddings": 512})()
        config = config_for(fake, draft_vocab_size=VOCABULARY, feature_layers=(0, 1, 2), feature_size=2)
        tables = torch.randn(VOCABULARY, 16), 0.2 * torch.randn(VOCABULARY, 16)
        super().__init__(config, torch.arange(VOCABULARY), *tables)
        self.eval().requires_grad_(False)


class TinyBase:
    """What a bank asks of a draft base."""

    name, num_layers, num_parameters, cpu_fast_paths = "tiny", 1, 1, False
    device = torch.device("cpu")

    def __init__(self) -> None:
        self.hf = TinyFeatures()

    def weights_hash(self) -> str:
        return "tiny"


def tiny_bank(base: TinyBase) -> ExpertBank:
    """Experts that differ, and leave every token some chance."""
    bank = ExpertBank(base)  # type: ignore[arg-type]
    for seed, name in enumerate("abc", start=5):
        generator = torch.Generator().manual_seed(seed)
        a, b = torch.randn(4, 16, generator=generator), torch.randn(VOCABULARY, 4, generator=generator)
        bank.publish(name, Adapter(1, {HEAD: (a, 0.2 * b)}))
    return bank


class Peeking(FeatureDrafter):
    """Has another expert draft where it does not like what was proposed. This is wrong, and must show."""

    def propose(self, rows: Rows, limits: list[int], another: Another) -> Proposal:
        waiting, cached = dict(self._waiting), [row.draft_cached for row in rows.sequences]
        first = super().propose(rows, limits, another)
        self._waiting = waiting
        for row, count, token in zip(rows.sequences, cached, first.token_ids[:, 0].tolist(), strict=True):
            row.draft_cached = count
            row.expert = "a" if token < VOCABULARY // 2 else "b"
        return super().propose(rows, limits, another)


def chi2(counts: Counter[tuple[int, ...]], model: TinyLM) -> float:
    """Of the second and third token after [3, 1], against the target's own law."""
    first = model.logits_after([3, 1]).softmax(-1)
    mass: Counter[tuple[int, int]] = Counter()
    for a in range(VOCABULARY):
        second = model.logits_after([1, a]).softmax(-1)
        for b in range(VOCABULARY):
            third = model.logits_after([a, b]).softmax(-1)
            for c in range(VOCABULARY):
                mass[b, c] += float(first[a] * second[b] * third[c])
    runs = counts.total()
    return sum((counts[key] - runs * share) ** 2 / (runs * share) for key, share in mass.items())


def of_features(kind: type[FeatureDrafter] = FeatureDrafter) -> tuple[ExpertDrafter, ArmJudge]:
    base = TinyBase()
    bank = tiny_bank(base)
    drafter = kind(base.hf, bank, 32, VOCABULARY, states=ReadStates())
    return drafter, FeatureJudge(drafter, bank)


def of_model() -> tuple[ExpertDrafter, ArmJudge]:
    draft = random_model("llama", 3, layers=2, vocab=VOCABULARY)
    bank = ExpertBank(draft)
    publish_random(bank, dict.fromkeys("abc"))
    drafter = ModelDrafter(draft, bank, 32, VOCABULARY)
    judge = ModelJudge(drafter, bank, clock=lambda: 0.0)
    judge.most_rows = 32  # all rows are compared between any two steps, so that many change hands
    return drafter, judge


def sampled(
    drafter: ExpertDrafter, judge: ArmJudge, runs: int = RUNS
) -> tuple[Counter[tuple[int, ...]], Noted]:
    target, selector = TinyLM(random_table(VOCABULARY, 1)), Noted(judge)
    engine = Engine(
        target,
        NumberTokenizer(),
        drafter,
        selector,
        learners=[selector],
        max_batch_size=32,
        adaptive_budget=False,
        num_speculative_tokens=2,
        draft_source="model",
    )
    outputs = engine.generate([[3, 1]] * runs, SamplingParams(temperature=1.0, max_tokens=3))
    selector.close()
    return Counter(tuple(one.token_ids[1:]) for one in outputs), selector


@pytest.mark.usefixtures("often", "unseeded")
@pytest.mark.parametrize(("pair", "runs"), [(of_features, RUNS), (of_model, RUNS // 2)])
def test_sampled_answers_follow_the_target(
    pair: Callable[[], tuple[ExpertDrafter, ArmJudge]], runs: int
) -> None:
    """χ² over all pairs of tokens, with experts that evidence exchanges after each token."""
    counts, selector = sampled(*pair(), runs)
    assert selector.switched > runs / 10
    assert chi2(counts, TinyLM(random_table(VOCABULARY, 1))) < 35 + 4.5 * (2 * 35) ** 0.5
    assert chi2(counts, TinyLM(random_table(VOCABULARY, 2))) > 35 + 20 * (2 * 35) ** 0.5


@pytest.mark.usefixtures("often", "unseeded")
@pytest.mark.parametrize("often", [0], indirect=True, ids=["after every round"])
def test_an_expert_chosen_by_what_was_proposed_is_noticed() -> None:
    """Negative control: whoever peeks at the candidates changes the law of the answers."""
    counts, _ = sampled(*of_features(Peeking), 2 * RUNS)
    assert chi2(counts, TinyLM(random_table(VOCABULARY, 1))) > 35 + 8 * (2 * 35) ** 0.5
