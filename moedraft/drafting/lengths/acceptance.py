"""How likely a drafted token is to be accepted, by the drafter's own confidence in it."""

from __future__ import annotations

import math
from collections import deque

import numpy as np

from moedraft.drafting.lengths.growth import Floats

REFIT_EVERY = 100  # verified tokens between two fits of the curve
RIDGE = 5.0  # how many tokens' worth of belief holds the curve at the draft's own confidence
BELIEF = 10.0  # how many of its own tokens a row needs to count as much as its expert's mean
FADE = 0.98  # what is left of a row's tokens after each round: texts change, nobody is given up for good
SLOWEST = 0.005  # weight of one more token in an expert's mean
INHERITED = 50  # verified tokens of an expert's version before that count where a new one drafts


class AcceptanceModel:
    """P(accepted) = sigmoid(w · logit(confidence) + b), for one expert. Confidence: its top-1 mass."""

    def __init__(self) -> None:
        self.w, self.b = 1.0, 0.0
        self.mean = 0.6  # running acceptance rate over its requests, for the token not drafted yet
        self.seen: deque[tuple[float, float]] = deque(maxlen=1000)  # (logit(confidence), accepted)
        self._counted, self._pending = 10, 0  # the first mean counts for so many tokens
        self._version: int | None = None

    def predict(self, confidence: float) -> float:
        return _sigmoid(self.w * _logit(confidence) + self.b)

    def observe(self, confidences: list[float], accepted: int, version: int = 0) -> None:
        """`confidences` of the drafted tokens, of which the first `accepted` were taken.

        Only verified positions count: those accepted and the first one refused. version: of the expert's
        adapter. Of what was seen of another one little is kept.
        """
        if version != self._version:
            self._version, self._counted = version, min(self._counted, INHERITED)
            self.seen = deque([*self.seen][-INHERITED:], self.seen.maxlen)
        for index, confidence in enumerate(confidences[: accepted + 1]):
            hit = float(index < accepted)
            self.seen.append((_logit(confidence), hit))
            self._counted, self._pending = self._counted + 1, self._pending + 1
            self.mean += max(SLOWEST, 1 / self._counted) * (hit - self.mean)
        if self._pending >= REFIT_EVERY:
            self._pending = 0
            self._refit()

    def _refit(self) -> None:
        """The best of: the curve as it is, a Newton step or a part of one, and a flat curve.

        A draft that is sure of itself and wrong makes the likelihood so flat that a whole step overshoots.
        """
        x, hit = np.array(self.seen).T
        guess = _sigmoids(self.w * x + self.b)
        curve, miss = guess * (1 - guess), guess - hit
        slope = np.array([miss @ x + RIDGE * (self.w - 1), miss.sum() + RIDGE * self.b])
        bend = np.array([[curve @ (x * x), curve @ x], [curve @ x, curve.sum()]]) + RIDGE * np.eye(2)
        now, step = np.array([self.w, self.b]), np.linalg.solve(bend, slope)
        curves = [now, np.array([0.0, _logit(hit.mean())]), *(now - step / 2**i for i in range(8))]
        rising = (np.maximum(one, (0.0, -np.inf)) for one in curves)
        self.w, self.b = min(rising, key=lambda one: _misfit(x, hit, *one)).tolist()


class RowAcceptance:
    """How often the draft model's tokens were accepted in one row lately.

    Requests of the same expert differ: some texts are easy to guess, others are not.
    """

    def __init__(self) -> None:
        self._hits = self._tokens = 0.0

    def observe(self, drafted: int, accepted: int) -> None:
        """One round, in which the model drafted so many tokens for this row, or none."""
        self._hits = FADE * self._hits + accepted
        self._tokens = FADE * self._tokens + min(drafted, accepted + 1)

    def mean(self, prior: float) -> float:
        """prior: the acceptance rate of the row's expert, which it is while nothing else is known."""
        return (BELIEF * prior + self._hits) / (BELIEF + self._tokens)


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-max(-30.0, min(30.0, x))))


def _sigmoids(x: Floats) -> Floats:
    return 1 / (1 + np.exp(-np.clip(x, -30.0, 30.0)))


def _misfit(x: Floats, hit: Floats, w: float, b: float) -> float:
    """What `hit` says against sigmoid(w · x + b): negative log-likelihood, with a ridge towards (1, 0)."""
    away = np.where(hit > 0, -1.0, 1.0) * (w * x + b)
    return float(np.logaddexp(0.0, away).sum() + RIDGE / 2 * ((w - 1) ** 2 + b**2))


def _logit(probability: float) -> float:
    p = min(max(probability, 1e-4), 1 - 1e-4)
    return math.log(p / (1 - p))
