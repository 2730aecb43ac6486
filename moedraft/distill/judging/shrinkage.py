"""Estimates the gain of each of several domains with few records, by partial pooling over all of them.

The normal model of Gelman et al., Bayesian Data Analysis, section 5.4: the true gain of a domain is drawn
from a normal distribution around the common gain, and what its records show from one around its true gain. So
a domain of few records is expected to gain about what all gain, and one of many what it shows itself. How far
the domains differ is not known: the estimates are averaged over it, each possibility weighed by how well it
explains the figures. This takes no decision.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from moedraft.distill.judging.gate import Z
from moedraft.distill.measuring.figures import Measured, expected_tokens

TYPICAL = 0.04  # variance of the gain by a single record, (tokens per step)², as found on small homes
WEIGHT = 4  # records that TYPICAL counts as in the pooled variance, and this one in each domain's
SCALE = 0.05  # tokens per step by which domains are expected to differ; by far more is possible
SPREADS = np.geomspace(0.002, 2.0, 40)  # standard deviations between domains, averaged over

Values = NDArray[np.float64]


@dataclass(frozen=True)
class GainEstimate:
    """The gain of one domain, in expected tokens per target step."""

    gain: float
    low: float  # it lies between these with a probability of 80 %
    high: float
    worse: float  # probability that it is below zero


def estimates(befores: Sequence[Measured], afters: Sequence[Measured]) -> list[GainEstimate]:
    """One per domain; without records it is the common gain. Without any record at all it is 0, unknown."""
    counts = np.array([one.records for one in befores])
    known = np.flatnonzero(counts)
    if not len(known):
        return [GainEstimate(0.0, 0.0, 0.0, 0.5) for _ in befores]
    gains = np.array([_gain(before, after) for before, after in zip(befores, afters, strict=True)])
    errors = _variances(befores, afters, counts)
    weights, common, doubt = _possibilities(gains[known], errors[known])
    return [
        _averaged(weights, *_posterior(gains[i], errors[i] if counts[i] else np.inf, common, doubt))
        for i in range(len(counts))
    ]


def _gain(before: Measured, after: Measured) -> float:
    if not before.records:
        return 0.0
    sums = [one.counts.sum(0).astype(float) for one in (before, after)]
    return float(expected_tokens(sums[1]) - expected_tokens(sums[0]))


def _variances(befores: Sequence[Measured], afters: Sequence[Measured], counts: NDArray[np.int64]) -> Values:
    """The variance of each domain's gain: its own, drawn towards the pooled one, and that towards TYPICAL."""
    own = np.array([_record_variance(before, after) for before, after in zip(befores, afters, strict=True)])
    free = np.maximum(counts - 1, 0)
    pooled = (free @ own + WEIGHT * TYPICAL) / (free.sum() + WEIGHT)
    return np.asarray((free * own + WEIGHT * pooled) / (free + WEIGHT) / np.maximum(counts, 1))


def _record_variance(before: Measured, after: Measured) -> float:
    """The variance of the gain of a single record: the jackknife's, times the number of records."""
    count = before.records
    if count < 2:
        return 0.0
    both = np.stack([before.counts, after.counts], axis=1).astype(float)  # [records, 2, depth, 2]
    without = expected_tokens(both.sum(0) - both)  # [records, 2]: each record left out
    gains = without[:, 1] - without[:, 0]
    return float((count - 1) * ((gains - gains.mean()) ** 2).sum())


def _possibilities(gains: Values, errors: Values) -> tuple[Values, Values, Values]:
    """For each of SPREADS: its probability, the common gain, and the variance of the common gain."""
    total = errors + SPREADS[:, None] ** 2  # [spreads, domains]
    doubt = 1 / (1 / total).sum(1)
    common = doubt * (gains / total).sum(1)
    off = (gains - common[:, None]) ** 2 / total
    likely = (np.log(doubt) - np.log(total).sum(1) - off.sum(1)) / 2
    prior = np.log(SPREADS) - np.log1p((SPREADS / SCALE) ** 2)  # half-Cauchy; the steps grow with the spread
    weights = np.exp(likely + prior - (likely + prior).max())
    return weights / weights.sum(), common, doubt


def _posterior(gain: float, error: float, common: Values, doubt: Values) -> tuple[Values, Values]:
    """Mean and variance of a domain's gain for each of SPREADS."""
    if np.isinf(error):
        return common, doubt + SPREADS**2
    lean = error / (error + SPREADS**2)  # weight of the common gain
    return lean * common + (1 - lean) * gain, (1 - lean) * error + lean**2 * doubt


def _averaged(weights: Values, means: Values, variances: Values) -> GainEstimate:
    gain = float(weights @ means)
    deviation = float(weights @ (variances + (means - gain) ** 2)) ** 0.5
    normal = NormalDist()
    below = np.array([normal.cdf(-number) for number in means / variances**0.5])
    return GainEstimate(gain, gain - Z * deviation, gain + Z * deviation, float(weights @ below))
