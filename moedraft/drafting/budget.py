"""How many tokens to draft, and from where: as long as the next one pays for itself, by measured costs.

A draft position's chance to be accepted is estimated from the draft's own confidence, per expert, and
refitted from what verification shows. Rules look at logits of the prefix and never at which token was
drawn, else sampling would not be exact any more.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from moedraft.drafting.costs import Floats, RoundCosts

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


@dataclass(frozen=True)
class Plan:
    """What a round should draft. Plain decoding: neither."""

    model: bool = False  # the draft model guesses for rows that look nothing up
    looking: Mapping[int, int] = field(default_factory=dict)  # rows that take what they looked up: how far


class Budget:
    """Decides, round by round and token by token, what the batch drafts.

    ragged: only real tokens cost something in verification; else a row costs as much as the longest one.
    """

    EXPLORE = 128  # after so many rounds in a row without the model some use it, to notice better times
    PATIENCE = 4  # times as many at most, where it was in vain again and again
    COMPARE = 128  # every so many drafting rounds some are plain, to know what drafting is worth
    SETTLED = 8  # drafting rounds before the first of those
    TRIES = 3  # rounds of such a change; the first one pays for it and tells nothing

    def __init__(self, longest: int, ragged: bool = False) -> None:
        self.longest = longest
        self.ragged = ragged
        self.costs = RoundCosts()
        self.acceptance: dict[str, AcceptanceModel] = {}
        self._rounds: deque[tuple[int, int, int, int]] = deque(maxlen=256)  # rows, steps, verified, tokens
        self._idle, self._patience = 0, self.EXPLORE
        self._busy: dict[int, int] = {}  # drafting rounds since the last plain ones, by rows
        self._plain = 0  # plain rounds in a row
        self._comparing = 0  # plain rounds still to come of a comparison

    def model(self, expert: str) -> AcceptanceModel:
        return self.acceptance.setdefault(expert, AcceptanceModel())

    def observe(self, rows: int, steps: int, verified: int, tokens: int, ms: float) -> None:
        """A whole round: rows in the batch, steps of the draft model, draft tokens verified, tokens emitted.

        A model's weights that were not used for a while must come from memory first, and a draft cache that
        fell behind must catch up, so the first round of another kind is not timed.
        """
        same = bool(verified) == (not self._plain) or not self._rounds
        self._plain = 0 if verified else self._plain + 1
        if same:
            self.costs.observe(rows, steps, verified, ms)
        if verified:
            self._busy[rows] = self._busy.get(rows, 0) + 1
        elif self._plain >= self.TRIES:
            self._busy[rows] = 0
        self._rounds.append((rows, steps, verified, tokens))

    @property
    def speedup(self) -> float | None:
        """Against plain decoding: what the last rounds would have taken plainly over what they took.

        Plain times come from plain rounds of as many rows; None until there was one. Both are typical
        times (medians), so that a round in which a request came or went counts for nothing.
        """
        plainly = spent = 0.0
        for rows, steps, verified, tokens in list(self._rounds):
            plain, ms = self.costs.measured(rows, 0, 0), self.costs.measured(rows, steps, verified)
            if plain is not None and ms is not None:
                plainly, spent = plainly + plain * tokens / rows, spent + ms
        return plainly / spent if spent else None

    def plan(
        self, experts: dict[int, str], found: Mapping[int, list[float]], rows: int, least: int = 0
    ) -> Plan:
        """What a round of `rows` drafts: the way to the most tokens per time.

        experts: of the rows for which the model could draft. found: of those that have something looked up,
        the chances that its tokens up to each are accepted. least: tokens that the model drafts in any case.
        """
        if not self.longest or not (experts or found) or (not least and self._compares(rows)):
            return Plan()
        least = min(least, self.longest)  # the steps after that bring nothing to rows that need not draft
        # A row takes what it looked up where that is the better guess; all do where the model is silent.
        better = {
            b: chances
            for b, chances in found.items()
            if b not in experts or chances[0] >= self.model(experts[b]).mean
        }
        others = [expert for b, expert in experts.items() if b not in better]
        mixed, steps, far = self._best(others, better, rows, least)
        alone, _, alone_far = self._best([], found, rows, least)
        if alone > mixed:
            steps, far = least, alone_far
        if steps:
            self._idle, self._patience = 0, self.EXPLORE
            return Plan(True, far)
        if experts and self._tired():
            _, _, far = self._best(others or list(experts.values()), better if others else {}, rows, 1)
            return Plan(True, far)
        if not experts and not far and self._tired():
            return Plan(False, {b: len(chances) for b, chances in found.items()})
        return Plan(False, far)

    def _compares(self, rows: int) -> bool:
        """Whether this round is plain only to be timed. Once begun, it goes on though rows come and go."""
        known = self.costs.measured(rows, 0, 0) is not None
        if not self._comparing and self._busy.get(rows, 0) >= (self.COMPARE if known else self.SETTLED):
            self._comparing, self._busy[rows] = self.TRIES, 0
        due = self._comparing > 0
        self._comparing = max(0, self._comparing - 1)
        return due

    def _best(
        self, experts: list[str], found: Mapping[int, list[float]], rows: int, least: int
    ) -> tuple[float, int, dict[int, int]]:
        """The most tokens per plain round's time, with so many steps, and so much of what was looked up."""
        most = self.longest if experts else least
        steps = np.arange(least, most + 1)[:, None]
        guessed = self._guessed(experts)[least : most + 1, None]
        # By how many looked-up tokens are verified: the surest first, or as many of each row.
        chances = sorted((chance for each in found.values() for chance in each), reverse=True)
        if self.ragged:
            brought = np.concatenate([[0.0], np.cumsum(chances)])
            verified = len(experts) * steps + np.arange(len(brought))
        else:
            widths = np.arange(max((len(each) for each in found.values()), default=0) + 1)
            brought = np.array([sum(sum(each[:width]) for each in found.values()) for width in widths])
            verified = rows * np.maximum(steps, widths)
        rates = (rows + guessed + brought) / self.costs.relative(rows, steps, verified)
        at, last = divmod(int(rates.argmax()), rates.shape[1])
        if self.ragged:
            far = {
                b: sum(chance >= chances[last - 1] for chance in each) for b, each in found.items() if last
            }
        else:
            far = {b: min(last, len(each)) for b, each in found.items()}
        return float(rates.max()), least + at, {b: count for b, count in far.items() if count}

    def _guessed(self, experts: list[str]) -> Floats:
        """Tokens that the model's 0 … longest steps bring, by the experts' mean acceptance alone."""
        means = np.array([min(self.model(expert).mean, 0.99) for expert in experts])
        powers = means[:, None] ** np.arange(1.0, self.longest + 1)
        return np.concatenate([[0.0], np.cumsum(powers.sum(axis=0))])

    def _tired(self) -> bool:
        """Of doing without; times may have changed, or the model may have learned."""
        self._idle += 1
        if self._idle >= self._patience + self.TRIES:
            self._idle, self._patience = 0, min(2 * self._patience, self.PATIENCE * self.EXPLORE)
            return True
        return self._idle > self._patience

    def another(
        self,
        experts: list[str],
        survival: list[float],
        expected: float,
        steps: int,
        rows: int,
        verified: tuple[int, int],
    ) -> bool:
        """Whether to take step `steps + 1` for `experts`, in a batch of `rows`.

        survival: per expert's row, the chance that all its tokens so far are accepted. expected: tokens the
        round emits as it stands, Σ over rows of 1 + Σ survival. verified: draft tokens verified without and
        with that step. Goes on while the step's gain per time is at least the round's own average.
        """
        if steps >= self.longest:
            return False
        now, then = self.costs.relative(rows, [steps, steps + 1], verified).tolist()
        gain = sum(s * self.model(e).mean for s, e in zip(survival, experts, strict=True))
        return bool(gain * now >= expected * (then - now))


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
