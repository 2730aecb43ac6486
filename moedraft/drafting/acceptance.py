"""How likely a drafted token is to be accepted, by the drafter's own confidence in it."""

from __future__ import annotations

import math
from collections import deque

import numpy as np

from moedraft.drafting.costs import Floats

REFIT_EVERY = 100  # verified tokens between two fits of the curve
RIDGE = 5.0  # how many tokens' worth of belief holds the curve at the draft's own confidence


class AcceptanceModel:
    """P(accepted) = sigmoid(w · logit(confidence) + b), for one expert. Confidence: its top-1 mass."""

    def __init__(self) -> None:
        self.w, self.b = 1.0, 0.0
        self.mean = 0.6  # running acceptance rate, for the token not drafted yet
        self.seen: deque[tuple[float, float]] = deque(maxlen=1000)  # (logit(confidence), accepted)
        self._pending = 0

    def predict(self, confidence: float) -> float:
        return _sigmoid(self.w * _logit(confidence) + self.b)

    def observe(self, confidences: list[float], accepted: int) -> None:
        """`confidences` of the drafted tokens, of which the first `accepted` were taken.

        Only verified positions count: those accepted and the first one refused.
        """
        for index, confidence in enumerate(confidences[: accepted + 1]):
            hit = float(index < accepted)
            self.seen.append((_logit(confidence), hit))
            self.mean += 0.02 * (hit - self.mean)
            self._pending += 1
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
