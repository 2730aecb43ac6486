"""What is measured of adapters on records: right guesses, and the probability that the right tokens had.

From right guesses follows the number of tokens that one step of the target is expected to give at the draft
length in use: 1 + a1 + a1·a2 + …, where a_j is the share of drafts whose token number j is accepted when
those before it were. Of sampled answers both are how likely drawn guesses are accepted.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Counts = NDArray[np.float64]  # [records, depth, 2]: hits and tries of the draft's tokens number 1 … depth
Chances = NDArray[np.float64]  # [records, 2]: what first guesses gave the right token, summed; guesses

FEW = 4  # records; with fewer the training objective is measured too, and decides


@dataclass(frozen=True)
class Measured:
    """Figures of one set of adapters on some records."""

    counts: Counts
    loss: float | None = None  # the training objective on them, nats; None: not measured
    chances: Chances | None = None

    @property
    def records(self) -> int:
        return len(self.counts)


def expected_tokens(sums: NDArray[np.float64]) -> NDArray[np.float64]:
    """Hits and tries [..., depth, 2] → tokens per target step [...]."""
    tries = sums[..., 1]
    rates = np.divide(sums[..., 0], tries, out=np.zeros_like(tries), where=tries > 0)
    return np.asarray(1 + rates.cumprod(-1).sum(-1))


def joined(parts: list[Measured]) -> Measured:
    """Join the figures of several sets of records; the loss is the mean over all records."""
    losses = [one.loss * one.records for one in parts if one.loss is not None]
    counts = np.concatenate([one.counts for one in parts]) if parts else np.zeros((0, 1, 2))
    known = sum(one.records for one in parts if one.loss is not None)
    chances = [one.chances for one in parts if one.chances is not None]
    together = np.concatenate(chances) if parts and len(chances) == len(parts) else None
    return Measured(counts, sum(losses) / known if known else None, together)
