"""Drafting without a model: what followed the last tokens when they stood in a text before.

Answers quote their prompts and repeat themselves: code, tables, names. And they resemble earlier answers to
the same kind of question. Such a guess costs nothing but its place in verification. In the own text this is
known as prompt lookup (Saxena 2023) or n-gram drafting; for earlier answers see `past_answers`. Each guess is
weighed against the draft model's, row by row, by chances that are measured while serving.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import replace

import torch

from moedraft.core import Sequence
from moedraft.drafting.drafter import Another
from moedraft.drafting.lookup.matches import SHORTEST, Match, MatchAcceptance
from moedraft.drafting.lookup.own_text import SuffixIndex
from moedraft.drafting.lookup.past_answers import PastAnswers
from moedraft.evidence import NOBODY, Evidence, Proposal, Rows

DOUBT = {False: 1.0, True: 4.0}  # of matches in the row's own text and in earlier answers, before any is seen


class LookupDrafter:
    """A drafter that takes what followed the row's last tokens before. It needs no model and no cache."""

    source = "lookup"  # of guesses from the row's own text
    earlier = "earlier answers"  # of those from earlier answers
    needs: tuple[int, ...] = ()

    def __init__(self, past: PastAnswers | None = None) -> None:
        """past: earlier answers; None: only the rows' own texts are searched."""
        self.past = past or PastAnswers(0)
        self._indices: dict[str, SuffixIndex] = {}  # by request
        self._matches: dict[int, Match] = {}  # by row, those of the last proposal
        # by whether the row is greedy, and whether the match stands in an earlier answer
        self._acceptance = {
            (greedy, past): MatchAcceptance(DOUBT[past]) for greedy in (True, False) for past in (True, False)
        }

    def propose(
        self, rows: Rows, limits: list[int], another: Another | None = None, *, weighed: Items[bool] = ()
    ) -> Proposal:
        """All of what followed, up to the limit: a looked-up token costs nothing to guess.

        weighed: by row, whether what is found will be weighed by its chances before it is verified. Without,
        only what is likely is proposed, and only from the row's own text, so that the answer to a seed does
        not depend on what others asked.
        """
        wide = weighed or [False] * len(rows)
        found = [self.find(row, limit, w) for row, limit, w in zip(rows.sequences, limits, wide, strict=True)]
        self._matches = {b: match for b, match in enumerate(found) if match}
        nothing = Proposal.nothing(len(rows), rows.device)
        if not self._matches:
            return nothing
        guesses = [match.tokens if match else [] for match in found]
        width = max(map(len, guesses))
        padded = [guess + [-1] * (width - len(guess)) for guess in guesses]
        return replace(
            nothing,
            token_ids=torch.tensor(padded, device=rows.device),
            lengths=[len(guess) for guess in guesses],
            sources=[self._source(match) if match else NOBODY for match in found],
            confidences=[
                self._of(row, match).rates_after(match.length, len(match.tokens)) if match else []
                for row, match in zip(rows.sequences, found, strict=True)
            ],
        )

    def find(self, row: Sequence, count: int, widely: bool = False) -> Match | None:
        """At most `count` tokens to follow the row's text.

        widely: earlier answers are searched too, and the last token alone may agree. Then the first of these
        that finds something counts: two tokens or more in the own text, two or more in earlier answers, the
        last token in the own text, the last token in earlier answers.
        """
        if not count:
            return None
        index = self._indices.get(row.request_id)
        if index is None:
            index = self._indices[row.request_id] = SuffixIndex(len(row.token_ids))
        own = index.find(row.token_ids, count)
        if own or not widely:
            return own
        past = self.past.find(row.domain, row.token_ids, count)
        if past and past.length >= SHORTEST:
            return past
        return index.find_single(row.token_ids, count) or past

    def observe(self, evidence: Evidence) -> None:
        """Learn from all that was found in this round, whoever guessed: what is right is known now."""
        matches, self._matches = self._matches, {}
        for b, match in matches.items():
            if not evidence.broken[b]:
                pairs = list(zip(match.tokens, evidence.tokens[b], strict=False))
                right = next((i for i, (guess, said) in enumerate(pairs) if guess != said), len(pairs))
                self._of(evidence.rows[b], match).observe(match.length, len(pairs), right)

    def forget(self, row: Sequence) -> None:
        """Drop the finished request's index; its id may be used again."""
        self._indices.pop(row.request_id, None)

    def swap(self, a: int, b: int, length: int) -> None:
        """Indices belong to requests, not to slots."""

    def clear(self, slot: int) -> None:
        """Nothing is kept by slot."""

    def _source(self, match: Match) -> str:
        return self.earlier if match.past else self.source

    def _of(self, row: Sequence, match: Match) -> MatchAcceptance:
        """What is known of matches like this one.

        Sampled rows are counted apart from greedy ones, since a sampled text repeats itself less.
        """
        return self._acceptance[row.params.temperature == 0, match.past]
