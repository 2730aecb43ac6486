"""What each expert of an independent draft model would have guessed where the tokens are known by now."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from moedraft import core
from moedraft.core import SHARED
from moedraft.drafting.drawing import best_tokens
from moedraft.drafting.experts.adapter import Adapter, Delta
from moedraft.drafting.experts.layer import Multiplies
from moedraft.drafting.experts.lora import ExpertBank
from moedraft.drafting.model import ModelDrafter
from moedraft.evidence import Passage

AT_ONCE = 0.03  # seconds after which no further arm is compared in a pass; two are in any case


class ModelJudge:
    """Compares the experts of `bank` by reading the last tokens that `drafter` has read once more.

    This is possible where the keys and values are the same whichever expert drafts, which adapters of the
    scope "tail" leave as they are: then each expert finds those of the text before, and writes what is there
    already. Where an adapter changes them, there is nothing to compare. Only verified tokens are looked at.
    """

    most_rows = 1  # each row and arm takes a forward of its own

    def __init__(
        self, drafter: ModelDrafter, bank: ExpertBank, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.drafter, self.bank = drafter, bank
        self._clock = clock
        self._random = random.Random(0)

    @property
    def comparable(self) -> bool:
        """Whether all experts find the keys and values that they would have written themselves."""
        return self.bank.shares_cache

    @property
    def arms(self) -> list[str]:
        """Whoever can draft otherwise than others: the shared draft and every expert that was trained."""
        return [SHARED, *self.bank.experts]

    @property
    def ready(self) -> list[str]:
        """All of them: their low-rank terms are added as they are, and no weights are merged for this."""
        return self.arms

    def known(self, row: core.Sequence, since: int, most: int) -> Passage:
        """The last `most` entries from `since` on that are in the cache and that the text can answer.

        Entry i guesses the token at i + 1. There are none of a row that is not drafted for, whose cache may
        have been emptied because it held NaN.
        """
        if not (row.draft and self.comparable):
            return Passage(row, since, since)
        end = min(row.draft_cached, len(row.token_ids) - 1)
        return Passage(row, max(since, end - most), end)

    @torch.inference_mode()
    def hits(self, passages: Sequence[Passage], arms: Sequence[str]) -> list[dict[str, list[float]]]:
        """By passage and arm, for each of its entries: 1 where the arm's first guess is the text's token.

        Where time is short, the first arm is compared with some of the others only, drawn at random.
        """
        began, guesses = self._clock(), dict[str, list[torch.Tensor]]()
        for arm in [*arms[:1], *self._random.sample(arms[1:], len(arms[1:]))]:
            if len(guesses) > 1 and self._clock() - began > AT_ONCE:
                break
            with self._drafting(self.bank.experts.get(arm)):
                guesses[arm] = [self._guesses(passage) for passage in passages]
        found = []
        for i, one in enumerate(passages):
            truth = torch.tensor(one.row.token_ids[one.first + 1 : one.end + 1])
            stacked = torch.stack([each[i] for each in guesses.values()]).cpu()  # [arms, entries]
            found.append(dict(zip(guesses, (stacked == truth).float().tolist(), strict=True)))
        return found

    def _guesses(self, passage: Passage) -> torch.Tensor:
        """The likeliest token, int64 [entries], after each of the passage's."""
        return best_tokens(self.drafter.read_again(passage.row, passage.first, passage.end))

    @contextmanager
    def _drafting(self, adapter: Adapter | None) -> Iterator[None]:
        """Inside, the bank's layers are those of the shared draft with this adapter.

        Afterwards they are as the bank has set them for the batch.
        """
        before = {name: layer.product for name, layer in self.bank.body.items()}
        plain, deltas = self.bank.common, adapter.deltas if adapter else {}
        try:
            for name, layer in self.bank.body.items():
                product, delta = plain.get(name), deltas.get(name)
                layer.product = product if delta is None else Added(product or layer.base, delta)
            yield
        finally:
            for name, layer in self.bank.body.items():
                layer.product = before[name]


class Added:
    """x [..., in] → x Wᵀ + (x Aᵀ) Bᵀ: what all arms have in common, and one expert's low-rank term."""

    def __init__(self, plain: Multiplies, delta: Delta) -> None:
        self.plain, (self.a, self.b) = plain, delta

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.plain(x) + x @ self.a.T @ self.b.T
