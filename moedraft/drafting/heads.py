"""The output rows of a feature drafter, where each expert guesses from a vocabulary of its own.

An expert's rows are those of the target's output matrix for its own tokens, with what shared adapter and
expert add to them. The list is short, so that the drafter's largest product is small. A batch of several
experts guesses from one list that holds all of theirs; a row's tokens outside its own expert's list are
barred, so that it is drafted for as it would be alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from moedraft.core import SHARED
from moedraft.drafting.adapter import HEAD, Adapter, Delta
from moedraft.drafting.layer import LoRALinear, Mixed, Multiplies
from moedraft.feature.model import FeatureDraft
from moedraft.feature.vocabulary import checked, places, rows_for, union


class ExpertHeads:
    """Sets the vocabulary of a feature drafter, and the rows that its output layer multiplies by."""

    def __init__(self, draft: FeatureDraft, layer: LoRALinear) -> None:
        """layer: the drafter's output layer."""
        self.draft, self.layer = draft, layer
        self.general = draft.vocabulary  # the base's

    def vocabulary(self, adapter: Adapter | None) -> torch.Tensor:
        """The tokens that an adapter guesses, int64, ascending; None: the base."""
        return self.general if adapter is None or adapter.vocabulary is None else adapter.vocabulary

    def checked(self, vocabulary: torch.Tensor) -> torch.Tensor:
        """A list as it was stored. Raises CorruptAdapter where it is none."""
        return checked(vocabulary, self.draft.config.vocab_size).to(self.general.device)

    def weight(self, vocabulary: torch.Tensor, *adapters: Adapter | None) -> torch.Tensor:
        """[n, H]: the rows of these tokens in the base, and what the adapters add."""
        weight = self.draft.rows(vocabulary)
        for adapter in adapters:
            if adapter is not None and HEAD in adapter.deltas:
                a, b = adapter.deltas[HEAD]
                weight = weight + rows_for(b, self.vocabulary(adapter), vocabulary) @ a
        return weight

    def use(self, vocabulary: torch.Tensor, product: Multiplies | None) -> None:
        """Guess these tokens in the next forward; product None: with the base's own rows."""
        self.draft.vocabulary, self.layer.product = vocabulary, product

    def use_mixed(
        self,
        rows: Sequence[str],
        present: Mapping[str, Adapter],
        shared: Adapter | None,
        plain: Multiplies | None,
    ) -> None:
        """Each row with its own expert or none. plain: the product of base and shared adapter."""
        vocabulary = self.vocabulary(shared)
        own = {expert: self.vocabulary(adapter) for expert, adapter in present.items()}
        if any(bool((places(tokens, vocabulary) < 0).any()) for tokens in own.values()):
            vocabulary = union([vocabulary, *own.values()])
            plain = self.layer.with_weight(self.weight(vocabulary, shared))
        deltas: dict[str, Delta] = {}
        for expert, adapter in present.items():
            if HEAD in adapter.deltas:
                a, b = adapter.deltas[HEAD]
                deltas[expert] = a, rows_for(b, own[expert], vocabulary)
        product: Multiplies = plain or self.layer.base
        if deltas:
            product = Mixed(product, deltas, rows)
        allowed = own | {SHARED: self.vocabulary(shared)}
        self.use(vocabulary, Barred(product, vocabulary, [allowed.get(row, allowed[SHARED]) for row in rows]))


class Barred:
    """A product over the batch's vocabulary; each row has logits for the tokens of its own list alone."""

    def __init__(self, product: Multiplies, vocabulary: torch.Tensor, own: Sequence[torch.Tensor]) -> None:
        """own: by row."""
        self.product = product
        known: dict[int, torch.Tensor] = {}
        for tokens in own:
            if id(tokens) not in known:
                known[id(tokens)] = places(vocabulary, tokens) < 0
        self.barred = torch.stack([known[id(tokens)] for tokens in own])[:, None]  # [B, 1, n]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [B, T, H] → [B, T, n]"""
        return self.product(x).masked_fill_(self.barred, -torch.inf)
