"""A random feature drafter with experts, for tests of whoever chooses between them."""

from __future__ import annotations

from pathlib import Path

import torch

from moedraft.core import SHARED
from moedraft.drafting.base import FeatureBase, load_feature_base
from moedraft.drafting.experts.adapter import HEAD, Adapter
from moedraft.drafting.experts.lora import ExpertBank
from moedraft.feature.checkpoint import save_draft
from moedraft.feature.config import config_for
from moedraft.feature.model import FeatureDraft
from moedraft.models import LanguageModel

from random_models import VOCAB

GENERAL = torch.arange(1, VOCAB, 2)
LISTS = {"a": torch.arange(0, VOCAB, 3), "b": None, "c": torch.arange(1, VOCAB, 6)}


def base_of(
    target: LanguageModel, folder: Path, *, norm_output: bool = False, vocabulary: torch.Tensor = GENERAL
) -> FeatureBase:
    """A drafter for `target` that guesses the tokens of `vocabulary`; written to `folder` and read again."""
    torch.manual_seed(5)
    size, layers = len(vocabulary), (0, 1, 2)
    config = config_for(
        target.hf.config, draft_vocab_size=size, feature_layers=layers, norm_output=norm_output
    )
    tables = target.hf.get_input_embeddings(), target.hf.get_output_embeddings()
    save_draft(FeatureDraft(config, vocabulary, *(one.weight.detach() for one in tables)), folder)
    return load_feature_base(folder, target)


def bank_of(base: FeatureBase, lists: dict[str, torch.Tensor | None] = LISTS) -> ExpertBank:
    """The base with a shared adapter and an expert for each list of tokens."""
    bank = ExpertBank(base)
    publish_random(bank, lists)
    return bank


def publish_random(
    bank: ExpertBank, lists: dict[str, torch.Tensor | None] = LISTS, first: int = 0, scale: float = 0.3
) -> None:
    """A shared adapter and an expert for each list of tokens; the expert "c" leaves one layer alone.

    first: the seed of the first of them; the others have those after it, and so have their versions.
    """
    dtype = next(iter(bank.layers.values())).base_weight().dtype
    for seed, (name, tokens) in enumerate({SHARED: None, **lists}.items(), start=first):
        generator = torch.Generator().manual_seed(seed)
        deltas = {}
        for layer in sorted(bank.tail)[1 if name == "c" else 0 :]:
            out, inner = bank.layers[layer].base_weight().shape
            rows = len(tokens) if layer == HEAD and tokens is not None else out
            a, b = (torch.randn(*shape, generator=generator) * scale for shape in ((4, inner), (rows, 4)))
            deltas[layer] = (a.to(dtype), b.to(dtype))
        bank.publish(name, Adapter(seed + 1, deltas, tokens))
