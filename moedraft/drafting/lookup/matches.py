"""What a search in a text found, and how often such finds turn out right."""

from __future__ import annotations

from dataclasses import dataclass

SHORTEST, LONGEST = 2, 8  # tokens that agree in a usual match, and beyond which a longer one is no better


@dataclass(frozen=True)
class Match:
    """A place in a text that ends like the row's own text does now."""

    length: int  # the last tokens of the row's text that are the same there
    tokens: list[int]  # those that followed there
    past: bool = False  # whether it stands in an earlier answer, not in the row's own text


class MatchAcceptance:
    """P(accepted) by how many tokens before agree; the longer, the surer."""

    def __init__(self, doubt: float = 1.0) -> None:
        """doubt: before anything is seen, the chance is length / (length + doubt) where `length` agree."""
        self.rates = [length / (length + doubt) for length in range(LONGEST + 1)]
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
