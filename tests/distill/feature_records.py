"""A tiny target, a tiny feature drafter on it, and replay records of what the target would say."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moedraft.core import ReplayRecord
from moedraft.distill.features.feature_batches import DraftVocabulary, FeatureBatch, collate
from moedraft.distill.features.record_states import RecordStates
from moedraft.distill.lora.adapters import JointAdapters
from moedraft.feature.config import config_for
from moedraft.feature.model import FeatureDraft
from moedraft.models import LanguageModel

from random_models import VOCAB, random_model

LAYERS = (0, 1, 2)
EVERY = torch.arange(VOCAB)
SOME = torch.arange(5, VOCAB, 2)
CPU = torch.device("cpu")


def a_target(kind: str = "llama") -> LanguageModel:
    return random_model(kind, seed=1)


def a_draft(target: LanguageModel, vocabulary: torch.Tensor = EVERY, seed: int = 0) -> FeatureDraft:
    torch.manual_seed(seed)
    config = config_for(target.hf.config, draft_vocab_size=len(vocabulary), feature_layers=LAYERS)
    embeddings = target.hf.get_input_embeddings().weight.detach()
    return FeatureDraft(config, vocabulary, embeddings, target.hf.get_output_embeddings().weight.detach())


def a_record(
    target: LanguageModel,
    seed: int,
    prompt: int = 6,
    answer: int = 5,
    domain: str = "code",
    topk: int = VOCAB,
) -> ReplayRecord:
    """Random tokens, with what the target says to each of the answer's."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCAB, (prompt + answer,), generator=generator)
    with torch.no_grad():
        logprobs = target.hf(input_ids=ids[None]).logits[0, prompt - 1 : -1].log_softmax(-1)
    values, found = logprobs.topk(topk, dim=-1)
    return ReplayRecord(
        domain=domain,
        expert=domain,
        adapter_version=0,
        target_id="tiny",
        token_ids=ids.tolist(),
        num_prompt_tokens=prompt,
        topk_ids=found.tolist(),
        topk_logprobs=values.tolist(),
        rejected=[],
        drafted=0,
        accepted=0,
    )


def a_batch(
    target: LanguageModel, draft: FeatureDraft, records: Sequence[ReplayRecord], max_tokens: int = 2048
) -> FeatureBatch:
    """Each record is its domain's."""
    vocabulary = DraftVocabulary(draft.vocabulary, draft.config.vocab_size)
    owners = [record.domain for record in records]
    return collate(records, owners, RecordStates(target, draft), vocabulary, CPU, max_tokens)


def stir(student: JointAdapters, seed: int = 0) -> None:
    """Adapters that change something: those that are new do not."""
    generator = torch.Generator().manual_seed(seed)
    for name in sorted(student.names):
        for parameter in student.parameters(name):
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
