"""Tiny drafters on tiny random targets."""

from __future__ import annotations

from typing import Any

import torch

from moedraft.feature.config import FeatureConfig, config_for
from moedraft.feature.features import Teacher
from moedraft.feature.model import FeatureDraft
from moedraft.models import LanguageModel

from random_models import random_model

LAYERS = (0, 2, 3)
VOCABULARY = torch.arange(5, 97, 2)


def target(kind: str = "llama") -> LanguageModel:
    return random_model(kind, seed=1)


def config_of(model: LanguageModel, **switches: Any) -> FeatureConfig:
    size = len(VOCABULARY)
    return config_for(model.hf.config, draft_vocab_size=size, feature_layers=LAYERS, **switches)


def draft_for(model: LanguageModel, seed: int = 0, **switches: Any) -> FeatureDraft:
    torch.manual_seed(seed)
    embeddings, output = weights_of(model)
    return FeatureDraft(config_of(model, **switches), VOCABULARY, embeddings, output)


def weights_of(model: LanguageModel) -> tuple[torch.Tensor, torch.Tensor]:
    """Embeddings and output rows."""
    return model.hf.get_input_embeddings().weight.detach(), model.hf.get_output_embeddings().weight.detach()


def teacher_of(model: LanguageModel) -> Teacher:
    return Teacher(model.hf, LAYERS, VOCABULARY)


def texts_of(count: int, length: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(97, (count, length), generator=generator).tolist()
