"""How the time of a target's forward grows with the tokens that it reads, by measurement.

It hardly ever grows evenly, since processors multiply several rows in the time of one. With weights in half
precision FBGEMM takes up to four tokens of SmolLM2 about as fast as one; the seventh costs half a forward.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
EVEN = 0.1  # a forward that takes at most so much longer for the longest drafts is taken to grow evenly


@dataclass(frozen=True)
class Growth:
    """The times of forwards over so many tokens, of all rows together; between and beyond them, lines."""

    tokens: Floats  # rising, two numbers at least
    ms: Floats  # never falling
    longest: int  # the most tokens that are drafted for a row

    @classmethod
    def through(cls, measured: Mapping[int, float], longest: int) -> Growth | None:
        """measured: milliseconds by number of tokens. None if that is too little to tell anything.

        Noise only ever adds, so a number of tokens takes at most what a larger one took.
        """
        if len(measured) < 2 or not longest:
            return None
        tokens = np.array(sorted(measured), dtype=float)
        times = np.array([measured[int(count)] for count in tokens])
        return cls(tokens, np.minimum.accumulate(times[::-1])[::-1], longest)

    def at(self, tokens: ArrayLike) -> Floats:
        """Milliseconds of a forward over so many tokens."""
        asked = np.asarray(tokens, dtype=float)
        slope = (self.ms[-1] - self.ms[-2]) / (self.tokens[-1] - self.tokens[-2])
        beyond = np.maximum(asked - self.tokens[-1], 0.0) * slope
        return np.asarray(np.interp(asked, self.tokens, self.ms) + beyond)

    def more(self, rows: int, verified: ArrayLike) -> Floats:
        """How much longer a forward takes that also verifies so many tokens, in plain ones of the rows."""
        plain = self.at(rows)
        return np.asarray((self.at(rows + np.asarray(verified, dtype=float)) - plain) / plain)

    def table(self, rows: int) -> Floats:
        """`more` of 0, 1, 2 … verified tokens, up to the longest drafts of all rows.

        A straight line where the forward hardly grows, so that its steps may be noise.
        """
        verified = np.arange(rows * self.longest + 1)
        found = self.more(rows, verified)
        return found if found[-1] >= EVEN else found[-1] * verified / verified[-1]
