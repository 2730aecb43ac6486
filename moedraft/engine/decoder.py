"""One round for all decoding rows: draft, one target forward, verify. Knows no text and no request's end.

What a row drafts comes from the draft model, or is looked up in the row's own text, whichever is the better
guess; the budget weighs them.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from moedraft.core import Sequence, TokenLogprobs, Verdict
from moedraft.drafting.budget import Budget
from moedraft.drafting.drafter import CausalModel, Draft, Drafter, Found, without_model
from moedraft.drafting.lookup import Lookup, Match
from moedraft.engine.capture import Capture
from moedraft.kernels import TARGET_INVALID, verify_chain
from moedraft.sampling import SamplingBatch, filter_logits

if TYPE_CHECKING:
    from moedraft.routing.selector import ExpertSelector


DraftSource = Literal["auto", "model", "lookup"]


@dataclass(frozen=True)
class Round:
    """What one row got out of a round."""

    tokens: list[int]  # accepted draft tokens and the one after them
    accepted: int
    confidences: list[float]  # of the tokens that the model drafted for the row
    match: Match | None  # what the row looked up instead
    steps: int  # draft tokens sampled for the whole batch
    verified: int  # draft tokens verified for the whole batch, with padding where that costs as much
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
        draft_source: DraftSource,
        topk: int,
    ) -> None:
        self.target = target
        self.drafter = drafter
        self.selector = selector
        self.max_model_len = max_model_len
        self.num_speculative_tokens = num_speculative_tokens
        self.adaptive_budget = adaptive_budget
        self.capture = Capture(topk)
        self.draft_source = draft_source
        self.budget = Budget(max_speculative_tokens, target.ragged)
        self.lookup = Lookup()
        self.cache = target.new_cache(slots)
        self.verify_seconds = 0.0  # spent in `verify_chain` since the start
        self._sampling: tuple[list[Sequence], SamplingBatch] | None = None

    @property
    def speedup(self) -> float | None:
        """Of the last rounds against plain decoding, as measured by the plain rounds among them."""
        return self.budget.speedup

    def forget(self, row: Sequence) -> None:
        """It has ended."""
        self.lookup.forget(row)

    def swap(self, a: int, b: int, length: int) -> None:
        """Exchange two slots, of texts of at most so many tokens, in both caches.

        What a round has added stands in the caches before it stands in the texts.
        """
        length += 1 + max(self.budget.longest, self.num_speculative_tokens)
        self.cache.swap(a, b, length)
        if self.drafter is not None:
            self.drafter.cache.swap(a, b, length)

    def clear(self, slot: int) -> None:
        """Forget what stands there in both caches: it may be no number, and the next row would suffer."""
        self.cache.clear(slot)
        if self.drafter is not None:
            self.drafter.cache.clear(slot)

    def read(self, pieces: list[tuple[Sequence, int]]) -> None:
        """Fill the target's cache with so many more prompt tokens of each row, in one forward.

        The rows stand in neighbouring slots, first to last.
        """
        lengths = [count for _, count in pieces]
        width = max(lengths)
        texts = [row.token_ids[row.target_cached :][:count] for row, count in pieces]
        ids = torch.tensor([text + [0] * (width - len(text)) for text in texts], device=self.target.device)
        starts = [row.target_cached for row, _ in pieces]
        self.target.forward(self.cache, pieces[0][0].slot, ids, starts, keep=1, lengths=lengths)

    def round(self, rows: list[Sequence]) -> list[Round]:
        """Draft and verify for the rows in slots 0 … B−1."""
        sampling = self._sampling_of(rows)
        draft = self._draft(rows, sampling)
        logits, verified = self._forward(rows, draft), draft.verified(self.budget.ragged)
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
        self._give_up_broken(rows, draft)
        emitted = [tokens[b][: count + 1] for b, count in enumerate(accepted)]
        return [
            Round(
                tokens=emitted[b],
                accepted=count,
                # A draft that gives NaN is refused by the kernel; its confidence is none.
                confidences=[0.0 if math.isnan(value) else value for value in draft.confidences[b]],
                match=draft.matches.get(b),
                steps=draft.steps,
                verified=verified,
                expert=draft.experts[b],
                broken=bool(status & TARGET_INVALID),
                logprobs=logprobs_of(rows[b], logits[b], emitted[b]),
            )
            for b, (count, status) in enumerate(zip(accepted, verdict.status.tolist(), strict=True))
        ]

    def _give_up_broken(self, rows: list[Sequence], draft: Draft) -> None:
        """Rows whose draft is no number are decoded plainly from now on."""
        if self.drafter is None:
            return
        for row, confidences in zip(rows, draft.confidences, strict=True):
            if any(map(math.isnan, confidences)):
                row.draft = False
                self.drafter.cache.clear(row.slot)

    def _sampling_of(self, rows: list[Sequence]) -> SamplingBatch:
        """Of the same rows, not of rows with the same ids: an id may be used again."""
        known = self._sampling
        if known is None or [id(row) for row in known[0]] != [id(row) for row in rows]:
            params, seeds = [row.params for row in rows], [row.seed for row in rows]
            known = self._sampling = (rows, SamplingBatch.of(params, seeds, self.target.device))
        return known[1]

    def _draft(self, rows: list[Sequence], sampling: SamplingBatch) -> Draft:
        """Guess for every row that wants it; nothing where drafting does not pay."""
        device = self.target.device
        if self.drafter is None:
            return without_model(len(rows), Found(), device)
        # A seeded answer must not depend on timing, so its draft length is fixed, and the model drafts it.
        fixed = [not self.adaptive_budget or row.reproducible for row in rows]
        rooms = [self._room(row) for row in rows]
        limits = [self._limit(row, room, f) for row, room, f in zip(rows, rooms, fixed, strict=True)]
        free = [b for b, is_fixed in enumerate(fixed) if not is_fixed]
        found = self._look_up(rows, {b: min(rooms[b], self.budget.longest) for b in free})
        names = self.drafter.experts_of(rows)
        least = max((limit for limit, is_fixed in zip(limits, fixed, strict=True) if is_fixed), default=0)
        plan = self.budget.plan({b: names[b] for b in free if limits[b]}, found.survival, len(rows), least)
        found = found.cut(plan.looking)
        for b in free:
            limits[b] = 0 if b in found.matches or not plan.model else limits[b]
        if not any(limits):
            return without_model(len(rows), found, device)
        return self.drafter.propose(rows, sampling, limits, fixed, self.budget, found)

    def _look_up(self, rows: list[Sequence], rooms: dict[int, int]) -> Found:
        """What stands in the rows' own texts, of at most so many tokens."""
        if self.draft_source == "model":
            return Found()
        found = {b: self.lookup.find(rows[b], room) for b, room in rooms.items()}
        matches = {b: match for b, match in found.items() if match is not None}
        return Found(matches, {b: self.lookup.survival(rows[b], match) for b, match in matches.items()})

    def observe(self, row: Sequence, one: Round) -> None:
        """What became of the row's draft; the estimates follow it."""
        if one.match is not None:
            self.lookup.observe(row, one.match, one.accepted)
        elif one.confidences:
            self.budget.model(one.expert).observe(one.confidences, one.accepted)

    def _room(self, row: Sequence) -> int:
        """The most tokens this row may draft: one less than it may still emit."""
        if not row.draft:
            return 0
        left = min(row.params.max_tokens - row.num_generated, self.max_model_len - len(row.token_ids))
        return max(0, left - 1)

    def _limit(self, row: Sequence, room: int, fixed: bool) -> int:
        """The most tokens that the model may draft for this row."""
        if self.drafter is None or self.draft_source == "lookup":
            return 0
        # Past the draft's own context the target goes on alone.
        room = min(room, max(0, self.drafter.model.max_len - len(row.token_ids)))
        return min(room, self.num_speculative_tokens if fixed else self.budget.longest)

    def _forward(self, rows: list[Sequence], draft: Draft) -> torch.Tensor:
        """Target logits [B, K+1, V] after the last token and after each drafted one."""
        last = torch.tensor([row.token_ids[-1:] for row in rows], device=self.target.device)
        ids = torch.cat([last, draft.proposal.token_ids.clamp_min(0)], dim=1)
        starts = [len(row.token_ids) - 1 for row in rows]
        lengths = [1 + count for count in draft.proposal.lengths.tolist()] if self.target.ragged else None
        return self.target.forward(self.cache, 0, ids, starts, lengths=lengths)

    def _capture(self, rows: list[Sequence], logits: torch.Tensor, accepted: list[int]) -> None:
        """Keep the target's top-k wherever a token was emitted, for rows that may be learned from."""
        wanted = [b for b, row in enumerate(rows) if row.capture]
        if not wanted:
            return
        counts = [accepted[b] + 1 for b in wanted]
        chosen = torch.cat([logits[b, :count] for b, count in zip(wanted, counts, strict=True)])
        for b, top in zip(wanted, self.capture.keep(chosen, counts), strict=True):
            rows[b].captured.append(top)


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
