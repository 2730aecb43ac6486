"""How an independent draft model that learns reads a batch: its own forward, stopped before the output layer.

The output layer, the largest of all, is given only the positions whose guesses are compared with the target.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from moedraft.distill.text.batches import RecordBatch
from moedraft.models import LanguageModel

TRIED = 16  # tokens that show whether logits come from the output layer unchanged


class OutputLayer(NamedTuple):
    """Arguments of `moedraft.kernels.linear_divergence`."""

    weight: torch.Tensor  # [V, H]
    bias: torch.Tensor | None  # [V]
    lora: tuple[torch.Tensor, torch.Tensor] | None  # [r, H] and [V, r], all adapters together, scaled


def logits_at(
    draft: LanguageModel, batch: RecordBatch, given: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """The logits [N, V] at the positions of `batch.mask`; `given` is applied to the output layer's inputs."""

    def choose(_: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        hidden, *rest = inputs
        return (given(hidden[:, -batch.keep :][batch.mask]), *rest)

    model = draft.hf  # adapters are in its layers; PEFT's own wrapper needs one to be active
    with model.get_output_embeddings().register_forward_pre_hook(choose):
        out = model(input_ids=batch.token_ids, use_cache=False, logits_to_keep=batch.keep)
    logits: torch.Tensor = out.logits
    return logits


def hidden_at(draft: LanguageModel, batch: RecordBatch) -> torch.Tensor:
    """The output layer's inputs [N, H] at these positions; that layer computes nothing."""
    read: list[torch.Tensor] = []

    def keep(chosen: torch.Tensor) -> torch.Tensor:
        read.append(chosen)
        return chosen[:0]

    logits_at(draft, batch, keep)
    return read[0]


def ends_in_head(draft: LanguageModel) -> bool:
    """Whether the logits are the output layer's, neither scaled nor capped, by trying some tokens."""
    seen: list[torch.Tensor] = []
    tokens = torch.arange(min(TRIED, draft.vocab_size), device=draft.device)[None]
    layer = draft.hf.get_output_embeddings()
    with torch.no_grad(), layer.register_forward_hook(lambda *call: seen.append(call[2])):
        logits = draft.hf(input_ids=tokens, use_cache=False).logits
    # The embedding of a padding token may be zero, and so may all its logits.
    return torch.equal(seen[0], logits) and bool(logits[:, -1].any())
