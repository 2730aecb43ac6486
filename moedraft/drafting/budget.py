"""How many tokens to draft: as long as the next one pays for itself, by measured costs and survival.

A draft position's chance to be accepted is estimated from the draft's own confidence, per expert, and
refitted from what verification shows. Rules look at logits of the prefix and never at which token was
drawn, else sampling would not be exact any more.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import median

REFIT_EVERY = 100
RIDGE = 5.0


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
            self._newton()

    def _newton(self) -> None:
        """One Newton step on the log-likelihood with a ridge towards (1, 0); a falling curve is refused."""
        gw, gb = RIDGE * (self.w - 1), RIDGE * self.b
        hww, hwb, hbb = RIDGE, 0.0, RIDGE
        for x, hit in self.seen:
            guess = _sigmoid(self.w * x + self.b)
            curve = guess * (1 - guess)
            gw += (guess - hit) * x
            gb += guess - hit
            hww += curve * x * x
            hwb += curve * x
            hbb += curve
        determinant = hww * hbb - hwb * hwb
        w = self.w - (hbb * gw - hwb * gb) / determinant
        b = self.b - (hww * gb - hwb * gw) / determinant
        if w >= 0 and math.isfinite(w) and math.isfinite(b):
            self.w, self.b = min(w, 5.0), max(-5.0, min(b, 5.0))


class CostTable:
    """Milliseconds of a forward by (rows, width), the median of the last few; a line fills the gaps."""

    def __init__(self) -> None:
        self.samples: dict[tuple[int, int], deque[float]] = {}

    def observe(self, rows: int, width: int, ms: float) -> None:
        self.samples.setdefault((rows, width), deque(maxlen=9)).append(ms)

    def predict(self, rows: int, width: int) -> float | None:
        """Never falls with width; None before anything was measured."""
        if not self.samples:
            return None
        known = {key: median(values) for key, values in self.samples.items()}
        below = [ms for (r, w), ms in known.items() if r == rows and w <= width]
        here = known[rows, width] if (rows, width) in known else self._line(known, rows * width)
        return max([here, *below])

    @staticmethod
    def _line(known: dict[tuple[int, int], float], tokens: int) -> float:
        points = [(float(r * w), ms) for (r, w), ms in known.items()]
        mean_x = sum(x for x, _ in points) / len(points)
        mean_y = sum(y for _, y in points) / len(points)
        spread = sum((x - mean_x) ** 2 for x, _ in points)
        # With a single point: a token more costs 5 % of the forward, about what a small model on a CPU shows.
        slope = 0.05 * mean_y / mean_x
        if spread:
            slope = max(0.0, sum((x - mean_x) * (y - mean_y) for x, y in points) / spread)
        return max(mean_y + slope * (tokens - mean_x), 0.1 * mean_y)


class Budget:
    """Decides, token by token, whether the batch drafts on. Times are in milliseconds."""

    EXPLORE = 16  # every so many steps without drafting one drafts all the same, to notice better times

    def __init__(self, longest: int, first_guess: int) -> None:
        self.longest = longest
        self.first_guess = first_guess
        self.draft_cost = CostTable()
        self.verify_cost = CostTable()
        self.acceptance: dict[str, AcceptanceModel] = {}
        self._idle = 0

    def model(self, expert: str) -> AcceptanceModel:
        return self.acceptance.setdefault(expert, AcceptanceModel())

    def start(self, experts: list[str]) -> bool:
        """Whether this step drafts at all: the best length must beat plain decoding."""
        rows = len(experts)
        if not rows or not self.longest:
            return False
        rates = [self._rate(experts, k) for k in range(self.longest + 1)]
        plain, best = rates[0], max(rates[1:], key=lambda rate: rate or 0.0)
        if plain is None or best is None or best > plain or self._idle >= self.EXPLORE:
            self._idle = 0
            return True
        self._idle += 1
        return False

    def _rate(self, experts: list[str], k: int) -> float | None:
        """Expected tokens per millisecond when every row drafts k, by the mean acceptance alone."""
        rows = len(experts)
        verify = self.verify_cost.predict(rows, k + 1)
        draft = self.draft_cost.predict(rows, 1) if k else 0.0
        if verify is None or draft is None:
            return None
        tokens = 0.0
        for expert in experts:
            a = min(self.model(expert).mean, 0.99)
            tokens += (1 - a ** (k + 1)) / (1 - a)
        return tokens / (verify + k * draft)

    def another(self, experts: list[str], survival: list[float], expected: float, drafted: int) -> bool:
        """Whether to draft token `drafted + 1`.

        survival: per row, the chance that all its tokens so far are accepted. expected: tokens the step
        emits as it stands, Σ over rows of 1 + Σ survival. Goes on while the next token's gain per
        millisecond is at least the step's own average.
        """
        if drafted >= self.longest:
            return False
        rows = len(experts)
        draft = self.draft_cost.predict(rows, 1)
        now, then = (self.verify_cost.predict(rows, drafted + extra) for extra in (1, 2))
        if draft is None or now is None or then is None:
            return drafted < self.first_guess
        gain = sum(s * self.model(e).mean for s, e in zip(survival, experts, strict=True))
        return gain / (draft + then - now) >= expected / (drafted * draft + now)


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-max(-30.0, min(30.0, x))))


def _logit(probability: float) -> float:
    p = min(max(probability, 1e-4), 1 - 1e-4)
    return math.log(p / (1 - p))
