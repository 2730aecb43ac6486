"""What followed the same words in earlier answers of the domain, or of all domains.

Answers to one kind of question resemble each other. The newest of them are kept as they are and searched for
the last tokens of a row's text. So an answer helps the next one as soon as it ends, without any training.
Searching earlier answers is known from REST (He et al. 2023, arXiv 2311.08252) and SuffixDecoding (Oliaro et
al. 2024, arXiv 2411.04975), which also leaves it to a draft model where it finds too little. Here each domain
has a store, and there is one of all domains.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

from moedraft.core import SHARED
from moedraft.drafting.lookup.matches import LONGEST, SHORTEST, Match

CANDIDATES = 8  # places that are compared, newest first; more bring 1 % and take as many times the time
Context = int | tuple[int, int]  # a token, or two neighbours

MARK = -1  # between two answers


class AnswerIndex:
    """Answers one after another, and where each token and each pair of neighbours stood in them."""

    def __init__(self) -> None:
        self.tokens = array("i", [MARK])
        self.known = set[int]()  # hashes of the answers
        self._last: dict[Context, int] = {}  # newest place, of a pair by its second token
        self._before_single, self._before_pair = array("i", [-1]), array("i", [-1])

    def add(self, answer: Sequence[int]) -> None:
        self.known.add(hash(tuple(answer)))
        for token in answer:
            before, place = self.tokens[-1], len(self.tokens)
            self.tokens.append(token)
            self._before_single.append(self._last.get(token, -1))
            self._before_pair.append(self._last.get((before, token), -1))
            self._last[token] = self._last[before, token] = place
        self.tokens.append(MARK)
        self._before_single.append(-1)
        self._before_pair.append(-1)

    def places(self, context: Context) -> Iterator[int]:
        """Where these tokens end, newest first."""
        before = self._before_single if isinstance(context, int) else self._before_pair
        place = self._last.get(context, -1)
        while place >= 0:
            yield place
            place = before[place]

    def agreeing(self, place: int, text: list[int]) -> int:
        """How many of the last tokens of `text` are those that end at `place`; LONGEST at most."""
        length, most = 1, min(LONGEST, len(text))
        while length < most and self.tokens[place - length] == text[-1 - length]:
            length += 1
        return length

    def following(self, place: int, count: int) -> list[int]:
        """At most `count` tokens after `place`, to the end of that answer."""
        after = self.tokens[place + 1 : place + 1 + count]
        return after[: after.index(MARK)].tolist() if MARK in after else after.tolist()


class NewestAnswers:
    """The newest answers of one domain: at least half of `most` tokens where so many came, `most` at most."""

    def __init__(self, most: int) -> None:
        self._half = most // 2
        self._indices = [AnswerIndex()]  # the newest first; the one before is dropped as a whole

    def add(self, answer: Sequence[int]) -> None:
        """One answer counts once: a prompt that comes again and again pushes no others out."""
        answer = answer[: self._half]
        if any(hash(tuple(answer)) in index.known for index in self._indices):
            return
        if len(self._indices[0].tokens) + len(answer) > self._half:
            self._indices = [AnswerIndex(), self._indices[0]]
        self._indices[0].add(answer)

    def find(self, text: list[int], count: int) -> Match | None:
        """What most often followed the longest match, and the newest of these."""
        contexts: list[Context] = [(text[-2], text[-1]), text[-1]] if len(text) > 1 else [text[-1]]
        for context in contexts:
            best, found = 0, dict[int, list[list[int]]]()  # by the next token, what followed
            for index, place in self._candidates(context):
                length = index.agreeing(place, text)
                if length >= best and (after := index.following(place, count)):
                    if length > best:
                        best, found = length, {}
                    found.setdefault(after[0], []).append(after)
            if found:
                return Match(best, max(found.values(), key=len)[0], past=True)
        return None

    def _candidates(self, context: Context) -> Iterator[tuple[AnswerIndex, int]]:
        left = CANDIDATES
        for index in self._indices:
            for place in index.places(context):
                if not left:
                    return
                left -= 1
                yield index, place


class PastAnswers:
    """The newest answers by domain, and those of all domains together. One thread calls all of it."""

    def __init__(self, most: int) -> None:
        """most: tokens that are kept of each domain, and of all together; 0: none."""
        self.most = most
        self._by_domain: dict[str, NewestAnswers] = {}

    def add(self, domain: str, answer: Sequence[int], *, common: bool = True) -> None:
        """common: whether it is kept among those of all domains too."""
        if not self.most or not len(answer):
            return
        for name in {domain, SHARED} if common else {domain}:
            if name not in self._by_domain:
                self._by_domain[name] = NewestAnswers(self.most)
            self._by_domain[name].add(answer)

    def clear(self) -> None:
        self._by_domain = {}

    def find(self, domain: str, text: list[int], count: int) -> Match | None:
        """At most `count` tokens to follow `text`: the domain's own answers first, then all others."""
        found: Match | None = None
        for name in dict.fromkeys((domain, SHARED)):
            if name in self._by_domain and (found is None or found.length < SHORTEST):
                other = self._by_domain[name].find(text, count)
                if other is not None and (found is None or other.length > found.length):
                    found = other
        return found
