"""Logits → logits filtered by top-k, top-p and min-p.

Drafting and verification must filter in exactly the same way, or answers no longer follow the target's
distribution. So both use this module, and nothing else filters logits.

No row is sorted as a whole. What is kept of a row is everything above one value, the threshold, and of the
tokens that are exactly as likely as it the first few; that is found among the row's largest values alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from moedraft.core import SamplingParams

FIRST_CANDIDATES = 256  # of a row's largest values, so many are looked at first; then eight times as many


@dataclass(frozen=True)
class SamplingBatch:
    """The sampling parameters of B rows as tensors, on the logits' device."""

    temperature: torch.Tensor  # float32 [B], 0 = greedy
    top_k: torch.Tensor | None  # int64 [B]; None when no row filters by rank
    top_p: torch.Tensor | None  # float32 [B]; None when no row filters by mass
    seed: torch.Tensor  # int64 [B]
    greedy: bool  # every row has temperature 0
    min_p: torch.Tensor | None = None  # float32 [B]; None when no row filters by likelihood
    largest_top_k: int = 0  # of the rows that sample
    coupled: bool = False  # draft and target choose with the same random numbers

    @classmethod
    def of(cls, params: list[SamplingParams], seeds: list[int], device: torch.device) -> SamplingBatch:
        sampled = [p for p in params if p.temperature > 0]

        def tensor(values: list[float] | list[int], used: bool = True) -> torch.Tensor | None:
            return torch.tensor(values, device=device) if used else None

        return cls(
            temperature=torch.tensor([p.temperature for p in params], device=device),
            top_k=tensor([p.top_k for p in params], any(p.top_k for p in sampled)),
            top_p=tensor([p.top_p for p in params], any(p.top_p < 1 for p in sampled)),
            min_p=tensor([p.min_p for p in params], any(p.min_p > 0 for p in sampled)),
            seed=torch.tensor(seeds, device=device),
            greedy=not sampled,
            largest_top_k=max((p.top_k for p in sampled), default=0),
        )

    @property
    def filters(self) -> bool:
        """Some row is filtered."""
        wanted = any(limit is not None for limit in (self.top_k, self.top_p, self.min_p))
        return wanted and not self.greedy


@dataclass(frozen=True)
class Limits:
    """What the filters of N rows ask for, each [N]; rows that a filter leaves alone have values that do."""

    temperature: torch.Tensor  # float32, 1 for greedy rows
    top_k: torch.Tensor  # int64, 0 = all
    top_p: torch.Tensor  # float64, 1 = all
    min_p: torch.Tensor  # float32, 0 = all

    def of(self, rows: torch.Tensor) -> Limits:
        return Limits(self.temperature[rows], self.top_k[rows], self.top_p[rows], self.min_p[rows])

    def within(self, vocab: int) -> Limits:
        """These limits for a vocabulary of this size: a `top_k` as large or larger becomes 0 (no limit)."""
        return replace(self, top_k=self.top_k.where(self.top_k < vocab, 0))

    @classmethod
    def repeated(cls, batch: SamplingBatch, times: int) -> Limits:
        """The limits of a batch's sequences, each repeated for its `times` positions."""
        sampled = batch.temperature > 0
        zero = torch.zeros_like(batch.temperature)
        top_k = zero.long() if batch.top_k is None else batch.top_k.where(sampled, 0)
        top_p = zero.double() + 1 if batch.top_p is None else batch.top_p.double().where(sampled, 1.0)
        min_p = zero if batch.min_p is None else batch.min_p.where(sampled, 0.0)
        # a temperature below this would divide a float32 logit out of range
        temperature = batch.temperature.clamp_min(1e-6).where(sampled, 1.0)
        return cls(*(limit.repeat_interleave(times) for limit in (temperature, top_k, top_p, min_p)))


@dataclass(frozen=True)
class Thresholds:
    """Of N rows, each [N]: keep what is above `value`, and the first `ties` of the tokens that equal it."""

    value: torch.Tensor  # of the logits
    ties: torch.Tensor  # int64
    partial: torch.Tensor  # bool: more tokens equal it than are kept
    found: torch.Tensor  # bool: the candidates were enough to tell


def filter_logits(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """Logits [B, ..., V], not yet divided by temperature, with −inf for what top-k, top-p or min-p exclude.

    As in transformers: temperature, then the k largest with those as likely as the k-th, then the smallest
    set whose mass reaches top_p (the mass is measured after the top-k filter; the most likely token always
    stays; of equally likely tokens those of lower index), then whatever is at least min_p times as likely as
    the most likely token. Greedy rows, and rows with a NaN, a +inf or nothing but −inf, are not filtered.
    """
    if not batch.filters or not logits.numel():
        return logits
    rows = logits.detach().reshape(-1, logits.shape[-1])
    wide = rows.float()
    limits = Limits.repeated(batch, len(rows) // len(batch.temperature))
    cut = thresholds(wide, limits.within(logits.shape[-1]), batch.largest_top_k)
    drop = wide < cut.value[:, None]
    _drop_late_ties(wide, cut, drop)
    return rows.masked_fill(drop, -torch.inf).view(logits.shape)


def thresholds(rows: torch.Tensor, limits: Limits, largest_top_k: int) -> Thresholds:
    """Filter thresholds of float32 rows [N, V]; more of each row's largest values are read only if needed."""
    vocab = rows.shape[-1]
    total = _total_mass(rows, limits)
    count = min(vocab, max(FIRST_CANDIDATES, 2 * largest_top_k))
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


def largest(rows: torch.Tensor, count: int) -> torch.Tensor:
    """The `count` largest values of each row, falling; a NaN is larger than any number."""
    if rows.device.type != "cpu":
        return rows.topk(count, dim=-1).values
    values = rows.numpy()
    if count < rows.shape[-1]:
        values = np.partition(values, -count, axis=-1)[:, -count:]
    return torch.from_numpy(np.sort(values, axis=-1)[:, ::-1].copy())


def _total_mass(rows: torch.Tensor, limits: Limits) -> torch.Tensor:
    """Σ e^((x − maximum) / temperature) of whole rows, float64 [N]; zeros where no row needs it."""
    if not bool(((limits.top_p < 1) & (limits.top_k == 0)).any()):
        return limits.top_p.new_zeros(len(rows))
    scaled = (rows - rows.amax(-1, keepdim=True)).div_(limits.temperature[:, None])
    return scaled.exp_().sum(-1, dtype=torch.float64)


def _among(values: torch.Tensor, vocab: int, limits: Limits, total: torch.Tensor) -> Thresholds:
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


def _drop_late_ties(rows: torch.Tensor, cut: Thresholds, drop: torch.Tensor) -> None:
    """Mark in `drop` [N, V], of tokens as likely as the threshold, those behind the first `ties` too."""
    partial = cut.partial.nonzero()[:, 0]
    if len(partial):
        equal = rows[partial] == cut.value[partial, None]
        drop[partial] |= equal & (equal.cumsum(1, dtype=torch.int32) > cut.ties[partial, None])
