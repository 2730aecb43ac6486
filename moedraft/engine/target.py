"""The target over its slots: reads prompts, and scores what is proposed, in one forward each."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from moedraft.core import Sequence
from moedraft.drafting.drafter import CausalModel
from moedraft.evidence import HiddenStates, Proposal


class TargetRunner:
    """The only caller of the target's forward. `hidden`: the layers whose hidden states drafters read."""

    def __init__(self, model: CausalModel, slots: int, hidden: tuple[int, ...] = ()) -> None:
        self.model = model
        self.hidden = hidden
        self.cache = model.new_cache(slots)

    def read(self, pieces: list[tuple[Sequence, int]]) -> Mapping[int, torch.Tensor]:
        """Read so many more prompt tokens of each row into the cache; their slots are neighbours.

        Returns the hidden states [B, T, H] by layer, as drafters read them.
        """
        lengths = [count for _, count in pieces]
        width = max(lengths)
        texts = [row.token_ids[row.target_cached :][:count] for row, count in pieces]
        ids = torch.tensor([text + [0] * (width - len(text)) for text in texts], device=self.model.device)
        starts = [row.target_cached for row, _ in pieces]
        wanted = self._wanted()
        self.model.forward(self.cache, pieces[0][0].slot, ids, starts, keep=1, lengths=lengths, hidden=wanted)
        return wanted.states if wanted else {}

    def score(
        self, rows: list[Sequence], proposal: Proposal
    ) -> tuple[torch.Tensor, Mapping[int, torch.Tensor]]:
        """Logits [B, K+1, V] after the last token and after each proposed one; the hidden states by layer.

        This is the one place that knows how a proposal lies in the cache and the mask. Raises ValueError for
        a token tree: only chains are verified.
        """
        if proposal.parents is not None:
            raise ValueError("A token tree cannot be verified: proposals must be chains (parents=None).")
        last = torch.tensor([row.token_ids[-1:] for row in rows], device=self.model.device)
        ids = torch.cat([last, proposal.token_ids.clamp_min(0)], dim=1)
        starts = [len(row.token_ids) - 1 for row in rows]
        lengths = [1 + length for length in proposal.lengths] if self.model.ragged else None
        wanted = self._wanted()
        logits = self.model.forward(self.cache, 0, ids, starts, lengths=lengths, hidden=wanted)
        return logits, wanted.states if wanted else {}

    def _wanted(self) -> HiddenStates | None:
        return HiddenStates(self.hidden) if self.hidden else None

    def swap(self, a: int, b: int, length: int) -> None:
        self.cache.swap(a, b, length)

    def clear(self, slot: int) -> None:
        self.cache.clear(slot)
