"""How the time of a target's forward grows with the tokens that it reads, by measurement.

It hardly ever grows evenly. Processors multiply several rows in the time of one: with weights in half
precision FBGEMM takes up to four rows of SmolLM2 as fast as one, five and six 1.15 times as long, seven 1.5
times. So on such a processor three guesses cost nothing, and a seventh token as much as all before it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Growth:
    """The times of forwards over so many tokens, of all rows together; between and beyond them, lines."""

    tokens: Floats  # rising, two numbers at least
    ms: Floats  # never falling
    longest: int  # the most tokens that are drafted for a row

    @classmethod
    def through(cls, measured: Mapping[int, float], longest: int) -> Growth | None:
        """measured: milliseconds by number of tokens. None if that is too little to tell anything."""
        if len(measured) < 2 or not longest:
            return None
        tokens = np.array(sorted(measured), dtype=float)
        ms = np.maximum.accumulate([measured[int(count)] for count in tokens])
        return cls(tokens, ms, longest)

    def at(self, tokens: ArrayLike) -> Floats:
        """Milliseconds of a forward over so many tokens."""
        asked = np.asarray(tokens, dtype=float)
        slope = (self.ms[-1] - self.ms[-2]) / (self.tokens[-1] - self.tokens[-2])
        beyond = np.maximum(asked - self.tokens[-1], 0.0) * slope
        return np.asarray(np.interp(asked, self.tokens, self.ms) + beyond)

    def stretched(self, rows: int, verified: ArrayLike) -> Floats:
        """Draft tokens of so many rows, per row, on a scale on which each costs as much as any other.

        The longest draft of each row keeps its number; a token that costs little counts for little.
        """
        plain, most = self.at(rows), self.at(rows * (1 + self.longest))
        drafted = np.asarray(verified, dtype=float)
        if most <= plain:
            return drafted / rows
        return self.longest * (self.at(rows + drafted) - plain) / (most - plain)

    def slope(self, rows: int) -> float:
        """What one more token on that scale costs, for each of so many rows, in plain forwards of them."""
        plain, most = float(self.at(rows)), float(self.at(rows * (1 + self.longest)))
        return (most - plain) / (self.longest * plain)
