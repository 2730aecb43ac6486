"""Drafting without a model: what followed the last tokens the last time they stood in this text.

Answers quote their prompts and repeat themselves: code, tables, names. Such a guess costs nothing but its
place in verification. Known as prompt lookup (Saxena 2023) and n-gram drafting; that it is weighed against
the draft model, row by row, by measured chances is our own.
"""

from __future__ import annotations

from dataclasses import dataclass

from moedraft.core import Sequence

SHORTEST, LONGEST = 2, 8  # tokens that must agree, and beyond which a longer match is no better
CANDIDATES = 8  # earlier places that are compared, newest first
REACH = 4096  # tokens back from the first look; what stands before is not searched


@dataclass(frozen=True)
class Match:
    """What followed, and how many tokens before it agree."""

    length: int
    tokens: list[int]


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

    def survival(self, length: int, count: int) -> list[float]:
        """For tokens 1 … count after a match: the chance that all of them up to it are accepted."""
        chances, chance = [], 1.0
        for i in range(count):
            chance *= self.rates[min(length + i, LONGEST)]
            chances.append(chance)
        return chances

    def observe(self, length: int, drafted: int, accepted: int) -> None:
        """Only verified tokens count: those accepted and the first one refused."""
        for i in range(min(drafted, accepted + 1)):
            at = min(length + i, LONGEST)
            self._seen[at] += 1
            self.rates[at] += ((i < accepted) - self.rates[at]) / min(self._seen[at] + 4, 100)


class Lookup:
    """Indices of all running sequences, and what their matches have been worth."""

    def __init__(self) -> None:
        self._indices: dict[str, SuffixIndex] = {}
        self._acceptance = {greedy: MatchAcceptance() for greedy in (True, False)}

    def find(self, row: Sequence, count: int) -> Match | None:
        """At most `count` tokens to follow the row's text."""
        if not count:
            return None
        index = self._indices.get(row.request_id)
        if index is None:
            index = self._indices[row.request_id] = SuffixIndex(len(row.token_ids))
        return index.find(row.token_ids, count)

    def survival(self, row: Sequence, match: Match) -> list[float]:
        """Chances that the match's tokens up to each are accepted."""
        return self._of(row).survival(match.length, len(match.tokens))

    def observe(self, row: Sequence, match: Match, accepted: int) -> None:
        self._of(row).observe(match.length, len(match.tokens), accepted)

    def forget(self, row: Sequence) -> None:
        """It has ended; its id may be used again."""
        self._indices.pop(row.request_id, None)

    def _of(self, row: Sequence) -> MatchAcceptance:
        """The target repeats itself less where it is sampled."""
        return self._acceptance[row.params.temperature == 0]
