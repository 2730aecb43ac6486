"""Small fakes: a model that is a table of logits, so that every distribution is known exactly."""

from __future__ import annotations

import torch

from moedraft.cache import SlotCache
from moedraft.evidence import Beside, HiddenStates


class TinyLM:
    """logits after a token = table[token]; keeps its context in a real SlotCache-shaped store of tokens.

    The row of the table is chosen by the token *read back from the cache*, so that a wrong slot, a stale
    entry or a wrong position shows as a wrong answer.
    """

    def __init__(self, table: torch.Tensor, max_len: int = 512) -> None:
        self.table = table
        self.vocab_size = table.shape[1]
        self.ragged = False
        self.mixes = False
        self.max_len = max_len
        self.forwards: list[tuple[int, int]] = []  # (rows, width)

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def new_cache(self, slots: int) -> SlotCache:
        return SlotCache(1, slots)

    def forward(
        self,
        cache: SlotCache,
        first: int,
        token_ids: torch.Tensor,
        starts: list[int],
        keep: int = 0,
        lengths: list[int] | None = None,
        hidden: HiddenStates | None = None,
        beside: Beside | None = None,
    ) -> torch.Tensor:
        if beside is not None:
            its = {"lengths": beside.lengths, "hidden": beside.hidden}
            self.forward(cache, beside.first, beside.token_ids, beside.starts, **its)
        self.forwards.append(tuple(token_ids.shape))
        positions = cache.at(first, starts, token_ids.shape[1], token_ids.device)
        states = token_ids[:, None, :, None].double()
        seen, _ = cache.update(states, states, 0)  # [B, 1, length, 1]
        # A token's logits also depend on the one before it, when there is one: a true use of the cache.
        own = seen[:, 0, :, 0].gather(1, positions).long()
        before = seen[:, 0, :, 0].gather(1, (positions - 1).clamp_min(0)).long()
        if hidden is not None:  # the token and the one before it, the same at every layer
            pair = torch.stack([own, before], dim=-1).double()
            hidden.states = dict.fromkeys(hidden.layers, pair)
        logits = self.table[own] + 0.5 * self.table[before].flip(-1) * (positions > 0)[..., None]
        return logits[:, -keep:] if keep else logits

    def logits_after(self, context: list[int]) -> torch.Tensor:
        """The exact next-token logits [V] after a context."""
        logits = self.table[context[-1]]
        return logits + 0.5 * self.table[context[-2]].flip(-1) if len(context) > 1 else logits


class NumberTokenizer:
    """Token 7 is the text "7 "; a prompt is numbers with spaces between."""

    eos_token_id = None

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [int(part) for part in text.split()]}

    def decode(self, ids: list[int], **_: object) -> str:
        return "".join(f"{i} " for i in ids)


def random_table(vocab: int, seed: int, scale: float = 1.5) -> torch.Tensor:
    return scale * torch.randn(vocab, vocab, generator=torch.Generator().manual_seed(seed)).double()
