"""What each expert of an independent draft model would have guessed where the tokens are known by now."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moedraft import core
from moedraft.core import SHARED
from moedraft.drafting.drawing import best_tokens
from moedraft.drafting.experts.lora import ExpertBank
from moedraft.drafting.model import ModelDrafter
from moedraft.evidence import Passage


class ModelJudge:
    """Compares the experts of `bank` by reading the last tokens that `drafter` has read once more.

    This is possible where the keys and values are the same whichever expert drafts, which adapters of the
    scope "tail" leave as they are: then each expert finds those of the text before, and writes what is there
    already. Where an adapter changes them, there is nothing to compare. Only verified tokens are looked at.
    """

    def __init__(self, drafter: ModelDrafter, bank: ExpertBank) -> None:
        self.drafter, self.bank = drafter, bank

    @property
    def arms(self) -> list[str]:
        """Whoever can draft otherwise than others: the shared draft and every expert that was trained."""
        return [SHARED, *self.bank.experts]

    @property
    def ready(self) -> set[str]:
        """Those whose merged weights are kept; for others they are computed first."""
        return {SHARED, *self.bank.unadapted, *self.bank.merged}

    def known(self, row: core.Sequence, since: int, most: int) -> Passage:
        """The last `most` entries from `since` on that are in the cache and that the text can answer.

        Entry i guesses the token at i + 1.
        """
        if not self.bank.shares_cache:
            return Passage(row, since, since)
        end = min(row.draft_cached, len(row.token_ids) - 1)
        return Passage(row, max(since, end - most), end)

    @torch.inference_mode()
    def hits(self, passages: Sequence[Passage], arms: Sequence[str]) -> list[dict[str, list[float]]]:
        """By passage and arm, for each of its entries: 1 where the arm's first guess is the text's token."""
        found: list[dict[str, list[float]]] = [{} for _ in passages]
        for arm in arms:
            self.bank.select([arm])
            for passage, hits in zip(passages, found, strict=True):
                hits[arm] = self._right(passage)
        return found

    def _right(self, passage: Passage) -> list[float]:
        """As `hits`, of one passage and the arm that the bank has selected."""
        row, first, end = passage.row, passage.first, passage.end
        guesses = best_tokens(self.drafter.read_again(row, first, end))
        truth = torch.tensor(row.token_ids[first + 1 : end + 1], device=guesses.device)
        return (guesses == truth).float().tolist()
