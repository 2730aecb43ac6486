"""Whether a model gives each token the same logits whatever is computed together with it."""

from __future__ import annotations

from typing import Protocol

import torch

from moedraft.cache import SlotCache
from moedraft.evidence import Beside


class SlotModel(Protocol):
    """What `independent` needs of a `LanguageModel`."""

    vocab_size: int

    def new_cache(self, slots: int) -> SlotCache: ...

    def forward(
        self,
        cache: SlotCache,
        first: int,
        token_ids: torch.Tensor,
        starts: list[int],
        *,
        beside: Beside | None = None,
    ) -> torch.Tensor: ...


@torch.inference_mode()
def independent(model: SlotModel) -> bool:
    """Whether logits are the same to the last bit, however many tokens and rows are computed together."""
    ids = torch.randint(model.vocab_size, (6, 45), generator=torch.Generator().manual_seed(0))
    cache = model.new_cache(6)
    for row in range(6):  # each by itself
        model.forward(cache, row, ids[row : row + 1, :30], [0])
    singly = [model.forward(cache, 2, ids[2:3, at : at + 1], [at])[0, 0] for at in range(30, 45)]
    for rows, width in ((1, 5), (6, 5), (6, 15)):
        first = 2 if rows == 1 else 0
        logits = model.forward(cache, first, ids[first : first + rows, 30 : 30 + width], [30] * rows)
        if not all(torch.equal(logits[2 - first, at], singly[at]) for at in range(width)):
            return False
    whole = model.new_cache(6)
    together = model.forward(whole, 0, ids, [0] * 6)
    if not all(torch.equal(together[2, 30 + at], singly[at]) for at in range(15)):
        return False
    # The prompt of row 2 is read beside row 1, which is decoded, and then the other way round.
    model.forward(whole, 1, ids[1:2, :30], [0])
    prompt = Beside(2, ids[2:3, :30], [0], [30])
    model.forward(whole, 1, ids[1:2, 30:33], [30], beside=prompt)
    other = Beside(1, ids[1:2, 33:45], [33], [12])
    mixed = model.forward(whole, 2, ids[2:3, 30:35], [30], beside=other)
    return all(torch.equal(mixed[0, at], singly[at]) for at in range(5))
