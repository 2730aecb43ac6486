"""Tokens of a text that a feature drafter guesses beside its list.

A list is short, so that the drafter's largest product is small, and what it lacks is not guessed from it. But
most of the tokens of an answer that a list lacks stand in the text before them, names above all. So a row
may guess the tokens of its own text too, from the target's output rows: some hundred rows more, which cost
next to nothing (docs/experiments.md, "Tokens of the text").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from moedraft.core import Sequence as Row
from moedraft.feature.model import FeatureDraft
from moedraft.feature.vocabulary import places

Tokens = NDArray[np.int64]

MOST = 256  # different tokens of a text, the newest ones
STEP = 64  # output rows are multiplied in multiples of this
PADDING = -1
NEVER = 2**62  # a place that no text has


class TextTokens:
    """The different tokens of the texts of running requests. Texts only grow, so only what is new is read."""

    def __init__(self, most: int = MOST) -> None:
        self.most = most
        self._known: dict[str, _Known] = {}  # by request

    def of(self, row: Row) -> Tokens:
        """The newest `most` different tokens of this row's text, in any order; the next call changes them."""
        text = self._known.get(row.request_id)
        if text is None:
            text = self._known[row.request_id] = _Known(np.zeros(self.most, np.int64))
        for token in row.token_ids[text.read :] if self.most else ():
            place = text.places.pop(token, None)
            if place is None:
                full = len(text.places) == self.most
                place = text.places.pop(next(iter(text.places))) if full else len(text.places)
                text.tokens[place] = token
            text.places[token] = place
        text.read = len(row.token_ids)
        return text.tokens[: len(text.places)]

    def forget(self, row: Row) -> None:
        self._known.pop(row.request_id, None)


@dataclass
class _Known:
    tokens: Tokens
    places: dict[int, int] = field(default_factory=dict)  # of each token in `tokens`; the newest comes last
    read: int = 0  # tokens of the text


class BesideList:
    """Guesses of some tokens for each row of a batch, beside those of the rows' lists: for drafting.

    For measuring, where a whole text is known, there is `GrowingText`.
    """

    def __init__(
        self, draft: FeatureDraft, texts: Sequence[Tokens | Sequence[int]], *, exact: bool = False
    ) -> None:
        """texts: by row, the tokens. exact: no row's numbers may depend on the other rows."""
        device, width = draft.fc.weight.device, _rounded(max(map(len, texts)))
        padded = np.full((len(texts), width), PADDING, np.int64)
        for own, text in zip(padded, texts, strict=True):
            own[: len(text)] = text
        ids = torch.from_numpy(padded).to(device)
        self.padding, self.ids = ids == PADDING, ids.clamp(min=0)
        self.rows: torch.Tensor | list[torch.Tensor]
        if exact:  # [w, H] for each row
            widths = [_rounded(len(text)) for text in texts]
            self.rows = [draft.rows(ids[:own]) for ids, own in zip(self.ids, widths, strict=True)]
        else:
            self.rows = draft.rows(self.ids)  # [B, w, H]
        self._left_out = self._names = torch.empty(0)  # the same in all steps of a round

    def add(
        self, names: torch.Tensor, logits: torch.Tensor, normed: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The same names and logits with the further tokens: [B, v + w] and [B, T, v + w].

        names int64 [v] or [B, v], ascending: what logits [B, T, v] stand for, which are −inf where a row's
        list lacks it. normed [B, T, H]: what they were computed from. All calls have the same names.
        """
        if not len(self._names):
            self._left_out = (self.padding | self._listed(names, logits[:, 0]))[:, None]
            self._names = torch.cat([names.expand(len(logits), -1), self.ids], dim=-1)
        further = self._products(normed).to(logits.dtype).masked_fill(self._left_out, -torch.inf)
        return self._names, torch.cat([logits, further], dim=-1)

    def _listed(self, names: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """bool [B, w]: which of the tokens the row's list has already. logits [B, v]."""
        at = torch.searchsorted(names.contiguous(), self.ids).clamp(max=names.shape[-1] - 1)
        found = names[at] if names.dim() == 1 else names.gather(1, at)
        return (found == self.ids) & ~logits.gather(1, at).isneginf()

    def _products(self, normed: torch.Tensor) -> torch.Tensor:
        """[B, T, H] → [B, T, w]"""
        if isinstance(self.rows, torch.Tensor):
            return torch.bmm(normed.to(self.rows.dtype), self.rows.transpose(1, 2))
        found = normed.new_zeros(*normed.shape[:2], self.ids.shape[1])
        for row, own, states in zip(found, self.rows, normed, strict=True):
            row[:, : len(own)] = states.to(own.dtype) @ own.T
        return found


class GrowingText:
    """The tokens of one known text, for guesses at many of its places: each knows those before it."""

    def __init__(self, draft: FeatureDraft, text: Sequence[int], begin: int = 0, most: int = MOST) -> None:
        """begin: the first place that is guessed; of the tokens before it only the newest `most` count."""
        first: dict[int, int] = {}
        old = {*[*dict.fromkeys(reversed(text[:begin]))][:most]}
        for place, token in enumerate(text):
            if place >= begin or token in old:
                first.setdefault(token, place)
        device, filler = draft.fc.weight.device, [max(first, default=0)] * (_rounded(len(first)) - len(first))
        self.ids = torch.tensor([*sorted(first), *filler], dtype=torch.int64, device=device)
        known = [*(first[token] for token in sorted(first)), *(NEVER for _ in filler)]
        self.first, self.rows = torch.tensor(known, dtype=torch.int64, device=device), draft.rows(self.ids)

    def beside(self, names: torch.Tensor) -> ListAndText:
        """Guesses from a list, int64 [v] and ascending, and from this text."""
        return ListAndText(self, names)


class ListAndText:
    """A list and a text from which one guesses; `names` are the tokens of both."""

    def __init__(self, text: GrowingText, names: torch.Tensor) -> None:
        self.text, self.listed = text, names
        self.names = torch.cat([names, text.ids])
        self.never = (
            places(text.ids, names) >= 0 if len(names) else torch.zeros_like(text.ids, dtype=torch.bool)
        )

    def add(self, logits: torch.Tensor, normed: torch.Tensor, known: torch.Tensor) -> torch.Tensor:
        """Logits [T, v] of the list → [T, v + w], of `names`.

        normed [T, H]: what they were computed from. known int64 [T]: how many tokens stand before each guess.
        """
        further = (normed.to(self.text.rows.dtype) @ self.text.rows.T).to(logits.dtype)
        unknown = (self.text.first >= known[:, None]) | self.never
        return torch.cat([logits, further.masked_fill(unknown, -torch.inf)], dim=-1)

    def columns(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Where each of these tokens stands in `names`; −1 where it does not."""
        own, more = places(token_ids, self.listed), places(token_ids, self.text.ids)
        return torch.where((own < 0) & (more >= 0), len(self.listed) + more, own)


def _rounded(count: int) -> int:
    """The number of rows that are multiplied for so many: products are made for few shapes only."""
    return -(-max(count, 1) // STEP) * STEP
