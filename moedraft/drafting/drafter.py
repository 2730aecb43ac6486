"""Propose tokens: all rows of the batch, whatever their experts, in one forward per token."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch

from moedraft.cache import SlotCache
from moedraft.core import SHARED, Proposal, Sequence
from moedraft.drafting.budget import Budget
from moedraft.drafting.lookup import Match
from moedraft.kernels import sample_draft
from moedraft.sampling import SamplingBatch, filter_logits


class CausalModel(Protocol):
    """What the engine needs of a model; `LanguageModel` and the tests' table of logits have it."""

    vocab_size: int
    max_len: int

    @property
    def device(self) -> torch.device: ...
    @property
    def ragged(self) -> bool: ...
    def new_cache(self, slots: int) -> SlotCache: ...
    def forward(
        self,
        cache: SlotCache,
        first: int,
        token_ids: torch.Tensor,
        starts: list[int],
        keep: int = 0,
        lengths: list[int] | None = None,
    ) -> torch.Tensor: ...


class Bank(Protocol):
    """What the drafter needs of the experts: `ExpertBank` has it."""

    @property
    def shares_cache(self) -> bool: ...
    def drafters(self, rows: list[str]) -> list[str]: ...
    def select(self, rows: list[str]) -> None: ...
    def version(self, expert: str) -> int: ...


class NoExperts:
    """A bank without adapters: every row is drafted by the base."""

    shares_cache = True

    def drafters(self, rows: list[str]) -> list[str]:
        return rows

    def select(self, rows: list[str]) -> None:
        """Nothing to select."""

    def version(self, expert: str) -> int:
        return 0


LAG = 8  # tokens a row's cache may be behind to be fed along with the others


@dataclass(frozen=True)
class Found:
    """What rows that draft without the model looked up, by row, and its chances to be accepted."""

    matches: Mapping[int, Match] = field(default_factory=dict)
    survival: Mapping[int, list[float]] = field(default_factory=dict)

    @property
    def expected(self) -> float:
        """Tokens that these rows bring beyond one each."""
        return sum(sum(chances) for chances in self.survival.values())

    @property
    def width(self) -> int:
        return max((len(match.tokens) for match in self.matches.values()), default=0)

    @property
    def count(self) -> int:
        return sum(len(match.tokens) for match in self.matches.values())

    def cut(self, lengths: Mapping[int, int]) -> Found:
        """Of these rows, so many tokens."""
        matches = {b: Match(self.matches[b].length, self.matches[b].tokens[:n]) for b, n in lengths.items()}
        return Found(matches, {b: self.survival[b][:n] for b, n in lengths.items()})


NOTHING = Found()


@dataclass(frozen=True)
class Draft:
    """A proposal with what the budget and the caches need afterwards."""

    proposal: Proposal
    confidences: list[list[float]]  # by row and position: the draft's top-1 mass; none of what was looked up
    steps: int  # draft tokens sampled, padding included
    experts: tuple[str, ...]  # who drafted, by row
    matches: Mapping[int, Match] = field(default_factory=dict)  # by row

    def verified(self, ragged: bool) -> int:
        """Draft tokens to verify, with the padding where that costs as much."""
        rows, width = self.proposal.token_ids.shape
        return int(self.proposal.lengths.sum()) if ragged else rows * width


