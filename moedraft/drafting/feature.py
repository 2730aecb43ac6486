"""A drafter that reads what the target has just computed (EAGLE-3 type): no draft model of its own is needed.

Entry i of its cache stands for the target's features at position i and the token at i + 1, and guesses the
token at i + 2. Features of a position exist once the target has read it, so the entries that are still to be
read wait in `_waiting`; there is always one at least when the row is drafted for. Guesses are read on the
drafter's own output instead: those entries are overwritten after verification.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from moedraft.core import SHARED, Sequence
from moedraft.drafting.drafter import Another, Bank
from moedraft.drafting.drawing import Drawing, LogitBuffer
from moedraft.drafting.kept import ReadStates, StateKeeper
from moedraft.evidence import Evidence, Proposal, Rows
from moedraft.feature.model import FeatureDraft
from moedraft.feature.text_tokens import BesideList, TextTokens, Tokens

MOST_WAITING = 128  # features of a row that is not drafted for; more are read into the cache meanwhile


class FeatureDrafter:
    """A feature draft base with experts on it.

    Experts must leave keys and values alone (`Bank.shares_cache`): a stale entry could not be read again,
    since features are not kept.
    """

    source = "feature"

    def __init__(
        self,
        draft: FeatureDraft,
        bank: Bank,
        slots: int,
        vocab_size: int,
        *,
        states: ReadStates | None = None,
        keeper: StateKeeper | None = None,
    ) -> None:
        """vocab_size: the target's. states: are kept for comparing experts. keeper: does so for learning."""
        self.draft = draft
        self.bank = bank
        self.vocab_size = vocab_size
        self.needs = draft.config.feature_layers
        self.max_len = draft.config.max_len
        self.cache = draft.new_cache(slots)
        # By request, features from entry `draft_cached` on, in pieces [n, 3H]: joined when they are read.
        self._waiting: dict[str, list[torch.Tensor]] = {}
        self._buffer, self.text = LogitBuffer(), TextTokens()
        self.states, self.keeper = states, keeper

    def experts_of(self, rows: list[Sequence]) -> list[str]:
        """A reproducible row has its own expert in any batch, so then all rows have."""
        experts = [row.expert if row.draft else SHARED for row in rows]
        return experts if any(row.reproducible for row in rows) else self.bank.drafters(experts)

    def experts_changed(self, rows: list[Sequence]) -> None:
        """Do nothing: what the cache holds is the same whichever expert drafts."""

    # -- reading ---------------------------------------------------------------------------------

    def read_prompt(self, pieces: list[tuple[Sequence, int]], hidden: Mapping[int, torch.Tensor]) -> None:
        """Read all but the last position of these pieces at once.

        The last one waits, since its entry needs the token after it as well.
        """
        features = self._joined(hidden)
        for b, (row, count) in enumerate(pieces):
            self._keep(row, features[b, :count])
        self._read_ahead([row for row, _ in pieces])

    def catch_up(self, rows: Rows, limits: list[int]) -> list[int]:
        """Return how many tokens each row may draft: `limits`, but none where no state has come yet.

        Nothing is read here: waiting states are read together with the first guess. After a prompt of one
        token there is no state before the first step of the target.
        """
        pairs = zip(rows.sequences, limits, strict=True)
        return [limit if self._num_waiting(row) else 0 for row, limit in pairs]

    def observe(self, evidence: Evidence) -> None:
        """The features of what was emitted wait until the row is drafted for, whoever drafted it now."""
        features = self._joined(evidence.hidden)
        for b, row in enumerate(evidence.rows):
            self._keep(row, features[b, : evidence.accepted[b] + 1])
            if self._num_waiting(row) > MOST_WAITING:
                self._read_ahead([row])
        self._give_up_broken(evidence)

    def read_all(self, row: Sequence) -> None:
        """Read all of this row that can be read, such as when its answer has ended."""
        if self._num_waiting(row) > 1:
            self._read_ahead([row])

    def _give_up_broken(self, evidence: Evidence) -> None:
        """A row whose guesses are no numbers is decoded plainly from now on."""
        for b in evidence.drafted_by(self.source):
            if any(chance != chance for chance in evidence.proposal.confidences[b]):
                evidence.rows[b].draft = False
                self.clear(evidence.rows[b].slot)

    def _joined(self, hidden: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """By layer [B, T, H] → [B, T, 3H], a copy."""
        return torch.cat([hidden[layer] for layer in self.needs], dim=-1).to(self.draft.fc.weight.dtype)

    def _num_waiting(self, row: Sequence) -> int:
        return sum(piece.shape[0] for piece in self._waiting.get(row.request_id, ()))

    def _keep(self, row: Sequence, features: torch.Tensor) -> None:
        if row.draft:  # a copy, since a view would keep the whole batch alive
            self._waiting.setdefault(row.request_id, []).append(features.clone())

    def _take(self, row: Sequence, count: int) -> torch.Tensor:
        """The first `count` features that wait, [count, 3H]; they wait no longer."""
        waiting = torch.cat(self._waiting[row.request_id])
        self._waiting[row.request_id] = [waiting[count:].clone()]
        return waiting[:count]

    def _read_ahead(self, rows: list[Sequence]) -> None:
        """Read all that waits but the last entry, whose output will be the first guess.

        An entry needs the token after it, and what was just verified is not in the rows yet. Keys and values
        are the same whichever expert is on, so none has to be made ready.
        """
        self.bank.select([SHARED] * len(rows))
        known = [len(row.token_ids) - row.draft_cached - 1 for row in rows]
        waiting = [self._num_waiting(row) - 1 for row in rows]
        self._read(rows, [max(0, min(pair)) for pair in zip(known, waiting, strict=True)])

    def _read(self, rows: list[Sequence], counts: list[int]) -> torch.Tensor:
        """Read so many waiting entries of each row, in neighbouring slots; the layer's output [B, T, H].

        Output t belongs to a row's t-th entry; behind its count it means nothing, and what stands in the
        cache there is overwritten later.
        """
        width, size = max(counts), self.draft.config.features_size
        device, starts = self.draft.fc.weight.device, [row.draft_cached for row in rows]
        states = self.draft.fc.weight.new_zeros(len(rows), width, size)
        ids = [[0] * width for _ in rows]
        read = list(zip(rows, starts, counts, strict=True))
        for b, (row, count) in enumerate(zip(rows, counts, strict=True)):
            if count:
                first = row.draft_cached + 1
                states[b, :count] = self._take(row, count)
                tokens = row.token_ids[first : first + count]
                ids[b][: len(tokens)] = tokens
                row.draft_cached += count
        if not width:
            return states
        token_ids = torch.tensor(ids, device=device)
        fused = self.draft.fuse(states)
        if self.states is not None:
            self.states.keep(read, fused)
        if self.keeper is not None:
            self.keeper.keep(read, fused)
        return self.draft.advance(self.cache, rows[0].slot, fused, token_ids, starts)

    # -- proposing -------------------------------------------------------------------------------

    def propose(self, rows: Rows, limits: list[int], another: Another) -> Proposal:
        """All rows in one forward a token, whatever their experts."""
        experts, exact = self.experts_of(rows.sequences), any(row.reproducible for row in rows.sequences)
        self.bank.select(experts, exact=exact)
        drawing = Drawing(rows, limits, self._buffer)
        states = self._first(rows.sequences, limits)
        texts: list[Tokens | list[int]] = [
            self.text.of(row) if limit else [] for row, limit in zip(rows.sequences, limits, strict=True)
        ]
        beside = BesideList(self.draft, texts, exact=exact)
        while True:
            starts = [position - 1 for position in drawing.positions]
            normed = self.draft.normed(states)
            names, logits = beside.add(self.draft.vocabulary, self.draft.guess(normed), normed)
            drawing.draw(logits[:, 0], names, self.vocab_size)
            if not another(drawing.confidences[-1]):
                break
            states = self.draft.advance(self.cache, 0, states, drawing.tokens[-1][:, None], starts)
        return drawing.proposal(self.source, experts, [self.bank.version(expert) for expert in experts])

    def _first(self, rows: list[Sequence], limits: list[int]) -> torch.Tensor:
        """Read what waits; the layer's output [B, 1, H] at each row's last entry."""
        waiting = [self._num_waiting(row) for row in rows]
        width = max(count for count, limit in zip(waiting, limits, strict=True) if limit)
        counts = [count if count <= width else 0 for count in waiting]  # others read on when it is their turn
        hidden = self._read(rows, counts)
        last = torch.tensor([max(count, 1) - 1 for count in counts], device=hidden.device)
        return hidden[torch.arange(len(rows), device=hidden.device), last][:, None]

    # -- slots -----------------------------------------------------------------------------------

    def forget(self, row: Sequence) -> None:
        self.text.forget(row)
        waiting = self._waiting.pop(row.request_id, None)
        if self.states is not None:
            self.states.forget(row)
        if self.keeper is not None:
            wanted = row.capture and row.finish_reason in ("stop", "length")
            rest = self.draft.fc.weight.new_empty(0, 0)
            try:
                if waiting is not None and wanted:
                    rest = self.draft.fuse(torch.cat(waiting)[None])[0]
            finally:  # what is kept of the row is given back, whatever fails
                self.keeper.finish(row, rest)

    def swap(self, a: int, b: int, length: int) -> None:
        self.cache.swap(a, b, length)

    def clear(self, slot: int) -> None:
        self.cache.clear(slot)
