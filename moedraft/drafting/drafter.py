"""What the engine asks of a drafter, and what a drafter asks of a model and of its experts.

Implementations: `lookup.drafter.LookupDrafter` (what followed the same words before), `model.ModelDrafter`
(an independent draft model with experts), `feature.FeatureDrafter` (reads what the target has computed, and
has experts too), `NoDrafter` (plain decoding). The engine takes an `ExpertDrafter`, which each of them but
lookup is. `chooser.Chooser` adds lookup to it, row by row; `Drafter` is what the chooser asks of both.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Protocol

import torch

from moedraft.cache import SlotCache
from moedraft.core import SHARED, Sequence
from moedraft.evidence import Beside, Evidence, HiddenStates, Proposal, Rows

Another = Callable[[list[float]], bool]  # the chances of the tokens just drawn, by row → draw one more?


class CausalModel(Protocol):
    """What the engine needs of a model; `LanguageModel` and the tests' table of logits have it."""

    vocab_size: int
    max_len: int

    @property
    def device(self) -> torch.device: ...
    @property
    def ragged(self) -> bool: ...
    @property
    def mixes(self) -> bool: ...
    def new_cache(self, slots: int) -> SlotCache: ...
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
    ) -> torch.Tensor: ...


class Drafter(Protocol):
    """Guesses tokens for the rows in slots 0 … B−1. It knows no budget, no clock and no other drafter."""

    source: str  # its name in a proposal's `sources`
    needs: tuple[int, ...]  # target layers whose hidden states each verification must leave behind for it

    def propose(self, rows: Rows, limits: list[int], another: Another) -> Proposal:
        """At most `limits[b]` tokens for row b (0: none). `another` says when to stop before that."""

    def observe(self, evidence: Evidence) -> None:
        """Learn from a verification, before its tokens enter the rows."""

    def forget(self, row: Sequence) -> None:
        """Drop what is kept of this row, whose request has ended."""

    def swap(self, a: int, b: int, length: int) -> None:
        """Exchange two slots, of which no more than the first `length` positions are used."""

    def clear(self, slot: int) -> None:
        """Set the slot's cache to zeros: it may hold NaN, which would spread to the slot's next row."""


class ExpertDrafter(Drafter, Protocol):
    """A drafter with a cache of its own, which follows the rows' texts, and with an expert for each row."""

    max_len: int  # tokens of text that it can read

    def experts_of(self, rows: list[Sequence]) -> list[str]:
        """The expert that would draft for each row if all of them were drafted for in one batch."""

    def experts_changed(self, rows: list[Sequence]) -> None:
        """Called when the selector has given these rows other experts, before the next proposal."""

    def read_prompt(self, pieces: list[tuple[Sequence, int]], hidden: Mapping[int, torch.Tensor]) -> None:
        """Called when the target has read a piece of some prompts.

        pieces: each row, and how many more of its prompt tokens were read; the rows stand in neighbouring
        slots, and `target_cached` does not count these tokens yet. hidden: what the target computed for
        them, [B, T, H] for each layer that the drafter `needs`.
        """

    def catch_up(self, rows: Rows, limits: list[int]) -> list[int]:
        """Bring the drafter's cache up to the end of the rows that have a limit above 0.

        This takes long for a row that the drafter has not read before. Returns the limits, with 0 for rows
        that cannot be drafted for yet.
        """


class NoDrafter:
    """For plain decoding: it guesses nothing, and requests do not ask it to (`Sequence.draft` is False)."""

    source = "none"
    needs: tuple[int, ...] = ()
    max_len = sys.maxsize

    def experts_of(self, rows: list[Sequence]) -> list[str]:
        return [SHARED] * len(rows)

    def experts_changed(self, rows: list[Sequence]) -> None:
        """No expert drafts."""

    def read_prompt(self, pieces: list[tuple[Sequence, int]], hidden: Mapping[int, torch.Tensor]) -> None:
        """It reads nothing."""

    def catch_up(self, rows: Rows, limits: list[int]) -> list[int]:
        return [0] * len(limits)

    def propose(self, rows: Rows, limits: list[int], another: Another) -> Proposal:
        return Proposal.nothing(len(rows), rows.device)

    def observe(self, evidence: Evidence) -> None:
        """It learns nothing."""

    def forget(self, row: Sequence) -> None:
        """It keeps nothing of a row."""

    def swap(self, a: int, b: int, length: int) -> None:
        """It has no cache."""

    def clear(self, slot: int) -> None:
        """It has no cache."""


class Bank(Protocol):
    """What a drafter needs of the experts: `ExpertBank` has it."""

    @property
    def shares_cache(self) -> bool: ...
    def drafters(self, rows: list[str]) -> list[str]: ...
    def select(self, rows: list[str], *, exact: bool = False) -> None: ...
    def version(self, expert: str) -> int: ...


class NoExperts:
    """A bank without adapters: every row is drafted by the base."""

    shares_cache = True

    def drafters(self, rows: list[str]) -> list[str]:
        return rows

    def select(self, rows: list[str], *, exact: bool = False) -> None:
        """Do nothing: the base drafts for every row."""

    def version(self, expert: str) -> int:
        return 0
