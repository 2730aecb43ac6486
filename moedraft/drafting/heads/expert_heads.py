"""The output rows of a feature drafter, where each expert guesses from a vocabulary of its own.

An expert's rows are those of the target's output matrix for its own tokens, with what shared adapter and
expert add to them. The list is short, so that the drafter's largest product is small. In a batch of several
experts, the rows of all their tokens are multiplied at once (`joined_heads`) where these are fewer than those
of each expert by itself. Otherwise, and where no row's numbers may depend on the others, each expert's rows
multiply the hidden states of its own part of the batch. The drafter's vocabulary has a list for each row of
the batch where the lists differ.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch

from moedraft.core import SHARED
from moedraft.cpu.products import Product
from moedraft.drafting.experts.adapter import HEAD, Adapter
from moedraft.drafting.experts.layer import LoRALinear, Multiplies
from moedraft.drafting.experts.merged import MergedExperts
from moedraft.drafting.heads.joined_heads import CommonRows, JoinedHeads
from moedraft.feature.model import FeatureDraft
from moedraft.feature.vocabulary import checked, rows_for

Head = tuple[torch.Tensor, Multiplies]  # a vocabulary, int64 and ascending, and the product with its rows
JOINED = ""  # owns the rows of all experts whose output rows are multiplied at once


class ExpertHeads:
    """The output layer of a feature drafter, for all experts of a bank."""

    def __init__(self, draft: FeatureDraft, layer: LoRALinear, budget: int, copies: int) -> None:
        """layer: the drafter's output layer. budget, copies: as `MergedExperts`'."""
        self.draft, self.layer = draft, layer
        self.general = draft.vocabulary  # the base's
        # Lists are filled up with it, since they must be ascending; the smallest of what may be a vocabulary.
        self.last = min(draft.config.vocab_size, len(draft.output), len(draft.embeddings)) - 1
        self.base: Head = (self.general, layer.with_weight(layer.base_weight()))
        self.shared: Head = self.base  # with the shared adapter
        self.kept = MergedExperts(budget, copies, (HEAD,))
        self.joined = JoinedHeads(draft, layer)

    def checked(self, vocabulary: torch.Tensor) -> torch.Tensor:
        """A stored vocabulary, on the drafter's device. Raises CorruptAdapter where it is not valid."""
        return checked(vocabulary, self.draft.config.vocab_size).to(self.general.device)

    def vocabulary(self, adapter: Adapter) -> torch.Tensor:
        """The tokens that an adapter guesses."""
        return self.general if adapter.vocabulary is None else adapter.vocabulary

    def made(self, *adapters: Adapter | None) -> Product:
        """Output rows for the last adapter's vocabulary: the base's, plus what all these adapters add."""
        last = adapters[-1]
        vocabulary = self.general if last is None else self.vocabulary(last)
        weight = self.draft.rows(vocabulary)
        for adapter in adapters:
            if adapter is not None and HEAD in adapter.deltas:
                a, b = adapter.deltas[HEAD]
                weight = weight + rows_for(b, self.vocabulary(adapter), vocabulary) @ a
        return self.layer.with_weight(weight)

    def take(
        self,
        changes: Mapping[str, Adapter | None],
        ready: Mapping[str, Product],
        experts: Mapping[str, Adapter],
        common: CommonRows | None,
    ) -> None:
        """Use new versions from the next forward on.

        ready: output rows that were made for some of them. experts: all versions, new ones too. common: what
        `joined.made` has made for them.
        """
        self.joined.take(common)
        if SHARED in changes:
            shared = changes[SHARED]
            self.shared = self.base
            if shared is not None:
                self.shared = self.vocabulary(shared), ready[SHARED]
            self.kept.clear()
        for expert in changes:
            self.kept.drop(expert)
        for expert, product in ready.items():  # those used last come last
            if expert in experts:
                self.kept.keep(expert, experts[expert], {HEAD: product})

    def select(
        self,
        rows: Sequence[str],
        present: Mapping[str, Adapter],
        shared: Adapter | None,
        unadapted: Collection[str] = (),
        *,
        exact: bool = False,
    ) -> None:
        """Each row of the next forward guesses with its own expert's vocabulary and rows.

        unadapted: rows of these names guess with those of the base. exact: as `ExpertBank.select`'s.
        """
        heads: dict[str, Head] = {SHARED: self.shared} | dict.fromkeys(unadapted, self.base)
        owners = [row if row in present or row in heads else SHARED for row in rows]
        if not exact and self.joined.pays(present):
            heads[JOINED] = self.joined.select([row for row in owners if row in present], present)
            owners = [JOINED if row in present else row for row in owners]
        else:
            found = self.kept.needed(present, lambda adapter: {HEAD: self.made(shared, adapter)})
            heads |= {name: (self.vocabulary(present[name]), own[HEAD]) for name, own in found.items()}
        if len(set(owners)) == 1:
            self.draft.vocabulary, self.layer.product = heads[owners[0]]
            return
        width = max(len(heads[owner][0]) for owner in owners)
        names = self.general.new_full((len(owners), width), self.last)
        for row, owner in enumerate(owners):
            names[row, : len(heads[owner][0])] = heads[owner][0]
        self.draft.vocabulary = names
        self.layer.product = SeveralHeads(owners, {name: heads[name][1] for name in owners}, names)


class SeveralHeads:
    """One output layer for a batch whose rows have several experts, each with its own list of tokens.

    A row's logits are as many as the longest list has tokens; those behind its own list are −inf.
    """

    def __init__(
        self, owners: Sequence[str], products: Mapping[str, Multiplies], names: torch.Tensor
    ) -> None:
        """owners: whose product multiplies each row of the batch. names int64 [B, width]: its tokens."""
        self.width = names.shape[1]
        self.groups = []
        for owner in dict.fromkeys(owners):
            rows = [row for row, name in enumerate(owners) if name == owner]
            self.groups.append((torch.tensor(rows, device=names.device), products[owner]))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [B, T, H] → [B, T, width]"""
        y = x.new_full((*x.shape[:-1], self.width), -torch.inf)
        for rows, product in self.groups:
            logits = product(x[rows])
            y[rows, :, : logits.shape[-1]] = logits
        return y
