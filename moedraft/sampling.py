"""Logits → logits filtered by top-k and top-p.

Drafting and verification must filter in exactly the same way, or answers no longer follow the target's
distribution. So both use this module, and nothing else filters logits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moedraft.core import SamplingParams


@dataclass(frozen=True)
class SamplingBatch:
    """The sampling parameters of B rows as tensors, on the logits' device."""

    temperature: torch.Tensor  # float32 [B], 0 = greedy
    top_k: torch.Tensor | None  # int64 [B]; None when no row filters by rank
    top_p: torch.Tensor | None  # float32 [B]; None when no row filters by mass
    seed: torch.Tensor  # int64 [B]
    greedy: bool  # every row has temperature 0

    @classmethod
    def of(cls, params: list[SamplingParams], seeds: list[int], device: torch.device) -> SamplingBatch:
        sampled = [p for p in params if p.temperature > 0]
        return cls(
            temperature=torch.tensor([p.temperature for p in params], device=device),
            top_k=torch.tensor([p.top_k for p in params], device=device)
            if any(p.top_k for p in sampled)
            else None,
            top_p=torch.tensor([p.top_p for p in params], device=device)
            if any(p.top_p < 1 for p in sampled)
            else None,
            seed=torch.tensor(seeds, device=device),
            greedy=not sampled,
        )


def filter_logits(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """Logits [B, ..., V] with everything outside top-k and top-p set to −inf, not yet divided by temperature.

    As in transformers: temperature, then the k largest, then the smallest set whose mass reaches top_p
    (the mass is measured after the top-k filter; the most likely token always stays). Greedy rows are not
    filtered.
    """
    if batch.greedy or (batch.top_k is None and batch.top_p is None):
        return logits
    shape = (-1, *[1] * (logits.ndim - 1))
    temperature = batch.temperature.view(shape)
    ordered, order = logits.float().sort(dim=-1, descending=True, stable=True)
    drop = torch.zeros_like(ordered, dtype=torch.bool)
    if batch.top_k is not None:
        rank = torch.arange(logits.shape[-1], device=logits.device)
        top_k = batch.top_k.view(shape)
        # Tokens as likely as the k-th stay too, as they do in transformers.
        kth = ordered.gather(-1, (top_k.clamp(1, logits.shape[-1]) - 1).expand(*logits.shape[:-1], 1))
        drop |= (top_k > 0) & (rank >= top_k) & (ordered < kth)
    if batch.top_p is not None:
        scaled = (ordered / temperature.clamp_min(1e-6)).masked_fill(drop, -torch.inf)
        mass = scaled.softmax(-1).cumsum(-1)
        before = mass - scaled.softmax(-1)
        drop |= (before >= batch.top_p.view(shape)) & (batch.top_p.view(shape) < 1)
    drop[..., 0] = False
    drop &= temperature > 0
    return logits.masked_fill(torch.zeros_like(drop).scatter(-1, order, drop), -torch.inf)
