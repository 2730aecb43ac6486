"""One round for all decoding rows: draft, one target forward, verify. Knows no text and no request's end."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from moedraft.core import Sequence, TokenLogprobs, Verdict
from moedraft.drafting.budget import Budget
from moedraft.drafting.drafter import CausalModel, Draft, Drafter, empty_draft
from moedraft.kernels import TARGET_INVALID, verify_chain
from moedraft.sampling import SamplingBatch, filter_logits

if TYPE_CHECKING:
    from moedraft.routing.selector import ExpertSelector


@dataclass(frozen=True)
class Round:
    """What one row got out of a round."""

    tokens: list[int]  # accepted draft tokens and the one after them
    accepted: int
    confidences: list[float]  # of the row's drafted tokens
    steps: int  # draft tokens sampled for the whole batch
    expert: str  # who drafted
    broken: bool  # the target gave no usable distribution
    logprobs: list[TokenLogprobs]  # by token, where asked for


class Decoder:
    """Target, drafter and budget over one set of slots."""

    def __init__(
        self,
        target: CausalModel,
        drafter: Drafter | None,
        selector: ExpertSelector,
        *,
        slots: int,
        max_model_len: int,
        num_speculative_tokens: int,
        max_speculative_tokens: int,
        adaptive_budget: bool,
        topk: int,
    ) -> None:
        self.target = target
        self.drafter = drafter
        self.selector = selector
        self.max_model_len = max_model_len
        self.num_speculative_tokens = num_speculative_tokens
        self.adaptive_budget = adaptive_budget
        self.topk = topk
        self.budget = Budget(max_speculative_tokens, num_speculative_tokens)
        self.cache = target.new_cache(slots)
        self.verify_seconds = 0.0  # spent in `verify_chain` since the start
        self._sampling: tuple[list[Sequence], SamplingBatch] | None = None

    @property
    def speedup(self) -> float | None:
        """Of the last rounds against plain decoding, as measured by the plain rounds among them."""
        return self.budget.speedup

    def swap(self, a: int, b: int) -> None:
        """Exchange two slots in both caches."""
        self.cache.swap(a, b)
        if self.drafter is not None:
            self.drafter.cache.swap(a, b)

    def read(self, rows: list[Sequence], width: int) -> None:
        """Fill the target's cache with up to `width` prompt tokens of each row, in one padded forward.

        The rows stand in neighbouring slots. All but the last prompt token are read; that one is fed when
        decoding begins.
        """
        pieces = [row.token_ids[row.target_cached : row.target_cached + width] for row in rows]
        padded = [piece + [0] * (width - len(piece)) for piece in pieces]
        ids = torch.tensor(padded, device=self.target.device)
        self.target.forward(self.cache, rows[0].slot, ids, [row.target_cached for row in rows], keep=1)

    def round(self, rows: list[Sequence]) -> list[Round]:
        """Draft and verify for the rows in slots 0 … B−1."""
        sampling = self._sampling_of(rows)
        draft = self._draft(rows, sampling)
        logits = self._forward(rows, draft)
        filtered = filter_logits(logits, sampling)
        position = torch.tensor([len(row.token_ids) for row in rows], device=logits.device)
        checking = time.perf_counter()
        verdict = Verdict(
            *verify_chain(
                filtered,
                draft.proposal.token_ids,
                draft.proposal.logits,
                num_draft=draft.proposal.lengths,
                temperature=0.0 if sampling.greedy else sampling.temperature,
                seed=sampling.seed,
                position=position,
            )
        )
        tokens, accepted = verdict.tokens.tolist(), verdict.num_accepted.tolist()
        self.verify_seconds += time.perf_counter() - checking  # the lists are here: the device is done too
        self.selector.observe(rows, verdict)
        self._capture(rows, logits, accepted)
        emitted = [tokens[b][: count + 1] for b, count in enumerate(accepted)]
        return [
            Round(
                tokens=emitted[b],
                accepted=count,
                # A draft that gives NaN is refused by the kernel; its confidence is none.
                confidences=[0.0 if math.isnan(value) else value for value in draft.confidences[b]],
                steps=draft.steps,
                expert=draft.experts[b],
                broken=bool(status & TARGET_INVALID),
                logprobs=logprobs_of(rows[b], logits[b], emitted[b]),
            )
            for b, (count, status) in enumerate(zip(accepted, verdict.status.tolist(), strict=True))
        ]

    def _sampling_of(self, rows: list[Sequence]) -> SamplingBatch:
        """Of the same rows, not of rows with the same ids: an id may be used again."""
        known = self._sampling
        if known is None or [id(row) for row in known[0]] != [id(row) for row in rows]:
            params, seeds = [row.params for row in rows], [row.seed for row in rows]
            known = self._sampling = (rows, SamplingBatch.of(params, seeds, self.target.device))
        return known[1]

    def _draft(self, rows: list[Sequence], sampling: SamplingBatch) -> Draft:
        """Guess for every row that wants it; nothing where drafting does not pay."""
        nothing = empty_draft(len(rows), self.target.device)
        if self.drafter is None:
            return nothing
        # A seeded answer must not depend on timing, so its draft length is fixed.
        fixed = [not self.adaptive_budget or row.reproducible for row in rows]
        limits = [self._limit(row, is_fixed) for row, is_fixed in zip(rows, fixed, strict=True)]
        experts = self.drafter.experts_of(rows)
        free = [expert for expert, limit, f in zip(experts, limits, fixed, strict=True) if limit and not f]
        if free and not self.budget.start(free, len(rows)):
            limits = [limit if f else 0 for limit, f in zip(limits, fixed, strict=True)]
        if not any(limits):
            return nothing
        return self.drafter.propose(rows, sampling, limits, fixed, self.budget)

    def _limit(self, row: Sequence, fixed: bool) -> int:
        """The most tokens this row may draft: one less than it may still emit."""
        if not row.draft or self.drafter is None:
            return 0
        longest = self.num_speculative_tokens if fixed else self.budget.longest
        length = len(row.token_ids)
        left = min(row.params.max_tokens - row.num_generated, self.max_model_len - length)
        # Past the draft's own context the target goes on alone.
        return max(0, min(longest, left - 1, self.drafter.model.max_len - length))

    def _forward(self, rows: list[Sequence], draft: Draft) -> torch.Tensor:
        """Target logits [B, K+1, V] after the last token and after each drafted one."""
        last = torch.tensor([row.token_ids[-1:] for row in rows], device=self.target.device)
        ids = torch.cat([last, draft.proposal.token_ids.clamp_min(0)], dim=1)
        return self.target.forward(self.cache, 0, ids, [len(row.token_ids) - 1 for row in rows])

    def _capture(self, rows: list[Sequence], logits: torch.Tensor, accepted: list[int]) -> None:
        """Keep the target's top-k wherever a token was emitted, for rows that may be learned from."""
        wanted = [b for b, row in enumerate(rows) if row.capture]
        if not wanted:
            return
        chosen = logits[wanted].float()
        values, ids = chosen.topk(min(self.topk, chosen.shape[-1]), dim=-1)
        logprobs = values - chosen.logsumexp(-1, keepdim=True)
        for i, b in enumerate(wanted):
            count = accepted[b] + 1
            rows[b].captured.append((ids[i, :count].cpu(), logprobs[i, :count].cpu()))


def logprobs_of(row: Sequence, logits: torch.Tensor, tokens: list[int]) -> list[TokenLogprobs]:
    """Of the emitted tokens by the row's target logits [K+1, V]; nothing where the row asks for none."""
    count = row.params.logprobs
    if count is None or not all(0 <= token < logits.shape[-1] for token in tokens):
        return []
    logprobs = logits[: len(tokens)].float().log_softmax(-1)
    own = logprobs.gather(1, torch.tensor(tokens, device=logits.device)[:, None])[:, 0].tolist()
    values, ids = logprobs.topk(min(count, logprobs.shape[-1]), dim=-1)
    tops = (tuple(zip(i, v, strict=True)) for i, v in zip(ids.tolist(), values.tolist(), strict=True))
    return [TokenLogprobs(one, top) for one, top in zip(own, tops, strict=True)]
