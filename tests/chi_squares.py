"""χ² tests of sampled answers against the law that they should follow."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

Answer = tuple[int, ...]


def chi_square(counts: Counter[Answer], probabilities: dict[Answer, float], runs: int) -> float:
    """p-value (Wilson-Hilferty) over cells of at least 5 expected; the rest is pooled."""
    statistic, cells, rest_seen, rest_expected = 0.0, 0, runs, float(runs)
    for key, p in probabilities.items():
        if p * runs >= 5:
            statistic += (counts[key] - p * runs) ** 2 / (p * runs)
            cells += 1
            rest_seen -= counts[key]
            rest_expected -= p * runs
    if rest_expected >= 5:
        statistic += (rest_seen - rest_expected) ** 2 / rest_expected
        cells += 1
    elif rest_seen > 30 + 10 * rest_expected:
        return 0.0
    df = cells - 1
    if df < 1:
        return 1.0
    z = ((statistic / df) ** (1 / 3) - (1 - 2 / (9 * df))) / math.sqrt(2 / (9 * df))
    return 0.5 * math.erfc(z / math.sqrt(2))


def p_values(answers: list[Answer], truth: dict[Answer, float]) -> list[float]:
    """One p-value per position, one per neighbouring pair, one for whole answers; all are equally long."""
    length = len(answers[0])
    cuts: list[Callable[[Answer], Answer]] = [lambda a, i=i: a[i : i + 1] for i in range(length)]
    cuts += [lambda a, i=i: a[i : i + 2] for i in range(length - 1)] + [lambda a: a]
    result = []
    for cut in cuts:
        masses: Counter = Counter()
        for answer, p in truth.items():
            masses[cut(answer)] += p
        result.append(chi_square(Counter(map(cut, answers)), masses, len(answers)))
    return result
