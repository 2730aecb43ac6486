"""Feature drafts with random weights, for the random models beside this file."""

from __future__ import annotations

import torch

from moedraft.cpu.optional import with_compiled
from moedraft.feature.config import config_for
from moedraft.feature.model import FeatureDraft
from moedraft.models import LanguageModel

from random_models import VOCAB

LAYERS = (0, 1, 2)
SOME = torch.arange(0, VOCAB, 2)  # the draft vocabulary: every second token


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
