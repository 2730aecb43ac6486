"""An independent draft model with experts: one forward a token for all rows, whatever their experts."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from moedraft.core import SHARED, Sequence
from moedraft.drafting.drafter import Another, Bank, CausalModel
from moedraft.drafting.drawing import Drawing, LogitBuffer
from moedraft.evidence import Evidence, Proposal, Rows

LAG = 8  # tokens that a row's cache may be behind and still be read along with the first draft step


class ModelDrafter:
    """The draft base with its cache, which mirrors the target's slots.

    vocab_size: the target's; the draft's logits are cut or padded to it. chunk: tokens read at once when a
    row's cache is filled.
    """

    source = "model"
    needs: tuple[int, ...] = ()

    def __init__(self, model: CausalModel, bank: Bank, slots: int, vocab_size: int, chunk: int = 512) -> None:
        self.model = model
        self.bank = bank
        self.vocab_size = vocab_size
        self.chunk = chunk
        self.max_len = model.max_len
        self.cache = model.new_cache(slots)
        self._buffer = LogitBuffer()

    def experts_of(self, rows: list[Sequence]) -> list[str]:
        """A reproducible row has its own expert in any batch, so then all rows have."""
        experts = [row.expert if row.draft else SHARED for row in rows]
        return experts if any(row.reproducible for row in rows) else self.bank.drafters(experts)

    def experts_changed(self, rows: list[Sequence]) -> None:
        """With adapters that change keys and values, the cache of these rows is stale."""
        if not self.bank.shares_cache:
            for row in rows:
                row.draft_cached = 0

    # -- the cache -------------------------------------------------------------------------------

    def read_prompt(self, pieces: list[tuple[Sequence, int]], hidden: Mapping[int, torch.Tensor]) -> None:
        """The prompt is read when the row is first drafted for: it needs nothing of the target."""

    def catch_up(self, rows: Rows, limits: list[int]) -> list[int]:
        """Fill the cache for rows that are new, or that were decoded without this drafter for a while.

        Where keys and values are the same whichever expert is on, none has to be made ready for that.
        """
        reach = min(LAG, *(len(row.token_ids) for row in rows.sequences))
        for row, limit in zip(rows.sequences, limits, strict=True):
            if limit and len(row.token_ids) - row.draft_cached > reach:
                self.bank.select([SHARED if self.bank.shares_cache else row.expert])
                self._read(row)
        return limits

    def _read(self, row: Sequence) -> None:
        end = len(row.token_ids) - 1
        while row.draft_cached < end:
            piece = row.token_ids[row.draft_cached : min(row.draft_cached + self.chunk, end)]
            ids = torch.tensor([piece], device=self.model.device)
            self.model.forward(self.cache, row.slot, self._feed(ids), [row.draft_cached], keep=1)
            row.draft_cached += len(piece)

    def read_again(self, row: Sequence, first: int, end: int) -> torch.Tensor:
        """Logits [end − first, V] after each of these tokens of a row, whose cache holds them already.

        The bank decides which expert guesses. Keys and values are written anew, so it must be one that leaves
        them as they are (`ExpertBank.shares_cache`).
        """
        ids = torch.tensor([row.token_ids[first:end]], device=self.model.device)
        return self._fit(self.model.forward(self.cache, row.slot, self._feed(ids), [first])[0])

    def swap(self, a: int, b: int, length: int) -> None:
        self.cache.swap(a, b, length)

    def clear(self, slot: int) -> None:
        self.cache.clear(slot)

    def forget(self, row: Sequence) -> None:
        """Nothing is kept by row: the next one in its slot overwrites the cache."""

    # -- proposing -------------------------------------------------------------------------------

    def propose(self, rows: Rows, limits: list[int], another: Another) -> Proposal:
        """As `Drafter.propose`. The caller has called `catch_up` for the same rows and limits before."""
        experts = self.experts_of(rows.sequences)
        self.bank.select(experts, exact=any(row.reproducible for row in rows.sequences))
        drawing = Drawing(rows, limits, self._buffer)
        logits = self._first(rows.sequences, limits)
        while True:
            starts = drawing.positions
            drawing.draw(self._fit(logits))
            if not another(drawing.confidences[-1]):
                break
            ids = self._feed(drawing.tokens[-1][:, None])
            logits = self.model.forward(self.cache, 0, ids, starts, keep=1)[:, -1]
        return drawing.proposal(self.source, experts, [self.bank.version(expert) for expert in experts])

    def _first(self, rows: list[Sequence], limits: list[int]) -> torch.Tensor:
        """Read what the caches of drafting rows lack, a few tokens; logits [B, V] after the last token."""
        lags = [len(row.token_ids) - row.draft_cached for row in rows]
        width = max(lag for lag, limit in zip(lags, limits, strict=True) if limit)
        ids = torch.tensor([row.token_ids[-width:] for row in rows], device=self.model.device)
        starts = [len(row.token_ids) - width for row in rows]
        logits = self.model.forward(self.cache, 0, self._feed(ids), starts, keep=1)[:, -1]
        for row, lag in zip(rows, lags, strict=True):
            if lag <= width:  # rows that draft nothing now keep up as well
                row.draft_cached = len(row.token_ids)
        return logits

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

    # -- learning from verification --------------------------------------------------------------

    def observe(self, evidence: Evidence) -> None:
        """The cache holds what was accepted. Rows whose draft is no number are decoded plainly after this."""
        read = evidence.proposal.steps - 1  # the token drawn last was not read
        for b in evidence.drafted_by(self.source):
            row = evidence.rows[b]
            row.draft_cached += min(evidence.accepted[b], read)
            if any(map(math.isnan, evidence.proposal.confidences[b])):
                row.draft = False
                row.draft_cached = 0
                self.cache.clear(row.slot)
