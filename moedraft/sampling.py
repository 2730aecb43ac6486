"""Logits → logits filtered by top-k, top-p and min-p.

Drafting and verification must filter in exactly the same way, or answers no longer follow the target's
distribution. So both use this module, and nothing else filters logits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moedraft.core import SamplingParams
from moedraft.kernels import Cuts, apply_cuts, find_cuts


@dataclass(frozen=True)
class SamplingBatch:
    """The sampling parameters of B rows as tensors, on the logits' device."""

    temperature: torch.Tensor  # float32 [B], 0 = greedy
    top_k: torch.Tensor | None  # int64 [B]; None when no row filters by rank
    top_p: torch.Tensor | None  # float32 [B]; None when no row filters by mass
    seed: torch.Tensor  # int64 [B]
    greedy: bool  # every row has temperature 0
    min_p: torch.Tensor | None = None  # float32 [B]; None when no row filters by likelihood
    coupled: bool = False  # draft and target choose with the same random numbers

    @classmethod
    def of(cls, params: list[SamplingParams], seeds: list[int], device: torch.device) -> SamplingBatch:
        sampled = [p for p in params if p.temperature > 0]

        def tensor(values: list[float] | list[int], used: bool = True) -> torch.Tensor | None:
            return torch.tensor(values, device=device) if used else None

        ranks, masses = any(p.top_k for p in sampled), any(p.top_p < 1 for p in sampled)
        chances = any(p.min_p > 0 for p in sampled)
        if _fused(device) and (ranks or masses or chances):
            ranks = masses = chances = (
                True  # then one kernel is compiled, and not one for each set of filters
            )
        return cls(
            temperature=torch.tensor([float(p.temperature) for p in params], device=device),
            top_k=tensor([p.top_k for p in params], ranks),
            top_p=tensor([float(p.top_p) for p in params], masses),
            min_p=tensor([float(p.min_p) for p in params], chances),
            seed=torch.tensor(seeds, device=device),
            greedy=not sampled,
        )

    @property
    def filters(self) -> bool:
        """Some row is filtered."""
        wanted = any(limit is not None for limit in (self.top_k, self.top_p, self.min_p))
        return wanted and not self.greedy


def limited(logits: torch.Tensor, batch: SamplingBatch) -> tuple[torch.Tensor, Cuts | None]:
    """Logits [B, ..., V] and what is excluded of them: as −inf in the logits, or on a GPU as cuts.

    The kernels heed cuts while they read, so that there no filtered logits are written.
    """
    if _fused(logits.device) and batch.filters:
        return logits, _cuts(logits, batch)
    return filter_logits(logits, batch), None


def filter_logits(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """Logits [B, ..., V], not yet divided by temperature, with −inf for what top-k, top-p or min-p exclude.

    Greedy rows are not filtered; `moedraft.kernels.find_cuts` says what is kept of the others.
    """
    if not batch.filters or not logits.numel():
        return logits
    return apply_cuts(logits, _cuts(logits, batch))


def _cuts(logits: torch.Tensor, batch: SamplingBatch) -> Cuts:
    return find_cuts(
        logits, temperature=batch.temperature, top_k=batch.top_k, top_p=batch.top_p, min_p=batch.min_p
    )


def _fused(device: torch.device) -> bool:
    return device.type == "cuda"
