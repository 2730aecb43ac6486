"""Who drafts for each row, and how far: the draft model, what the row looks up in texts, or nobody."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

import torch

from moedraft.core import Sequence
from moedraft.drafting.drafter import ExpertDrafter, NoDrafter
from moedraft.drafting.lengths.acceptance import AcceptanceModel, RowAcceptance
from moedraft.drafting.lengths.budget import Budget, StopRule, survival_of
from moedraft.drafting.lookup.drafter import LookupDrafter
from moedraft.drafting.lookup.past_answers import PastAnswers
from moedraft.evidence import Evidence, Proposal, Rows

DraftSource = Literal["auto", "model", "lookup"]
T = TypeVar("T")
CatchUp = Callable[[Rows, list[int]], list[int]]  # `ExpertDrafter.catch_up`


@dataclass(frozen=True)
class DraftLimits:
    """How far rows may be drafted for."""

    max_model_len: int  # tokens of prompt and answer
    num_speculative_tokens: int = 4  # for rows whose length is fixed
    adaptive: bool = True  # False: the length of every row is fixed


class Chooser:
    """Puts one proposal together from what the draft model and the lookup guess, as the budget allows."""

    def __init__(
        self,
        model: ExpertDrafter,
        budget: Budget,
        limits: DraftLimits,
        source: DraftSource = "auto",
        *,
        catch_up: CatchUp | None = None,
        past: PastAnswers | None = None,
    ) -> None:
        """catch_up: the model's own, or that with something around it, such as a timer. past: for lookup."""
        self.model, self.lookup = model, LookupDrafter(past)
        self.budget, self.limits = budget, limits
        self.source: DraftSource = source
        self._catch_up = catch_up or model.catch_up
        self._rows: dict[str, RowAcceptance] = {}  # by request

    @property
    def drafts(self) -> bool:
        """Whether there is a draft model. Without one nothing is looked up either."""
        return not isinstance(self.model, NoDrafter)

    @property
    def longest(self) -> int:
        """The most tokens that a row is ever drafted for."""
        return max(self.budget.longest, self.limits.num_speculative_tokens)

    @contextmanager
    def using(
        self,
        budget: Budget | None = None,
        source: DraftSource | None = None,
        fixed_length: int | None = None,
        lookup: LookupDrafter | None = None,
    ) -> Iterator[None]:
        """While the block runs, draft by these instead of what was set at the start. The engine must be idle.

        budget, lookup: decide what is drafted and learn from it; systems that are compared on one engine need
        one of each, or one would draft by the others' acceptance. fixed_length: tokens that every row is
        drafted for, whether that pays or not.
        """
        before = self.budget, self.source, self.limits, self.lookup
        self.budget, self.source = budget or self.budget, source or self.source
        self.lookup = lookup or self.lookup
        if fixed_length is not None:
            self.limits = replace(self.limits, num_speculative_tokens=fixed_length, adaptive=False)
        try:
            yield
        finally:
            self.budget, self.source, self.limits, self.lookup = before

    def propose(self, rows: Rows) -> Proposal:
        """Guess for every row that wants it; nothing where drafting does not pay."""
        if not any(row.draft for row in rows.sequences):
            return Proposal.nothing(len(rows), rows.device)
        # A seeded answer must not depend on timing, so its draft length is fixed, and one source drafts it:
        # the model, or the lookup where that is the only one. See `Sequence.reproducible`.
        fixed = [not self.limits.adaptive or row.reproducible for row in rows.sequences]
        limits = [self._limit(row, f) for row, f in zip(rows.sequences, fixed, strict=True)]
        looked = self._look_up(rows, fixed)
        experts = self.model.experts_of(rows.sequences)
        free = {b: experts[b] for b, limit in enumerate(limits) if limit and not fixed[b]}
        means = {b: self._mean(rows.sequences[b], expert) for b, expert in free.items()}
        found = {b: survival_of(c) for b, c in enumerate(looked.confidences) if c and not fixed[b]}
        least = max((limit for limit, is_fixed in zip(limits, fixed, strict=True) if is_fixed), default=0)
        plan = self.budget.plan(means, found, len(rows), least)
        certain = {b: looked.lengths[b] for b, is_fixed in enumerate(fixed) if is_fixed}
        looked = looked.cut({**plan.looking, **certain})
        limits = [
            limit if is_fixed or (plan.model and not looked.lengths[b]) else 0
            for b, (limit, is_fixed) in enumerate(zip(limits, fixed, strict=True))
        ]
        if not any(limits):
            return looked
        limits = self._catch_up(rows, limits)
        if not any(limits):
            return looked
        models = [self._model(row, expert) for row, expert in zip(rows.sequences, experts, strict=True)]
        rule = StopRule(self.budget, models, means, limits, fixed, looked)
        return merged(self.model.propose(rows, limits, rule.another), looked)

    def experts_changed(self, rows: list[Sequence]) -> None:
        """These rows have another expert, of which what was accepted before says nothing."""
        for row in rows:
            self._rows.pop(row.request_id, None)
        self.model.experts_changed(rows)

    def _mean(self, row: Sequence, expert: str) -> float:
        """How likely the next token that this expert drafts for this row is accepted."""
        prior = self._model(row, expert).mean
        return self._rows[row.request_id].mean(prior) if row.request_id in self._rows else prior

    def _model(self, row: Sequence, expert: str) -> AcceptanceModel:
        return self.budget.model(expert, sampled=row.params.temperature > 0)

    def _look_up(self, rows: Rows, fixed: list[bool]) -> Proposal:
        if self.source == "model":
            return Proposal.nothing(len(rows), rows.device)
        certain = self.limits.num_speculative_tokens if self.source == "lookup" else 0
        longest = {True: certain, False: self.budget.longest}
        limits = [min(self._room(row), longest[f]) for row, f in zip(rows.sequences, fixed, strict=True)]
        return self.lookup.propose(rows, limits, weighed=[not f for f in fixed])

    def _limit(self, row: Sequence, fixed: bool) -> int:
        """The most tokens that the model may draft for this row."""
        if self.source == "lookup":
            return 0
        # Past the draft's own context the target goes on alone.
        room = min(self._room(row), max(0, self.model.max_len - len(row.token_ids)))
        return min(room, self.limits.num_speculative_tokens if fixed else self.budget.longest)

    def _room(self, row: Sequence) -> int:
        """The most tokens this row may draft: one less than it may still emit."""
        if not row.draft:
            return 0
        left = min(row.params.max_tokens - row.num_generated, self.limits.max_model_len - len(row.token_ids))
        return max(0, left - 1)

    # -- what follows from a round ---------------------------------------------------------------

    def observe(self, evidence: Evidence) -> None:
        """Both drafters learn, and the budget learns how far to trust the model's confidence."""
        self.lookup.observe(evidence)
        proposal, drafted = evidence.proposal, dict.fromkeys(evidence.drafted_by(self.model.source))
        for b in drafted:
            # A draft that gives NaN is refused by verification; its confidence is none.
            chances = [0.0 if math.isnan(chance) else chance for chance in proposal.confidences[b]]
            model = self._model(evidence.rows[b], proposal.experts[b])
            model.observe(chances, evidence.accepted[b], proposal.versions[b])
        for b, row in enumerate(evidence.rows):
            lately = self._rows.setdefault(row.request_id, RowAcceptance())
            lately.observe(*((proposal.lengths[b], evidence.accepted[b]) if b in drafted else (0, 0)))
        self.model.observe(evidence)

    def took(self, evidence: Evidence, tokens: int, ms: float) -> None:
        """The budget learns what a round cost and how many tokens it brought to all rows."""
        verified = evidence.proposal.verified(self.budget.ragged)
        self.budget.observe(len(evidence.rows), evidence.proposal.steps, verified, tokens, ms)

    def read_prompt(self, pieces: list[tuple[Sequence, int]], hidden: Mapping[int, torch.Tensor]) -> None:
        """As `ExpertDrafter.read_prompt`."""
        self.model.read_prompt(pieces, hidden)

    def forget(self, row: Sequence) -> None:
        self.lookup.forget(row)
        self._rows.pop(row.request_id, None)
        self.model.forget(row)

    def swap(self, a: int, b: int, length: int) -> None:
        self.model.swap(a, b, length)

    def clear(self, slot: int) -> None:
        self.model.clear(slot)


