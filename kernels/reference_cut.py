"""Which logits top-k, top-p and min-p leave, in plain PyTorch: the specification, and what a CPU uses.

No row is sorted as a whole. What is left of a row is everything above one value, and of the tokens that are
exactly as likely as it the first few; that is found among the row's largest values alone. The Triton twin is
`fused_cut.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .cuts import NO_LAST, Cuts

FIRST_CANDIDATES = 256  # of a row's largest values, so many are looked at first; then eight times as many
COLDEST = 1e-6  # a temperature below this would divide a float32 logit out of range


@dataclass(frozen=True)
class Limits:
    """What the filters of N rows ask for, each [N]; rows that a filter leaves alone have values that do."""

    temperature: Tensor  # float32, 1 for greedy rows
    top_k: Tensor  # int64, 0 = all
    top_p: Tensor  # float64, 1 = all
    min_p: Tensor  # float32, 0 = all

    def of(self, rows: Tensor) -> Limits:
        return Limits(self.temperature[rows], self.top_k[rows], self.top_p[rows], self.min_p[rows])


@dataclass(frozen=True)
class Thresholds:
    """Of N rows, each [N]: keep what is above `value`, and the first `ties` of the tokens that equal it."""

    value: Tensor  # of the logits
    ties: Tensor  # int64
    partial: Tensor  # bool: more tokens equal it than are kept
    found: Tensor  # bool: the candidates were enough to tell


def find_cuts(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
) -> Cuts:
    """See `moedraft.kernels.find_cuts`."""
    shape, vocab = logits.shape[:-1], logits.shape[-1]
    rows = logits.detach().reshape(-1, vocab).float()
    if not len(rows):
        return Cuts(rows.new_empty(shape), rows.new_empty(shape, dtype=torch.int32))
    limits = _limits(temperature, top_k, top_p, min_p, vocab, len(rows) // len(temperature))
    cut = thresholds(rows, limits)
    return Cuts(cut.value.view(shape), last_ties(rows, cut).view(shape))


def _limits(
    temperature: Tensor,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
    vocab: int,
    times: int,
) -> Limits:
    """Those of each sequence for each of its positions. Ranks beyond the vocabulary are none."""
    sampled = temperature > 0
    zero = torch.zeros_like(temperature)
    ranks = zero.long() if top_k is None else top_k.where(sampled & (top_k < vocab), 0)
    masses = zero.double() + 1 if top_p is None else top_p.double().where(sampled, 1.0)
    shares = zero if min_p is None else min_p.where(sampled, 0.0)
    warmth = temperature.clamp_min(COLDEST).where(sampled, 1.0)
    return Limits(*(limit.repeat_interleave(times) for limit in (warmth, ranks, masses, shares)))


def thresholds(rows: Tensor, limits: Limits) -> Thresholds:
    """Thresholds of float32 rows [N, V]; more of each row's largest values are read only if needed."""
    vocab = rows.shape[-1]
    total = _total_mass(rows, limits)
    count = min(vocab, max(FIRST_CANDIDATES, 2 * int(limits.top_k.max())))
    found = _among(largest(rows, count), vocab, limits, total)
    while count < vocab and not bool(found.found.all()):
        count = min(vocab, 8 * count)
        missing = (~found.found).nonzero()[:, 0]
        more = _among(largest(rows[missing], count), vocab, limits.of(missing), total[missing])
        found = Thresholds(
            found.value.index_copy(0, missing, more.value),
            found.ties.index_copy(0, missing, more.ties),
            found.partial.index_copy(0, missing, more.partial),
            found.found.index_copy(0, missing, more.found),
        )
    return found


def largest(rows: Tensor, count: int) -> Tensor:
    """The `count` largest values of each row, falling; a NaN is larger than any number."""
    if rows.device.type != "cpu":
        return rows.topk(count, dim=-1).values
    values = rows.numpy()
    if count < rows.shape[-1]:
        values = np.partition(values, -count, axis=-1)[:, -count:]
    return torch.from_numpy(np.sort(values, axis=-1)[:, ::-1].copy())


def _total_mass(rows: Tensor, limits: Limits) -> Tensor:
    """Σ e^((x − maximum) / temperature) of whole rows, float64 [N]; zeros where no row needs it."""
    if not bool(((limits.top_p < 1) & (limits.top_k == 0)).any()):
        return limits.top_p.new_zeros(len(rows))
    scaled = (rows - rows.amax(-1, keepdim=True)).div_(limits.temperature[:, None])
    return scaled.exp_().sum(-1, dtype=torch.float64)


def _among(values: Tensor, vocab: int, limits: Limits, total: Tensor) -> Thresholds:
    """Thresholds, as far as the rows' M largest values [N, M], in falling order, determine them."""
    count = values.shape[1]
    best, last = values[:, :1], values[:, -1]
    by_rank = limits.top_k > 0
    kth = values.gather(1, (limits.top_k.clamp(1, count) - 1)[:, None])[:, 0]
    kth = torch.where(by_rank, kth, -torch.inf)
    inside = values >= kth[:, None]
    mass = ((values - best).double() / limits.temperature[:, None]).exp_() * inside
    running = mass.cumsum(1)
    total = torch.where(by_rank, running[:, -1], total)
    before = torch.nn.functional.pad(running[:, :-1], (1, 0))
    by_mass = limits.top_p < 1
    kept = inside & ((before < (limits.top_p * total)[:, None]) | ~by_mass[:, None])
    kept[:, 0] = True
    number = kept.sum(1)
    value = values.gather(1, number[:, None] - 1)[:, 0]
    value = torch.where(by_mass, value, kth)
    ties = number - (values > value[:, None]).sum(1)
    partial = by_mass & ((values == value[:, None]).sum(1) > ties)
    # everything that is counted must lie inside, and something below it must show
    lowest = torch.where(by_rank, torch.minimum(value, kth), value)
    found = (last < lowest) | (~by_mass & (limits.top_k <= count)) | torch.tensor(count == vocab)
    floor = best[:, 0] + limits.temperature * limits.min_p.log()
    value, partial = torch.where(floor > value, floor, value), partial & (floor <= value)
    broken = ~best[:, 0].isfinite()
    return Thresholds(value.masked_fill(broken, -torch.inf), ties, partial & ~broken, found | broken)


def last_ties(rows: Tensor, cut: Thresholds) -> Tensor:
    """int32 [N]: of the tokens as likely as the threshold, the last that is kept; `NO_LAST`: all are."""
    last = torch.full_like(cut.ties, NO_LAST, dtype=torch.int32)
    partial = cut.partial.nonzero()[:, 0]
    if len(partial):
        equal = rows[partial] == cut.value[partial, None]
        reached = equal.cumsum(1, dtype=torch.int32) == cut.ties[partial, None]
        last[partial] = reached.to(torch.int8).argmax(1).to(torch.int32)
    return last
