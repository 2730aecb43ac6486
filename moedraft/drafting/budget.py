"""How many tokens to draft: as long as the next one pays for itself, by measured costs and survival.

A draft position's chance to be accepted is estimated from the draft's own confidence, per expert, and
refitted from what verification shows. Rules look at logits of the prefix and never at which token was
drawn, else sampling would not be exact any more.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import fmean, median

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


class RoundCosts:
    """Milliseconds of whole rounds, by the number of rows and of drafted tokens.

    A round is everything between two steps: drafting, verifying, and the bookkeeping around them, which a
    model of forwards alone would miss. Medians of the last few; between and beyond what was measured, a line.
    """

    KEPT = 9
    STEP = 0.15  # the least that a draft token more costs, in plain rounds, before two lengths were measured

    def __init__(self) -> None:
        self.samples: dict[int, dict[int, deque[float]]] = {}

    def observe(self, rows: int, drafted: int, ms: float) -> None:
        lengths = self.samples.setdefault(rows, {})
        lengths.setdefault(drafted, deque(maxlen=self.KEPT)).append(ms)

    def predict(self, rows: int, drafted: int) -> float | None:
        """None where nothing near was measured. Never falls with the number of drafted tokens."""
        known = {k: median(values) for k, values in self.samples.get(rows, {}).items()}
        if drafted == 0 or not any(known):
            return known.get(0) if drafted == 0 else None
        lengths = {k: ms for k, ms in known.items() if k}
        at, base = fmean(lengths), fmean(lengths.values())
        spread = sum((k - at) ** 2 for k in lengths)
        plain = known.get(0, base)
        slope = max(self.STEP * plain, (base - plain) / at)
        if spread:
            slope = max(0.0, sum((k - at) * (ms - base) for k, ms in lengths.items()) / spread)
        return max(base + slope * (drafted - at), 0.1 * base)


class Budget:
    """Decides, token by token, whether the batch drafts on. Times are in milliseconds."""

    EXPLORE = 24  # after so many plain rounds in a row one drafts all the same, to notice better times
    PATIENCE = 16  # times as many at most, where it was in vain again and again
    COMPARE = 64  # every so many drafting rounds one is plain, to know what drafting is worth
    SETTLED = 8  # drafting rounds before the first of those

    def __init__(self, longest: int, first_guess: int) -> None:
        self.longest = longest
        self.first_guess = first_guess
        self.costs = RoundCosts()
        self.acceptance: dict[str, AcceptanceModel] = {}
        self._rounds: deque[tuple[int, int, int]] = deque(maxlen=256)  # (rows, drafted, tokens)
        self._idle, self._patience = 0, self.EXPLORE
        self._busy: dict[int, int] = {}  # drafting rounds since the last plain one, by rows

    def model(self, expert: str) -> AcceptanceModel:
        return self.acceptance.setdefault(expert, AcceptanceModel())

    def observe(self, rows: int, drafted: int, tokens: int, ms: float) -> None:
        """A whole round: rows in the batch, draft length (0: plain), tokens emitted by all rows together."""
        self.costs.observe(rows, drafted, ms)
        self._busy[rows] = self._busy.get(rows, 0) + 1 if drafted else 0
        self._rounds.append((rows, drafted, tokens))

    @property
    def speedup(self) -> float | None:
        """Against plain decoding: what the last rounds would have taken plainly over what they took.

        Plain times come from plain rounds of as many rows; None until there was one. Both are typical
        times (medians), so that a round in which a request came or went counts for nothing.
        """
        plainly = spent = 0.0
        for rows, drafted, tokens in list(self._rounds):
            plain, ms = self.costs.predict(rows, 0), self.costs.predict(rows, drafted)
            if plain is not None and ms is not None:
                plainly, spent = plainly + plain * tokens / rows, spent + ms
        return plainly / spent if spent else None

    def start(self, experts: list[str], rows: int) -> bool:
        """Whether this round of `rows` drafts for `experts`: the best length must beat plain decoding."""
        if not experts or not self.longest:
            return False
        busy = self._busy.get(rows, 0)
        if busy >= (self.COMPARE if self.costs.predict(rows, 0) is not None else self.SETTLED):
            return False
        rates = [self._rate(experts, rows, k) for k in range(self.longest + 1)]
        plain, best = rates[0], max(rates[1:], key=lambda rate: rate or 0.0)
        if plain is None or best is None or best > plain:
            self._idle, self._patience = 0, self.EXPLORE
            return True
        self._idle += 1
        if self._idle <= self._patience:
            return False
        self._idle, self._patience = 0, min(2 * self._patience, self.PATIENCE * self.EXPLORE)
        return True

    def _rate(self, experts: list[str], rows: int, k: int) -> float | None:
        """Expected tokens per millisecond when all `experts` draft k, by their mean acceptance alone."""
        ms = self.costs.predict(rows, k)
        if ms is None:
            return None
        tokens = float(rows - len(experts))
        for expert in experts:
            a = min(self.model(expert).mean, 0.99)
            tokens += (1 - a ** (k + 1)) / (1 - a)
        return tokens / ms

    def another(
        self, experts: list[str], survival: list[float], expected: float, drafted: int, rows: int
    ) -> bool:
        """Whether to draft token `drafted + 1` for `experts`, in a batch of `rows`.

        survival: per expert's row, the chance that all its tokens so far are accepted. expected: tokens the
        round emits as it stands, Σ over rows of 1 + Σ survival. Goes on while the next token's gain per
        millisecond is at least the round's own average.
        """
        if drafted >= self.longest:
            return False
        now, then = (self.costs.predict(rows, drafted + extra) for extra in (0, 1))
        if now is None or then is None:
            return drafted < self.first_guess
        gain = sum(s * self.model(e).mean for s, e in zip(survival, experts, strict=True))
        return gain * now >= expected * (then - now)


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-max(-30.0, min(30.0, x))))


def _logit(probability: float) -> float:
    p = min(max(probability, 1e-4), 1 - 1e-4)
    return math.log(p / (1 - p))