class Drafter:
    """The draft base with its cache, which mirrors the target's slots."""

    def __init__(self, model: CausalModel, bank: Bank, slots: int, vocab_size: int, chunk: int = 512) -> None:
        self.model = model
        self.bank = bank
        self.vocab_size = vocab_size  # of the target; the draft's logits are cut or padded to it
        self.chunk = chunk
        self.cache = model.new_cache(slots)
        self.catch_up_ms = 0.0  # spent by the last `propose` on rows whose cache was behind

    def experts_of(self, rows: list[Sequence]) -> list[str]:
        """Who drafts for each row. A reproducible one has its own expert in any batch, so all have."""
        experts = [row.expert if row.draft else SHARED for row in rows]
        return experts if any(row.reproducible for row in rows) else self.bank.drafters(experts)

    def propose(
        self,
        rows: list[Sequence],
        sampling: SamplingBatch,
        limits: list[int],
        fixed: list[bool],
        budget: Budget,
        found: Found = NOTHING,
    ) -> Draft:
        """Draft for the sequences in slots 0 … B−1, at most `limits[b]` tokens for row b (0: none).

        Rows marked `fixed` get exactly their limit, so that a seeded answer does not depend on timing.
        Rows in `found` draft what they looked up.
        """
        experts = self.experts_of(rows)
        reach = min(LAG, *(len(row.token_ids) for row in rows))  # what `_first` can feed
        began = time.perf_counter()
        for row, limit in zip(rows, limits, strict=True):
            if limit and len(row.token_ids) - row.draft_cached > reach:
                self._catch_up(row)
        self.catch_up_ms = (time.perf_counter() - began) * 1e3
        self.bank.select(experts)
        free = [b for b, limit in enumerate(limits) if limit and not fixed[b]]
        least = max((limit for limit, is_fixed in zip(limits, fixed, strict=True) if is_fixed), default=0)
        tokens: list[torch.Tensor] = []
        kept: list[torch.Tensor] = []
        confidences: list[list[float]] = [[] for _ in rows]
        survival = dict.fromkeys(free, 1.0)
        expected = len(rows) + found.expected
        logits = self._first(rows, limits)
        while True:
            step = len(tokens)
            filtered = filter_logits(self._fit(logits), sampling)
            drawn, confidence = self._draw(filtered, sampling, [len(row.token_ids) + step for row in rows])
            tokens.append(drawn)
            if not sampling.greedy:
                kept.append(filtered)
            for b, value in enumerate(confidence):
                confidences[b].append(value)
            for b in free:
                if step < limits[b]:
                    survival[b] *= budget.model(experts[b]).predict(confidence[b])
                    expected += survival[b]
            open_rows = [b for b in free if limits[b] > step + 1]
            on = step + 1 < least or (
                bool(open_rows)
                and budget.another(
                    [experts[b] for b in open_rows],
                    [survival[b] for b in open_rows],
                    expected,
                    step + 1,
                    len(rows),
                    (
                        verified_of(limits, step + 1, found, budget),
                        verified_of(limits, step + 2, found, budget),
                    ),
                )
            )
            if not on:
                break
            starts = [len(row.token_ids) + step for row in rows]
            logits = self.model.forward(self.cache, 0, self._feed(drawn[:, None]), starts, keep=1)[:, -1]
        cut = [row[: min(limit, len(tokens))] for row, limit in zip(confidences, limits, strict=True)]
        return pack(tokens, kept, cut, tuple(experts), found, self.model.device)

    def _draw(
        self, logits: torch.Tensor, sampling: SamplingBatch, positions: list[int]
    ) -> tuple[torch.Tensor, list[float]]:
        """Tokens int64 [B] and, by row, the mass of the most likely token (whichever was drawn)."""
        where = torch.tensor(positions, device=logits.device)
        temperature = 0.0 if sampling.greedy else sampling.temperature
        drawn, lse = sample_draft(logits, temperature, sampling.seed, where)
        top = logits.amax(-1).float()
        if not sampling.greedy:
            top = top / torch.where(sampling.temperature > 0, sampling.temperature, 1.0)
        return drawn, (top - lse).exp().tolist()

    def _first(self, rows: list[Sequence], limits: list[int]) -> torch.Tensor:
        """Feed what the caches of drafting rows lack, a few tokens; logits [B, V] after the last token."""
        lags = [len(row.token_ids) - row.draft_cached for row in rows]
        width = max(lag for lag, limit in zip(lags, limits, strict=True) if limit)
        ids = torch.tensor([row.token_ids[-width:] for row in rows], device=self.model.device)
        starts = [len(row.token_ids) - width for row in rows]
        began = time.perf_counter()
        logits = self.model.forward(self.cache, 0, self._feed(ids), starts, keep=1)[:, -1]
        if width > 2:  # two are an ordinary round's, the others' time is made up for here
            self.catch_up_ms += (time.perf_counter() - began) * 1e3 * (width - 2) / width
        for row, lag in zip(rows, lags, strict=True):
            if lag <= width:  # rows that draft nothing now keep up as well
                row.draft_cached = len(row.token_ids)
        return logits

    def _catch_up(self, row: Sequence) -> None:
        """Fill the draft's cache for a new row, or one that was decoded without drafting for a while.

        Where the cache is the same whichever expert is on, none has to be made ready for that.
        """
        end = len(row.token_ids) - 1
        self.bank.select([SHARED if self.bank.shares_cache else row.expert])
        while row.draft_cached < end:
            piece = row.token_ids[row.draft_cached : min(row.draft_cached + self.chunk, end)]
            ids = torch.tensor([piece], device=self.model.device)
            self.model.forward(self.cache, row.slot, self._feed(ids), [row.draft_cached], keep=1)
            row.draft_cached += len(piece)

    def _feed(self, ids: torch.Tensor) -> torch.Tensor:
        """Tokens that only the target's padded vocabulary has become token 0: a worse guess, nothing more."""
        if self.model.vocab_size >= self.vocab_size:
            return ids
        return ids.where(ids < self.model.vocab_size, 0)

    def _fit(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits over the target's vocabulary."""
        extra = self.vocab_size - logits.shape[-1]
        if extra > 0:
            return torch.nn.functional.pad(logits, (0, extra), value=-torch.inf)
        return logits[..., : self.vocab_size]


def verified_of(limits: list[int], steps: int, found: Found, budget: Budget) -> int:
    """Draft tokens to verify after so many steps, with the padding where that costs as much."""
    if budget.ragged:
        return found.count + sum(min(limit, steps) for limit in limits)
    return len(limits) * max(steps, found.width)


def pack(
    tokens: list[torch.Tensor],
    kept: list[torch.Tensor],
    confidences: list[list[float]],
    experts: tuple[str, ...],
    found: Found,
    device: torch.device,
) -> Draft:
    """One proposal of what the model drew, int64 [B] a step, and of what was looked up.

    kept: the logits [B, V] that each step was drawn from, where some row is sampled. What was looked up is
    certain, so its row of logits is 0 at the token and −inf elsewhere.
    """
    batch, steps = len(confidences), len(tokens)
    width, matches = max(steps, found.width), found.matches
    lengths = [len(matches[b].tokens) if b in matches else len(row) for b, row in enumerate(confidences)]
    token_ids = torch.full((batch, width), -1, dtype=torch.int64, device=device)
    if tokens:
        token_ids[:, :steps] = torch.stack(tokens, dim=1)
    for b, match in matches.items():
        token_ids[b, : len(match.tokens)] = torch.tensor(match.tokens, dtype=torch.int64, device=device)
    drafted = torch.tensor(lengths, device=device)
    token_ids.masked_fill_(torch.arange(width, device=device) >= drafted[:, None], -1)
    logits = torch.stack(kept, dim=1) if kept else None
    if logits is not None and matches:
        logits = torch.nn.functional.pad(logits, (0, 0, 0, width - steps))
        rows = list(matches)
        certain = torch.full_like(logits[rows], -torch.inf)
        logits[rows] = certain.scatter_(2, token_ids[rows].clamp_min(0)[..., None], 0.0)
    return Draft(Proposal(token_ids, logits, drafted), confidences, steps, experts, matches)


def without_model(rows: int, found: Found, device: torch.device) -> Draft:
    """Only what was looked up: certain, so it needs no logits. Nothing found: plain decoding."""
    return pack([], [], [[] for _ in range(rows)], (SHARED,) * rows, found, device)
