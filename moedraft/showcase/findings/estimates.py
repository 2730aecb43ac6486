"""Figures with the interval in which they probably lie, from a few measured prompts. Knows no model.

The intervals are a bootstrap's over prompts, widened as Student's t is wider than the normal distribution: of
six prompts alone a bootstrap's is a third too narrow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from scipy.special import stdtrit

DRAWS = 4000  # bootstrap samples
TAIL = 2.5  # per cent of them on either side that the interval leaves out

Counts = Sequence[tuple[float, float]]  # by prompt: what is counted, and out of how much


@dataclass(frozen=True)
class Estimate:
    """A figure and its 95 % interval over prompts."""

    value: float
    low: float
    high: float

    def __rmul__(self, factor: float) -> Estimate:
        return Estimate(factor * self.value, factor * self.low, factor * self.high)


@dataclass(frozen=True)
class PairedChange:
    """A figure before and after, of the same prompts. The interval of the difference is paired."""

    before: Estimate
    after: Estimate
    difference: Estimate
    has_interval: bool = True  # else they are of too few prompts, and the figures' ends are the figures

    @property
    def verdict(self) -> str:
        """`better` or `worse` where the whole interval says so, else `open`."""
        if not self.has_interval or self.difference.low <= 0 <= self.difference.high:
            return "open"
        return "better" if self.difference.low > 0 else "worse"


def ratio(counts: Counts) -> Estimate:
    """Σ first / Σ second over all prompts, such as tokens per step."""
    table = np.asarray(counts, dtype=float).reshape(-1, 2)
    return _estimate(float(_ratios(table.sum(0))), _ratios(_draws(len(table)) @ table), len(table))


def change(before: Counts, after: Counts, fewest: int = 0) -> PairedChange:
    """The ratio of the same prompts before and after; no interval for less than `fewest` prompts."""
    tables = [np.asarray(counts, dtype=float).reshape(-1, 2) for counts in (before, after)]
    prompts = len(tables[0])
    whole = [float(_ratios(table.sum(0))) for table in tables]
    drawn = [_ratios(_draws(prompts) @ table) for table in tables]
    figures = [(whole[0], drawn[0]), (whole[1], drawn[1]), (whole[1] - whole[0], drawn[1] - drawn[0])]
    few = prompts < fewest
    made = [Estimate(one, one, one) if few else _estimate(one, some, prompts) for one, some in figures]
    return PairedChange(made[0], made[1], made[2], has_interval=not few)


def quotient(above: Counts, below: Counts) -> Estimate:
    """One ratio over another of the same prompts, such as a speed-up."""
    tables = [np.asarray(counts, dtype=float).reshape(-1, 2) for counts in (above, below)]
    prompts = len(tables[0])
    whole = [_ratios(table.sum(0)) for table in tables]
    drawn = [_ratios(_draws(prompts) @ table) for table in tables]
    return _estimate(float(whole[0] / whole[1]), drawn[0] / drawn[1], prompts)


@lru_cache(maxsize=4)
def _draws(prompts: int) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    """How often each bootstrap sample has each prompt, [DRAWS, prompts]; always the same ones."""
    picks = np.random.default_rng(0).integers(0, prompts, (DRAWS, prompts))
    cells = prompts * np.arange(DRAWS)[:, None] + picks
    return np.bincount(cells.ravel(), minlength=DRAWS * prompts).reshape(DRAWS, prompts).astype(float)


def _ratios(sums: np.ndarray) -> np.ndarray:
    """[…, 2] → […]"""
    ratios: np.ndarray = sums[..., 0] / np.maximum(sums[..., 1], 1e-9)
    return ratios


def _estimate(value: float, drawn: np.ndarray, prompts: int) -> Estimate:
    """The interval of a bootstrap over so many prompts, widened for their small number."""
    free = max(prompts - 1, 1)  # a single prompt has no interval to be widened
    student, normal = stdtrit([free, np.inf], 1 - TAIL / 100)
    wider = student / normal * (prompts / free) ** 0.5
    low, high = (value + wider * (end - value) for end in np.percentile(drawn, [TAIL, 100 - TAIL]))
    return Estimate(float(value), float(low), float(high))
