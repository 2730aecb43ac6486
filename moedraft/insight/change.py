"""How much a figure changed between an expert's first requests and its last, and how sure that is.

Both figures are ratios of sums over requests: tokens over steps of the target, first guesses that are right
over those that were looked at. Requests differ much from each other, so a change has its 95 % interval.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from moedraft.storage.requests import ExpertStats, Window

LEAST = 5  # requests in each of the two windows; with fewer no change is given
NORMAL = 1.959964  # the normal distribution's quantile of 97.5 %

Pair = tuple[float, float]  # of one request: what is counted, and out of how much


@dataclass(frozen=True)
class Change:
    """The same figure before and after, and the 95 % interval of the difference, `low` to `high`."""

    before: float
    after: float
    low: float
    high: float

    @property
    def difference(self) -> float:
        return self.after - self.before

    @property
    def half_width(self) -> float:
        return (self.high - self.low) / 2

    @property
    def direction(self) -> int:
        """1: it rose, −1: it fell, 0: the interval holds 0, so that it may be chance."""
        return (self.low > 0) - (self.high < 0)


@dataclass(frozen=True)
class RatioEstimate:
    """A ratio of two sums, the variance of that ratio, and the degrees of freedom of the variance."""

    ratio: float
    variance: float
    freedom: int


def tokens_per_step(window: Window) -> float | None:
    """Tokens of these answers for each step of the target; None without a step."""
    return _ratio((one.tokens, one.steps) for one in window)


def first_step_share(window: Window) -> float | None:
    """The share of first guesses that are right in these requests; None where none was looked at."""
    return _ratio((one.right_first_guesses, one.first_guesses) for one in window)


def change_of_tokens_per_step(stats: ExpertStats) -> Change | None:
    """The change from the expert's first requests to its last; None while there are too few of either."""
    return _change(
        [(one.tokens, one.steps) for one in stats.first_window or ()],
        [(one.tokens, one.steps) for one in stats.recent_window],
    )


def change_of_first_step_share(stats: ExpertStats) -> Change | None:
    """The change from the expert's first requests to its last; None while there are too few of either."""
    return _change(
        [(one.right_first_guesses, one.first_guesses) for one in stats.first_window or ()],
        [(one.right_first_guesses, one.first_guesses) for one in stats.recent_window],
    )


def newest(stats: ExpertStats | None) -> Window:
    """The last requests of an expert; its first ones where it had no others yet."""
    return (stats.recent_window or stats.first_window or ()) if stats else ()


def _ratio(pairs: Iterable[Pair]) -> float | None:
    kept = list(pairs)
    whole = sum(y for _, y in kept)
    return sum(x for x, _ in kept) / whole if whole else None


def _change(first: list[Pair], last: list[Pair]) -> Change | None:
    before, after = estimate(first), estimate(last)
    if before is None or after is None:
        return None
    half = _half_width(before, after)
    difference = after.ratio - before.ratio
    return Change(before.ratio, after.ratio, difference - half, difference + half)


def estimate(pairs: list[Pair]) -> RatioEstimate | None:
    """Σx / Σy over requests (x, y), and its variance by linearisation (Cochran, Sampling Techniques, 6.4).

    Requests with y = 0 say nothing and are left out; None where fewer than LEAST are left.
    """
    kept = [(x, y) for x, y in pairs if y]
    if len(kept) < LEAST:
        return None
    count, whole = len(kept), sum(y for _, y in kept)
    ratio = sum(x for x, _ in kept) / whole
    squares = sum((x - ratio * y) ** 2 for x, y in kept)
    return RatioEstimate(ratio, count / (count - 1) * squares / whole**2, count - 1)


def _half_width(before: RatioEstimate, after: RatioEstimate) -> float:
    """Half of the interval of the difference of two independent estimates (Welch's test)."""
    variances = [(one.variance, one.freedom) for one in (before, after)]
    total = sum(variance for variance, _ in variances)
    if not total:
        return 0.0
    freedom = total**2 / sum(variance**2 / own for variance, own in variances)
    return student(freedom) * math.sqrt(total)


def student(freedom: float) -> float:
    """The 97.5 % quantile of Student's t, by its expansion in 1 / freedom (Abramowitz and Stegun, 26.7.5)."""
    z = NORMAL
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return sum(term / freedom**power for power, term in enumerate(terms))
