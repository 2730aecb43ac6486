"""What a round costs: measured, and by a line through what was measured. Times are in milliseconds."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from statistics import median_low as median  # of few: noise only ever adds

import numpy as np
from numpy.typing import ArrayLike

from moedraft.drafting.lengths.growth import Floats, Growth

Shape = tuple[int, float]  # steps of the draft model, draft tokens verified per row; (0, 0) is plain

PLAIN: Shape = (0, 0.0)
KEPT = 9
REFIT_EVERY = 8
FORGOTTEN = 400  # rounds of as many rows after which a shape's times are too old
AWAY = 8  # rounds of as many rows without a plain one, after which of those before only the last one counts
PAUSE = 64  # such rounds without the draft model after which what was timed of it counts for little
# In plain rounds: that the model drafts at all, each of its steps, each token verified per row. As measured
# with the embedded pair; a GPU has less of the last. Weighs as much as PRIOR_WEIGHT well-known shapes.
PRIOR = np.array([0.15, 0.12, 0.12])
PRIOR_WEIGHT = 0.5
SLIGHT = 0.02  # its weight where several rounds of each kind were timed on purpose, one kind after another

Point = tuple[list[float], float, float]  # features, cost beyond a plain round in plain rounds, weight


class RoundCosts:
    """What whole rounds cost, by their number of rows and their shape: draft steps and tokens verified.

    A round is everything between two steps: drafting, verifying, and the bookkeeping around them, which a
    model of forwards alone would miss. The cost of a shape is the median of its last few rounds, and a plane
    is fitted through these medians. A shape that was seen once is left out, because the first round of a kind
    is slow. Where the target's forward does not grow evenly with its tokens (`Growth`), they are counted by
    what they add to it.
    """

    def __init__(self, usual: Mapping[int, Floats] | None = None, growth: Growth | None = None) -> None:
        """usual: by number of rows, slopes that were measured before the first request.

        They count until rounds of real requests are timed, which have longer texts and other experts.
        growth: of the target's forward, measured before; without it, all verified tokens cost alike.
        """
        self.usual, self.growth = dict(usual or {}), growth
        self.samples: dict[int, dict[Shape, deque[float]]] = {}
        self._slopes: dict[int, Floats] = {}
        self._tables: dict[int, list[float]] = {}  # by rows, see `_table`
        self._rounds: dict[int, int] = {}  # by rows
        self._seen: dict[tuple[int, Shape], int] = {}  # the last round of a shape

    def observe(self, rows: int, steps: int, verified: int, ms: float) -> None:
        """verified: draft tokens, padding included where that costs as much."""
        shape = shape_of(rows, steps, verified)
        shapes = self.samples.setdefault(rows, {})
        now = self._rounds[rows] = self._rounds.get(rows, 0) + 1
        new = shape not in shapes
        if steps:
            self._resume(rows, now)
        elif shape == PLAIN and not new and now - self._seen[rows, PLAIN] > AWAY:
            shapes[PLAIN], new = deque([shapes[PLAIN][-1]], KEPT), True  # the machine may be faster now
        shapes.setdefault(shape, deque(maxlen=KEPT)).append(ms)
        self._seen[rows, shape] = now
        if new or now % REFIT_EVERY == 0:
            self._forget(rows, now - FORGOTTEN)
            self._slopes.pop(rows, None)

    def _resume(self, rows: int, now: int) -> None:
        """Drop what was timed of the draft model before a pause, but for the newest time of each shape.

        A single time has no weight in the fit, so the trial that begins now decides. Else one moment in which
        the machine was slow would outweigh several trials after it.
        """
        drafted = {shape: self._seen[rows, shape] for shape in self.samples[rows] if shape[0]}
        if drafted and now - max(drafted.values()) > PAUSE:
            for shape in drafted:
                self.samples[rows][shape] = deque([self.samples[rows][shape][-1]], KEPT)
            self._slopes.pop(rows, None)

    def _forget(self, rows: int, before: int) -> None:
        """Drop the shapes whose last round lies before `before`.

        Else one slow moment could rule out a draft length for ever.
        """
        for shape in [one for one in self.samples[rows] if self._seen[rows, one] < before]:
            del self.samples[rows][shape], self._seen[rows, shape]

    def measured(self, rows: int, steps: int, verified: int) -> float | None:
        """Median of the last such rounds; None where there was none."""
        values = self.samples.get(rows, {}).get(shape_of(rows, steps, verified))
        return median(values) if values else None

    def relative(self, rows: int, steps: ArrayLike, verified: ArrayLike) -> Floats:
        """The cost of a round of each of these shapes, in plain rounds of as many rows.

        A round with more tokens never costs less.
        """
        begin, step, wide = self.slopes(rows).tolist()
        drafting = np.asarray(steps, dtype=float)
        return np.asarray(1 + begin * (drafting > 0) + step * drafting + wide * self._each(rows, verified))

    def of(self, rows: int, steps: int, verified: int) -> float:
        """`relative` of a single shape."""
        begin, step, wide = self.slopes(rows).tolist()
        return float(1 + begin * (steps > 0) + step * steps + wide * self._one(rows, verified))

    def _one(self, rows: int, verified: int) -> float:
        """`_each` of a single number, from a table: a round asks for a dozen of them."""
        if self.growth is None:
            return verified / rows
        table = self._table(self.growth, rows)
        return table[verified] if verified < len(table) else float(self._each(rows, verified))

    def _table(self, growth: Growth, rows: int) -> list[float]:
        """`_each` of 0, 1, 2 … verified tokens, up to the longest drafts of all rows."""
        if rows not in self._tables:
            self._tables[rows] = (growth.table(rows) / PRIOR[2]).tolist()
        return self._tables[rows]

    def _each(self, rows: int, verified: ArrayLike) -> Floats:
        """Verified tokens per row; by growth, as many of the usual price as take as long."""
        asked = np.asarray(verified, dtype=float)
        if self.growth is None:
            return asked / rows
        table = self._table(self.growth, rows)
        beyond = np.maximum(asked - (len(table) - 1), 0.0) * (table[-1] / (len(table) - 1))
        return np.asarray(np.interp(asked, np.arange(len(table)), table) + beyond)

    def slopes(self, rows: int) -> Floats:
        """What drafting at all costs, a draft step, and one more verified token per row, in plain rounds.

        Where no round of so many rows was timed, rounds of other numbers of rows are used, if these are
        no further away than the numbers that were measured before the first request.
        """
        if rows not in self._slopes:
            nearest = min(self.usual, key=lambda known: _distance(known, rows), default=None)
            prior = PRIOR if nearest is None else self.usual[nearest]
            reach = math.inf if nearest is None else _distance(nearest, rows)
            near = [n for n in self.samples if _distance(n, rows) <= reach]
            others = _fit([point for n in near for point in self._points(n)], prior)
            self._slopes[rows] = _fit(self._points(rows), others)
        return self._slopes[rows]

    def _points(self, rows: int) -> list[Point]:
        """What was timed of so many rows, by shape."""
        shapes = self.samples.get(rows, {})
        if PLAIN not in shapes:
            return []
        plain = median(shapes[PLAIN])
        return [
            (
                [float(steps > 0), steps, float(self._each(rows, rows * each))],
                median(values) / plain - 1,
                (len(values) - 1) / (KEPT - 1),
            )
            for (steps, each), values in shapes.items()
            if each
        ]

    def calibrated(self) -> dict[int, Floats]:
        """`slopes` by number of rows, from these rows' own rounds, which were timed on purpose."""
        points = {rows: self._points(rows) for rows in self.samples}
        return {rows: _fit(found, PRIOR, SLIGHT) for rows, found in points.items() if found}


