"""What a CPU's forward computes at once: rows that are decoded, and pieces of prompts beside them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from moedraft.cache import Cursor, SlotCache
from moedraft.cpu.lean import Packing
from moedraft.evidence import Beside, HiddenStates


@dataclass(frozen=True)
class Part:
    """A part of a forward: tokens int64 [B, T] of neighbouring slots.

    Shorter rows are padded, so a part holds rows of similar length.
    """

    token_ids: torch.Tensor
    cursor: Cursor
    lengths: list[int] | None = None  # the real tokens of each row; None: all
    hidden: HiddenStates | None = None  # layers whose input is asked for
    keep: int = 0  # logits of so many last positions; 0: of all

    @classmethod
    def at(
        cls,
        cache: SlotCache,
        first: int,
        token_ids: torch.Tensor,
        starts: list[int],
        lengths: list[int] | None,
        hidden: HiddenStates | None,
        keep: int = 0,
    ) -> Part:
        """What `LanguageModel.forward` is called with, as a part."""
        cursor = cache.cursor_at(first, starts, token_ids.shape[1], token_ids.device)
        return cls(token_ids, cursor, lengths, hidden, keep)

    @classmethod
    def beside(cls, cache: SlotCache, other: Beside) -> Part:
        return cls.at(cache, other.first, other.token_ids, other.starts, other.lengths, other.hidden)


class Span:
    """A part within a forward: its real tokens are rows `first` to `end − 1` of the hidden states [N, H]."""

    def __init__(self, part: Part, first: int, bias: torch.Tensor) -> None:
        """bias [B, 1, queries, read]: what attention adds to the scores, as `attend` takes it."""
        self.cursor, self.hidden, self.bias = part.cursor, part.hidden, bias
        self.packing = Packing.of(part.token_ids, part.lengths)
        self.token_ids = self.flat(part.token_ids)
        assert part.cursor.positions is not None
        self.positions = self.flat(part.cursor.positions).contiguous()
        self.first, self.end = first, first + len(self.token_ids)

    def of(self, x: torch.Tensor) -> torch.Tensor:
        """Its rows of x [N, …]."""
        return x[self.first : self.end]

    def flat(self, x: torch.Tensor) -> torch.Tensor:
        """[B, T, …] → its real tokens, [n, …]"""
        return x.flatten(0, 1) if self.packing.real is None else self.packing.pack(x)

    def padded(self, x: torch.Tensor) -> torch.Tensor:
        """The inverse of `flat`."""
        if self.packing.real is None:
            return x.view(*self.packing.shape, *x.shape[1:])
        return self.packing.pad(x)

    @cached_property
    def places(self) -> torch.Tensor:
        """int64 [n]: where its real tokens stand among all B · T."""
        real = self.packing.real
        return torch.arange(len(self.token_ids)) if real is None else real

    def collect(self, layer: int, hidden: torch.Tensor) -> None:
        """Hand over the input [N, H] of a layer where it is asked for."""
        if self.hidden is not None and layer in self.hidden.layers:
            self.hidden.states[layer] = self.padded(self.of(hidden))
