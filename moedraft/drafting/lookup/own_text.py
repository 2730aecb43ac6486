"""What followed the last tokens of a text when they stood in it before."""

from __future__ import annotations

from moedraft.drafting.lookup.matches import LONGEST, SHORTEST, Match

CANDIDATES = 8  # earlier places that are compared, newest first
REACH = 4096  # tokens back from the first look; what stands before is not searched


class SuffixIndex:
    """Where each token, and each pair of neighbouring ones, stood before, for one text that only grows."""

    def __init__(self, length: int) -> None:
        self._first = max(0, length - REACH)
        self._last: dict[tuple[int, int], int] = {}  # newest place of a pair, by its second token
        self._before: list[int] = []  # by place since `_first`: the place of the same pair before, or -1
        self._single: dict[int, int] = {}  # newest place of a token before the last one

    def find(self, tokens: list[int], count: int) -> Match | None:
        """The next `count` tokens as after the longest match of a pair or more, the newest of several."""
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
        return Match(best, followers(tokens, where, count)) if best else None

    def find_single(self, tokens: list[int], count: int) -> Match | None:
        """As after the last token alone, where that stood before."""
        self._take(tokens)
        where = self._single.get(tokens[-1])
        return None if where is None else Match(1, followers(tokens, where, count))

    def _take(self, tokens: list[int]) -> None:
        for place in range(self._first + len(self._before), len(tokens)):
            pair = (tokens[place - 1], tokens[place]) if place > self._first else (-1, tokens[place])
            if place > self._first:
                self._single[tokens[place - 1]] = place - 1
            self._before.append(self._last.get(pair, -1))
            self._last[pair] = place

    def _earlier(self, place: int) -> int:
        return self._before[place - self._first]


def followers(tokens: list[int], where: int, count: int) -> list[int]:
    """The `count` tokens after this place. A text that repeats itself goes on with what was guessed."""
    period = len(tokens) - 1 - where
    return [tokens[where + 1 + i % period] for i in range(count)]
