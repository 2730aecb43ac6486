"""The target over its slots: reads prompts, and scores what is proposed, in one forward each."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from moedraft.core import Sequence
from moedraft.drafting.drafter import CausalModel
from moedraft.evidence import Beside, HiddenStates, Proposal, Reading


class TargetRunner:
    """The only caller of the target's forward. `hidden`: the layers whose hidden states drafters read."""

    def __init__(self, model: CausalModel, slots: int, hidden: tuple[int, ...] = ()) -> None:
        self.model = model
        self.hidden = hidden
        self.cache = model.new_cache(slots)

    @property
    def mixes(self) -> bool:
        """Whether `score` reads prompts in the same forward."""
        return self.model.mixes

    def read(self, reading: Reading) -> None:
        """Read pieces of prompts into the cache, in a forward of their own."""
        piece = self._beside(reading)
        self.model.forward(
            self.cache,
            piece.first,
            piece.token_ids,
            piece.starts,
            keep=1,
            lengths=piece.lengths,
            hidden=piece.hidden,
        )
        reading.states = states_of(piece.hidden)

    def score(
        self, rows: list[Sequence], proposal: Proposal, reading: Reading | None = None
    ) -> tuple[torch.Tensor, Mapping[int, torch.Tensor]]:
        """Logits [B, K+1, V] after the last token and after each proposed one; the hidden states by layer.

        This is the one place that knows how a proposal lies in the cache and the mask. reading: pieces of
        prompts to be read on the way, where the target `mixes`. Raises ValueError for a token tree: only
        chains are verified.
        """
        if proposal.parents is not None:
            raise ValueError("A token tree cannot be verified: proposals must be chains (parents=None).")
        last = torch.tensor([row.token_ids[-1:] for row in rows], device=self.model.device)
        ids = torch.cat([last, proposal.token_ids.clamp_min(0)], dim=1)
        starts = [len(row.token_ids) - 1 for row in rows]
        lengths = [1 + length for length in proposal.lengths] if self.model.ragged else None
        wanted = self._wanted()
        beside = self._beside(reading) if reading else None
        logits = self.model.forward(self.cache, 0, ids, starts, lengths=lengths, hidden=wanted, beside=beside)
        if reading and beside:
            reading.states = states_of(beside.hidden)
        return logits, states_of(wanted)

    def rehearse(self, rows: int, width: int, start: int) -> None:
        """Read `width` tokens of each of the first `rows` slots, as `score` would, only to be timed.

        No slot may be in use; clear these afterwards. The tokens differ, since a mixture of experts reads
        more weights for different ones.
        """
        ids = torch.arange(rows * width, device=self.model.device).view(rows, width) % self.model.vocab_size
        lengths = [width] * rows if self.model.ragged else None
        logits = self.model.forward(
            self.cache, 0, ids, [start] * rows, lengths=lengths, hidden=self._wanted()
        )
        logits[0, -1, 0].item()  # a GPU answers before it has computed

    def _beside(self, reading: Reading) -> Beside:
        lengths = [count for _, count in reading.pieces]
        width = max(lengths)
        texts = [row.token_ids[row.target_cached :][:count] for row, count in reading.pieces]
        ids = torch.tensor([text + [0] * (width - len(text)) for text in texts], device=self.model.device)
        starts = [row.target_cached for row, _ in reading.pieces]
        return Beside(reading.pieces[0][0].slot, ids, starts, lengths, self._wanted())

    def _wanted(self) -> HiddenStates | None:
        return HiddenStates(self.hidden) if self.hidden else None

    def swap(self, a: int, b: int, length: int) -> None:
        self.cache.swap(a, b, length)

    def clear(self, slot: int) -> None:
        self.cache.clear(slot)


def states_of(wanted: HiddenStates | None) -> Mapping[int, torch.Tensor]:
    """What a forward has collected."""
    return wanted.states if wanted else {}