def shape_of(rows: int, steps: int, verified: int) -> Shape:
    """The shape under which a round is counted: its draft steps, and the tokens verified per row.

    The latter are rounded to halves, so that shapes are few and each is measured often.
    """
    return steps, max(0.5, round(2 * verified / rows) / 2) if verified else 0.0


def _distance(a: int, b: int) -> float:
    """How far apart two numbers of rows are, as the logarithm of their quotient."""
    return abs(math.log(a / b))


def _fit(points: list[Point], prior: Floats, weight: float = PRIOR_WEIGHT) -> Floats:
    """Least squares with a ridge towards `prior` of this weight; no slope is negative."""
    if not points:
        return prior
    features, costs, weights = (np.array(column) for column in zip(*points, strict=True))
    # A feature's ridge grows with the feature, so that the prior weighs alike for all.
    ridge = weight * np.diag([1.0, 4.0, 9.0])
    weighted = features.T * weights
    left, right = weighted @ features + ridge, weighted @ costs + ridge @ prior
    solved, free = np.zeros(len(prior)), np.arange(len(prior))
    while len(free):  # a slope that would be negative is zero, and the others are those without it
        found = np.linalg.solve(left[np.ix_(free, free)], right[free])
        if (found >= 0).all():
            solved[free] = found
            break
        free = np.delete(free, found.argmin())
    return solved
