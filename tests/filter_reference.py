"""What `moedraft.sampling.filter_logits` must keep, row by row, from a full and stable sort."""

from __future__ import annotations

import torch

from moedraft.core import SamplingParams


def kept(row: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """bool [V] for logits [V]. Equal to the letter: masses are summed in the same order and precision."""
    if params.temperature <= 0 or not bool(row.float().amax().isfinite()):
        return torch.ones_like(row, dtype=torch.bool)
    ordered, order = row.float().sort(descending=True, stable=True)
    temperature = torch.tensor(params.temperature).clamp_min(1e-6)
    inside = torch.ones_like(ordered, dtype=torch.bool)
    by_rank = 0 < params.top_k < len(row)
    if by_rank:
        inside = ordered >= ordered[params.top_k - 1]
    mass = ((ordered - ordered[0]).double() / temperature).exp() * inside
    total = mass.cumsum(0)[-1]
    if not by_rank:
        total = ((row.float() - ordered[0]) / temperature).exp().sum(dtype=torch.float64)
    if params.top_p < 1:
        before = torch.cat((torch.zeros(1, dtype=torch.float64), mass.cumsum(0)[:-1]))
        inside &= before < torch.tensor(params.top_p).double() * total
        inside[0] = True
    inside &= ordered >= ordered[0] + temperature * torch.tensor(params.min_p).log()
    return torch.zeros_like(inside).scatter(0, order, inside)


def filtered_by_sorting(logits: torch.Tensor, params: list[SamplingParams]) -> torch.Tensor:
    """Logits [B, ..., V] by the above."""
    rows = logits.reshape(len(params), -1, logits.shape[-1])
    keep = torch.stack(
        [torch.stack([kept(row, one) for row in part]) for part, one in zip(rows, params, strict=True)]
    )
    return logits.masked_fill(~keep.view(logits.shape), -torch.inf)
