"""How much of a growing text may be the beginning of a stop string, without reading the text again."""

from __future__ import annotations


class Beginning:
    """Follows one string through a growing text (the automaton of Knuth, Morris and Pratt).

    `length` is how many of the text's last characters are the beginning of the string; the whole string is
    never counted. Each character costs the same on average, however long the string is.
    """

    def __init__(self, string: str) -> None:
        self.length = 0
        self._string = string
        self._shorter = _borders(string)

    def read(self, text: str) -> None:
        """Follow the string through `text`, which is appended to the text read so far."""
        for character in text:
            self.length = self._next(character)

    def _next(self, character: str) -> int:
        length = self.length
        while length and self._string[length] != character:
            length = self._shorter[length - 1]
        length += self._string[length] == character
        return length if length < len(self._string) else self._shorter[-1]


def _borders(string: str) -> list[int]:
    """For each beginning of `string`, the length of the longest shorter beginning that also ends it."""
    borders = [0] * len(string)
    for end in range(1, len(string)):
        length = borders[end - 1]
        while length and string[end] != string[length]:
            length = borders[length - 1]
        borders[end] = length + (string[end] == string[length])
    return borders
