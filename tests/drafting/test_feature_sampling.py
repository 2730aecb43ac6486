"""Sampled answers of a feature drafter follow the target's own law, on random transformers models.

The law is enumerated with transformers' own forward and filters, so that nothing of ours is in it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from chi_squares import Answer, p_values
from random_experts import bank_of, base_of, publish_random
from slow_cases import slow
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

import moedraft.engine.verification as verification_module
from moedraft.core import SHARED, RequestOutput, SamplingParams, Sequence
from moedraft.drafting.drafter import NoExperts
from moedraft.drafting.experts.lora import ExpertBank
from moedraft.drafting.feature import FeatureDrafter
from moedraft.engine.engine import Engine
from moedraft.evidence import Evidence
from moedraft.feature.text_tokens import TextTokens
from moedraft.routing.selector import FixedSelector

from random_features import STEADY, bare_target_of, draft_for, target_of
from tiny import NumberTokenizer

KINDS = ["llama", slow("qwen2"), slow("gpt_neox")]
VOCAB, LENGTH, SLOTS, RUNS = 8, 3, 128, 1600
MANY_RUNS = 2400  # where the wrong law is near the right one
PROMPT = (3, 1, 6, 2)
GENERAL = torch.tensor([0, 1, 2, 4, 5, 7])  # two tokens are never drafted
LISTS = {"a": torch.tensor([0, 3, 4, 6]), "b": None, "c": torch.arange(VOCAB)}
NAMES = [SHARED, *LISTS]
PARAMS = {
    "plain": SamplingParams(1.0),
    "cool": SamplingParams(0.6),
    "top_k": SamplingParams(1.7, top_k=3),
    "top_p": SamplingParams(1.0, top_p=0.7),
}
PLAIN, COOL = PARAMS["plain"], PARAMS["cool"]
BOTH = SamplingParams(1.3, top_k=5, top_p=0.8)


@cache
@torch.inference_mode()
def law(kind: str, params: SamplingParams, prompt: tuple[int, ...] = PROMPT) -> dict[Answer, float]:
    """Probability of every answer of LENGTH tokens."""
    answers = torch.tensor(list(product(range(VOCAB), repeat=LENGTH)))
    texts = torch.cat([torch.tensor(prompt).expand(len(answers), -1), answers[:, :-1]], dim=1)
    logits = bare_target_of(kind, VOCAB).hf(texts, use_cache=False).logits[:, -LENGTH:].flatten(0, 1)
    warps: list[Any] = [TemperatureLogitsWarper(params.temperature)]
    warps += [TopKLogitsWarper(params.top_k)] if params.top_k else []
    warps += [TopPLogitsWarper(params.top_p)] if params.top_p < 1 else []
    for warp in warps:
        logits = warp(None, logits)
    each = logits.double().softmax(-1).view(*answers.shape, VOCAB).gather(2, answers[..., None])
    chances = each[..., 0].prod(1).tolist()
    return {tuple(a): p for a, p in zip(answers.tolist(), chances, strict=True) if p > 0}


def fits(answers: list[Answer], truth: dict[Answer, float]) -> bool:
    return min(p_values(answers, truth)) > 1e-4


def refuted(answers: list[Answer], truth: dict[Answer, float]) -> bool:
    return min(p_values(answers, truth)) < 1e-6


def answers_of(outputs: list[RequestOutput]) -> list[Answer]:
    return [tuple(output.token_ids) for output in outputs]


def sampled(kind: str, params: SamplingParams) -> list[Answer]:
    """Answers to PROMPT, each with a seed of its own; the base alone drafts two tokens a round."""
    target = target_of(kind, VOCAB)
    drafter = FeatureDrafter(draft_for(target, GENERAL), NoExperts(), SLOTS, VOCAB)
    engine = Engine(
        target,
        NumberTokenizer(),
        drafter,
        FixedSelector(),
        max_batch_size=SLOTS,
        num_speculative_tokens=2,
        adaptive_budget=False,
        draft_source="model",
    )
    each = [replace(params, max_tokens=LENGTH, seed=seed) for seed in range(RUNS)]
    outputs = engine.generate([list(PROMPT)] * RUNS, each)
    drafted = sum(one.speculation.num_draft_tokens for one in outputs)
    accepted = sum(one.speculation.num_accepted_tokens for one in outputs)
    assert drafted > 1.5 * RUNS
    assert 0.2 * drafted < accepted < 0.9 * drafted  # both ways out of a round are taken often
    return answers_of(outputs)


@pytest.mark.parametrize("name", list(PARAMS))
@pytest.mark.parametrize("kind", KINDS)
def test_sampled_answers_follow_the_target(kind: str, name: str) -> None:
    """The negative controls are the laws of the same target with other parameters."""
    answers = sampled(kind, PARAMS[name])
    assert fits(answers, law(kind, PARAMS[name]))
    assert all(refuted(answers, law(kind, other)) for key, other in PARAMS.items() if key != name)


class Mixed:
    """Counts the rounds in which one row is drafted for and another has looked something up."""

    rounds = 0

    def observe(self, evidence: Evidence) -> None:
        self.rounds += {"feature", "lookup"} <= {*evidence.proposal.sources}


def repeating(kind: str) -> Answer:
    """A prompt that ends as it begins, with a likely continuation to be looked up in it."""
    prompts = torch.tensor([[3, 1, token, 3, 1] for token in range(VOCAB)])
    chances = bare_target_of(kind, VOCAB).hf(prompts, use_cache=False).logits[:, -1].softmax(-1).diagonal()
    return tuple(prompts[chances.argmax()].tolist())


def beside_lookup(kind: str, params: SamplingParams) -> dict[Answer, list[Answer]]:
    """Answers by prompt. Half of a batch have something to look up from the start, the others hardly ever."""
    target, prompts, mixed = target_of(kind, VOCAB), (repeating(kind), PROMPT), Mixed()
    drafter = FeatureDrafter(draft_for(target, GENERAL), NoExperts(), SLOTS, VOCAB)
    drafter.text = TextTokens(1)  # with more of them it would guess what lookup finds
    engine = Engine(
        target, NumberTokenizer(), drafter, FixedSelector(), learners=[mixed], max_batch_size=SLOTS
    )
    # Fixed costs, as of a target ten times the draft: the budget's choices then depend on confidence alone.
    engine.chooser.budget.costs.slopes = lambda rows: np.array([0.0, 0.1, 0.01])  # type: ignore[method-assign]
    texts = [list(prompt) for prompt in prompts] * (RUNS // 2)
    outputs = engine.generate(texts, replace(params, max_tokens=LENGTH))
    assert mixed.rounds > 10
    assert sum(one.speculation.num_draft_tokens for one in outputs) > RUNS / 2
    assert sum(one.speculation.num_lookup_tokens for one in outputs) > RUNS / 5
    return {prompt: answers_of(outputs[i::2]) for i, prompt in enumerate(prompts)}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("unseeded")
def test_what_is_looked_up_beside_the_drafter_keeps_it_exact(kind: str) -> None:
    for prompt, answers in beside_lookup(kind, COOL).items():
        assert fits(answers, law(kind, COOL, prompt))
        assert refuted(answers, law(kind, PLAIN, prompt))


class Turning(FixedSelector):
    """Gives every row another expert before each round, and every expert new weights now and then."""

    def __init__(self, bank: ExpertBank) -> None:
        self.bank, self.round = bank, 0
        self.rows: list[Sequence] = []
        self.drafted: dict[str, set[tuple[str, int]]] = {}  # by request: the experts, and their versions

    def assign(self, sequences: list[Sequence]) -> None:
        self.rows += sequences

    def settle(self, ending: Sequence | None = None) -> list[Sequence]:
        if ending is not None:
            self.rows.remove(ending)
            return []
        self.round += 1
        if self.round % 3 == 0:
            publish_random(self.bank, LISTS, first=self.round)
        for row in self.rows:
            row.expert = NAMES[(NAMES.index(row.expert) + 1) % len(NAMES)]
        return self.rows

    def observe(self, evidence: Evidence) -> None:
        proposal = evidence.proposal
        for b in evidence.drafted_by("feature"):
            who = proposal.experts[b], proposal.versions[b]
            self.drafted.setdefault(evidence.rows[b].request_id, set()).add(who)


def turning(kind: str, params: SamplingParams, folder: Path) -> list[Answer]:
    """Answers to PROMPT in batches of all experts, which take turns at each."""
    target = target_of(kind, VOCAB)
    base = base_of(target, folder, vocabulary=GENERAL)
    bank = bank_of(base, LISTS)
    drafter, selector = FeatureDrafter(base.hf, bank, SLOTS, VOCAB), Turning(bank)
    engine = Engine(
        target,
        NumberTokenizer(),
        drafter,
        selector,
        learners=[selector],
        max_batch_size=SLOTS,
        num_speculative_tokens=2,
        adaptive_budget=False,
        draft_source="model",
    )
    for i in range(MANY_RUNS):
        engine.add(list(PROMPT), replace(params, max_tokens=LENGTH), request_id=str(i), expert=NAMES[i % 4])
    outputs = []
    while engine.has_work:
        outputs += [output for output in engine.step() if output.finish_reason]
    assert sum(len(experts) > 1 for experts in selector.drafted.values()) > MANY_RUNS / 10
    return answers_of(outputs)


@pytest.mark.parametrize("kind", [*KINDS, slow(STEADY)])
@pytest.mark.usefixtures("unseeded")
def test_experts_that_are_exchanged_in_mid_answer_keep_it_exact(kind: str, tmp_path: Path) -> None:
    answers = turning(kind, BOTH, tmp_path / "draft")
    assert fits(answers, law(kind, BOTH))
    assert refuted(answers, law(kind, PARAMS["top_p"]))


Told = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]  # logits of target and draft, and their lse
Fault = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Told]
Tell = Callable[[Fault], None]


def lenient(target: torch.Tensor, draft: torch.Tensor, lse: torch.Tensor) -> Told:
    return 1.5 * target, draft, lse


def flattened(target: torch.Tensor, draft: torch.Tensor, lse: torch.Tensor) -> Told:
    """The draft says that it was less sure than it was."""
    return target, 0.25 * draft, None


def misnamed(target: torch.Tensor, draft: torch.Tensor, lse: torch.Tensor) -> Told:
    """The probabilities belong to other tokens."""
    return target, draft.flip(2), lse


def misplaced(target: torch.Tensor, draft: torch.Tensor, lse: torch.Tensor) -> Told:
    """The probabilities belong to another row, which another expert drafts for."""
    return target, draft.roll(1, 0), lse.roll(1, 0)


def uncertain(target: torch.Tensor, draft: torch.Tensor, lse: torch.Tensor) -> Told:
    """What was looked up is taken for a guess between all tokens."""
    certain = draft.isfinite().sum(-1, keepdim=True) == 1
    return target, draft.masked_fill(certain, 0.0), None


@pytest.fixture
def tell(monkeypatch: pytest.MonkeyPatch) -> Tell:
    """Has verification told something wrong wherever something was drafted."""
    real = verification_module.verify_chain

    def wrongly(fault: Fault) -> None:
        def verify(target: Any, tokens: Any, draft: Any, *, draft_lse: Any, **rest: Any) -> Any:
            if draft is not None:
                target, draft, draft_lse = fault(target, draft, draft_lse)
            return real(target, tokens, draft, draft_lse=draft_lse, **rest)

        monkeypatch.setattr(verification_module, "verify_chain", verify)

    return wrongly


@pytest.mark.parametrize("fault", [lenient, flattened, misnamed])
def test_a_wrong_verification_is_noticed(tell: Tell, fault: Fault) -> None:
    tell(fault)
    assert refuted(sampled("llama", PLAIN), law("llama", PLAIN))


@pytest.mark.usefixtures("unseeded")
def test_a_wrong_verification_of_what_was_looked_up_is_noticed(tell: Tell) -> None:
    """In the answers of rows that look something up, and only there."""
    tell(uncertain)
    looked, drafted = (
        (answers, law("llama", COOL, prompt)) for prompt, answers in beside_lookup("llama", COOL).items()
    )
    assert refuted(*looked)
    assert fits(*drafted)


@pytest.mark.usefixtures("unseeded")
def test_probabilities_of_another_expert_are_noticed(tell: Tell, tmp_path: Path) -> None:
    tell(misplaced)
    assert refuted(turning("llama", PLAIN, tmp_path / "draft"), law("llama", PLAIN))
