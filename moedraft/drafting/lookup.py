"""Drafting without a model: what followed the last tokens the last time they stood in this text.

Answers quote their prompts and repeat themselves: code, tables, names. Such a guess costs nothing but its
place in verification. Known as prompt lookup (Saxena 2023) and n-gram drafting; that it is weighed against
the draft model, row by row, by measured chances is our own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from moedraft.core import Sequence
from moedraft.drafting.drafter import Another
from moedraft.evidence import NOBODY, Evidence, Proposal, Rows

SHORTEST, LONGEST = 2, 8  # tokens that must agree, and beyond which a longer match is no better
CANDIDATES = 8  # earlier places that are compared, newest first
REACH = 4096  # tokens back from the first look; what stands before is not searched


@dataclass(frozen=True)
class Match:
    """An earlier place in a text that ends like the text itself does now."""

    length: int  # the last tokens of the text that are the same there
    tokens: list[int]  # those that followed there


class SuffixIndex:
    """Where each pair of neighbouring tokens stood before, for one text that only grows."""

    def __init__(self, length: int) -> None:
        self._first = max(0, length - REACH)
        self._last: dict[tuple[int, int], int] = {}  # newest place of a pair, by its second token
        self._before: list[int] = []  # by place since `_first`: the place of the same pair before, or -1

    def find(self, tokens: list[int], count: int) -> Match | None:
        """The next `count` tokens as after the longest match, the newest of several."""
        self._take(tokens)
        end = len(tokens) - 1
        best, where, at = 0, -1, self._earlier(end)
        for _ in range(CANDIDATES):
            if at < 0 or best == LONGEST:
                break
            length, most = SHORTEST, min(LONGEST, at - self._first + 1)
            while length < most and tokens[at - length] == tokens[end - length]:
                length += 1
            if length > best:
                best, where = length, at
            at = self._earlier(at)
        if not best:
            return None
        # A text that repeats itself runs into its own end: it goes on with what was guessed.
        period = end - where
        guess = [tokens[where + 1 + i % period] for i in range(count)]
        return Match(best, guess)

    def _take(self, tokens: list[int]) -> None:
        for place in range(self._first + len(self._before), len(tokens)):
            pair = (tokens[place - 1], tokens[place]) if place > self._first else (-1, tokens[place])
            self._before.append(self._last.get(pair, -1))
            self._last[pair] = place

    def _earlier(self, place: int) -> int:
        return self._before[place - self._first]


class MatchAcceptance:
    """P(accepted) by how many tokens before agree; the longer, the surer."""

    def __init__(self) -> None:
        self.rates = [length / (length + 1) for length in range(LONGEST + 1)]
        self._seen = [0] * (LONGEST + 1)

    def rates_after(self, length: int, count: int) -> list[float]:
        """For tokens 1 … count after a match: the chance of each, if those before it are accepted."""
        return [self.rates[min(length + i, LONGEST)] for i in range(count)]

    def observe(self, length: int, drafted: int, accepted: int) -> None:
        """Only verified tokens count: those accepted and the first one refused."""
        for i in range(min(drafted, accepted + 1)):
            at = min(length + i, LONGEST)
            self._seen[at] += 1
            self.rates[at] += ((i < accepted) - self.rates[at]) / min(self._seen[at] + 4, 100)


class LookupDrafter:
    """A drafter that takes what followed the row's last tokens before. It needs no model and no cache."""

    source = "lookup"
    needs: tuple[int, ...] = ()

    def __init__(self) -> None:
        self._indices: dict[str, SuffixIndex] = {}  # by request
        self._lengths: dict[int, int] = {}  # by row, how long the match of the last proposal was
        self._acceptance = {greedy: MatchAcceptance() for greedy in (True, False)}

    def propose(self, rows: Rows, limits: list[int], another: Another | None = None) -> Proposal:
        """All of what followed, up to the limit: a looked-up token costs nothing to guess."""
        matches = [self.find(row, limit) for row, limit in zip(rows.sequences, limits, strict=True)]
        self._lengths = {b: match.length for b, match in enumerate(matches) if match}
        nothing = Proposal.nothing(len(rows), rows.device)
        if not self._lengths:
            return nothing
        guesses = [match.tokens if match else [] for match in matches]
        width = max(map(len, guesses))
        padded = [guess + [-1] * (width - len(guess)) for guess in guesses]
        return replace(
            nothing,
            token_ids=torch.tensor(padded, device=rows.device),
            lengths=[len(guess) for guess in guesses],
            sources=[self.source if match else NOBODY for match in matches],
            confidences=[
                self._of(row).rates_after(match.length, len(match.tokens)) if match else []
                for row, match in zip(rows.sequences, matches, strict=True)
            ],
        )

    def find(self, row: Sequence, count: int) -> Match | None:
        """At most `count` tokens to follow the row's text."""
        if not count:
            return None
        index = self._indices.get(row.request_id)
        if index is None:
            index = self._indices[row.request_id] = SuffixIndex(len(row.token_ids))
        return index.find(row.token_ids, count)

    def observe(self, evidence: Evidence) -> None:
        for b in evidence.drafted_by(self.source):
            drafted, accepted = evidence.proposal.lengths[b], evidence.accepted[b]
            self._of(evidence.rows[b]).observe(self._lengths[b], drafted, accepted)

    def forget(self, row: Sequence) -> None:
        """Drop the finished request's index; its id may be used again."""
        self._indices.pop(row.request_id, None)

    def swap(self, a: int, b: int, length: int) -> None:
        """Indices belong to requests, not to slots."""

    def clear(self, slot: int) -> None:
        """Nothing is kept by slot."""

    def _of(self, row: Sequence) -> MatchAcceptance:
        """What is known of matches for rows like this one.

        Sampled rows are counted apart from greedy ones, since a sampled text repeats itself less.
        """
        return self._acceptance[row.params.temperature == 0]