def merged(drawn: Proposal, looked: Proposal) -> Proposal:
    """One proposal of two: in rows that looked something up the looked-up tokens, in others the model's.

    A looked-up token has the probability 1: its logits are 0 at the token and −inf elsewhere, and their
    log-sum-exp is 0 at any temperature.
    """
    rows = [b for b, length in enumerate(looked.lengths) if length]
    if not rows:
        return drawn
    width = max(drawn.width, looked.width)
    token_ids = padded(drawn.token_ids, width, -1)
    token_ids[rows, : looked.width] = looked.token_ids[rows]
    logits, lse, cuts = drawn.logits, drawn.lse, drawn.cuts
    if logits is not None and lse is not None:
        if width > drawn.width:
            logits = torch.nn.functional.pad(logits, (0, 0, 0, width - drawn.width))
        # Nothing else reads what the model drafted for these rows, so their part of its buffer is used.
        numbers = torch.tensor(rows, device=logits.device)
        logits.index_fill_(0, numbers, -torch.inf)
        at = numbers[:, None], torch.arange(width, device=logits.device), token_ids[numbers].clamp_min(0)
        logits.index_put_(at, logits.new_zeros(()))
        lse = padded(lse, width, 0.0)
        lse[rows] = 0.0
    if cuts is not None:
        cuts = cuts.without(rows, width)

    def either(theirs: list[T], ours: list[T]) -> list[T]:
        return [ours[b] if looked.lengths[b] else theirs[b] for b in range(len(theirs))]

    return replace(
        drawn,
        token_ids=token_ids,
        lengths=either(drawn.lengths, looked.lengths),
        sources=either(drawn.sources, looked.sources),
        confidences=either(drawn.confidences, looked.confidences),
        logits=logits,
        lse=lse,
        cuts=cuts,
    )


def padded(values: torch.Tensor, width: int, fill: float) -> torch.Tensor:
    """[B, K] → a copy [B, width]."""
    return torch.nn.functional.pad(values, (0, width - values.shape[1]), value=fill)
