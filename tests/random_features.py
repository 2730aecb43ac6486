"""Feature drafts with random weights, for the random models beside this file."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from moedraft.cpu.optional import with_compiled
from moedraft.cpu.products import packs
from moedraft.cpu.steady.forward import SteadyForward
from moedraft.feature.config import config_for
from moedraft.feature.model import FeatureDraft
from moedraft.loading.checks import greedy_answers
from moedraft.models import LanguageModel

from random_models import VOCAB, random_model

LAYERS = (0, 1, 2)
SOME = torch.arange(0, VOCAB, 2)  # the draft vocabulary: every second token
# A Llama that is run as large models are on a CPU: it reads prompts along with rounds.
STEADY = pytest.param(
    "steady", marks=pytest.mark.skipif(not packs(torch.ones(1)), reason="no blocked products here")
)


def target_of(kind: str, vocab: int = VOCAB) -> LanguageModel:
    """A random model of this kind, or of "steady"."""
    target = random_model(family(kind), 0, vocab=vocab)
    if kind == "steady":
        target.lean = SteadyForward(target.hf)
        assert target.mixes
    return target


def bare_target_of(kind: str, vocab: int = VOCAB) -> LanguageModel:
    """The same model without any fast path of ours."""
    return random_model(family(kind), 0, vocab=vocab, cpu_fast_paths=False)


def family(kind: str) -> str:
    return "llama" if kind == "steady" else kind


@cache
def generated(kind: str, prompt: tuple[int, ...], count: int) -> list[int]:
    """What transformers' `generate` answers, without any fast path of ours."""
    return greedy_answers(bare_target_of(kind), [list(prompt)], count)[0]


def draft_for(target: LanguageModel, vocabulary: torch.Tensor = SOME) -> FeatureDraft:
    torch.manual_seed(7)
    hf = target.hf
    config = config_for(
        hf.config, draft_vocab_size=len(vocabulary), feature_layers=LAYERS, fc_norm=True, norm_output=True
    )
    weights = (hf.get_input_embeddings().weight.detach(), hf.get_output_embeddings().weight.detach())
    draft = FeatureDraft(config, vocabulary, *weights).eval().requires_grad_(False)
    draft.faster = with_compiled("feature_layer", lambda module: module.fused_for(draft))  # as when loaded
    return draft


def best_of(draft: FeatureDraft, normed: torch.Tensor, text: list[int]) -> int:
    """The likeliest token of the drafter's list and of the text, by a product with all output rows.

    normed [H]: of a drafter whose output is normed.
    """
    logits = normed @ draft.rows(torch.arange(draft.config.vocab_size)).T
    known = sorted({*draft.vocabulary.tolist(), *text})
    return known[int(logits[known].argmax())]
