"""Propose tokens: all rows of the batch, whatever their experts, in one forward per token."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol

import torch

from moedraft.cache import SlotCache
from moedraft.core import SHARED, Proposal, Sequence
from moedraft.drafting.budget import Budget
from moedraft.kernels import sample_draft
from moedraft.sampling import SamplingBatch, filter_logits


class CausalModel(Protocol):
    """What the engine needs of a model; `LanguageModel` and the tests' table of logits have it."""

    vocab_size: int
    max_len: int

    @property
    def device(self) -> torch.device: ...
    def new_cache(self, slots: int) -> SlotCache: ...
    def forward(
        self, cache: SlotCache, first: int, token_ids: torch.Tensor, starts: list[int], keep: int = 0
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


@dataclass(frozen=True)
class Draft:
    """A proposal with what the budget and the caches need afterwards."""

    proposal: Proposal
    confidences: list[list[float]]  # by row and position: the draft's top-1 mass
    steps: int  # draft tokens sampled, padding included
    experts: tuple[str, ...]  # who drafted, by row


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
    ) -> Draft:
        """Draft for the sequences in slots 0 … B−1, at most `limits[b]` tokens for row b (0: none).

        Rows marked `fixed` get exactly their limit, so that a seeded answer does not depend on timing.
        """
        experts = self.experts_of(rows)
        slack = 1 if min(len(row.token_ids) for row in rows) > 1 else 0  # what `_first` can feed besides
        began = time.perf_counter()
        for row, limit in zip(rows, limits, strict=True):
            if limit and len(row.token_ids) - 1 - row.draft_cached > slack:
                self._catch_up(row)
        self.catch_up_ms = (time.perf_counter() - began) * 1e3
        self.bank.select(experts)
        free = [b for b, limit in enumerate(limits) if limit and not fixed[b]]
        least = max((limit for limit, is_fixed in zip(limits, fixed, strict=True) if is_fixed), default=0)
        tokens: list[torch.Tensor] = []
        kept: list[torch.Tensor] = []
        confidences: list[list[float]] = [[] for _ in rows]
        survival = dict.fromkeys(free, 1.0)
        expected = float(len(rows))
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
                )
            )
            if not on:
                break
            starts = [len(row.token_ids) + step for row in rows]
            logits = self.model.forward(self.cache, 0, self._feed(drawn[:, None]), starts, keep=1)[:, -1]
        return self._pack(tokens, kept, confidences, limits, tuple(experts))

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

    def _pack(
        self,
        tokens: list[torch.Tensor],
        kept: list[torch.Tensor],
        confidences: list[list[float]],
        limits: list[int],
        experts: tuple[str, ...],
    ) -> Draft:
        steps = len(tokens)
        token_ids = torch.stack(tokens, dim=1)
        lengths = torch.tensor([min(limit, steps) for limit in limits], device=token_ids.device)
        pad = torch.arange(steps, device=token_ids.device) >= lengths[:, None]
        proposal = Proposal(
            token_ids=token_ids.masked_fill(pad, -1),
            logits=torch.stack(kept, dim=1) if kept else None,
            lengths=lengths,
        )
        cut = [row[: min(limit, steps)] for row, limit in zip(confidences, limits, strict=True)]
        return Draft(proposal, cut, steps, experts)

    def _first(self, rows: list[Sequence], limits: list[int]) -> torch.Tensor:
        """Feed what each row's cache lacks, one or two tokens; logits [B, V] after the last token."""
        lag = [
            len(row.token_ids) - row.draft_cached for row, limit in zip(rows, limits, strict=True) if limit
        ]
        width = min(2, max(lag), min(len(row.token_ids) for row in rows))
        ids = torch.tensor([row.token_ids[-width:] for row in rows], device=self.model.device)
        starts = [len(row.token_ids) - width for row in rows]
        return self.model.forward(self.cache, 0, self._feed(ids), starts, keep=1)[:, -1]

    def _catch_up(self, row: Sequence) -> None:
        """Fill the draft's cache for a new row, or one that was decoded without drafting for a while."""
        end = len(row.token_ids) - 1
        self.bank.select([row.expert])
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


def empty_draft(rows: int, device: torch.device) -> Draft:
    """Nothing drafted: plain decoding."""
    proposal = Proposal(
        token_ids=torch.empty(rows, 0, dtype=torch.int64, device=device),
        logits=None,
        lengths=torch.zeros(rows, dtype=torch.int64, device=device),
    )
    return Draft(proposal, [[] for _ in range(rows)], 0, (SHARED,) * rows)
