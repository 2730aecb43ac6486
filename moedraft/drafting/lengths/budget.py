"""How many tokens to draft, and from where: as long as the next one pays for itself, by measured costs.

A draft position's chance to be accepted is estimated from the draft's own confidence, per expert, and
refitted from what verification shows. Rules look at logits of the prefix and never at which token was
drawn, else sampling would not be exact any more.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul

import numpy as np

from moedraft.drafting.lengths.acceptance import AcceptanceModel
from moedraft.drafting.lengths.costs import RoundCosts
from moedraft.drafting.lengths.growth import Floats
from moedraft.evidence import Proposal


@dataclass(frozen=True)
class Plan:
    """What a round should draft. A round that decodes plainly has neither `model` nor `looking`."""

    model: bool = False  # the draft model guesses for rows that look nothing up
    looking: Mapping[int, int] = field(default_factory=dict)  # rows that take what they looked up: how far


class Budget:
    """Decides, round by round and token by token, what the batch drafts.

    ragged: only real tokens cost something in verification; else a row costs as much as the longest one.
    """

    EXPLORE = 128  # rounds in a row without the draft model, after which it is tried again
    PATIENCE = 4  # that number may grow to so many times itself when one trial after another fails
    COMPARE = 128  # every so many drafting rounds some are plain, to know what drafting is worth
    SETTLED = 8  # drafting rounds before the first of those; twice as many before each further one
    TRIES = 3  # rounds of such a change; the first one pays for it and tells nothing

    def __init__(self, longest: int, ragged: bool = False) -> None:
        self.longest = longest
        self.ragged = ragged
        self.costs = RoundCosts()
        self.acceptance: dict[tuple[str, bool], AcceptanceModel] = {}  # by expert, and whether it is sampled
        self._rounds: deque[tuple[int, int, int, int]] = deque(maxlen=256)  # rows, steps, verified, tokens
        self._idle, self._patience = 0, self.EXPLORE
        self._busy: dict[int, int] = {}  # drafting rounds since the last plain ones, by rows
        self._compare: dict[int, int] = {}  # drafting rounds before the next plain ones, by rows
        self._plain = 0  # plain rounds in a row
        self._comparing = 0  # plain rounds still to come of a comparison

    def model(self, expert: str, *, sampled: bool = False) -> AcceptanceModel:
        """What is known of an expert's guesses in greedy rows, or in sampled ones.

        Sampled rows accept guesses by another rule, so what is seen in one kind says nothing of the other.
        """
        return self.acceptance.setdefault((expert, sampled), AcceptanceModel())

    def observe(self, rows: int, steps: int, verified: int, tokens: int, ms: float) -> None:
        """A whole round: rows in the batch, steps of the draft model, draft tokens verified, tokens emitted.

        A model's weights that were not used for a while must come from memory first, and a draft cache that
        fell behind must catch up, so the first round of another kind is not timed: plain, looked up only, or
        with the model.
        """
        kind = bool(steps), bool(verified)
        same = not self._rounds or kind == tuple(map(bool, self._rounds[-1][1:3]))
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
        """How many times as fast as plain decoding the last rounds were.

        It is the time that they would have taken plainly divided by the time that they took.

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
        self, means: Mapping[int, float], found: Mapping[int, list[float]], rows: int, least: int = 0
    ) -> Plan:
        """Decide what a round of `rows` rows drafts, so that it gives the most tokens per time.

        means: of the rows for which the model could draft, how likely a token of it is accepted. found: of
        those that have something looked up, the chances that its tokens up to each are accepted. least:
        tokens that the model drafts in any case.
        """
        if not self.longest or not (means or found) or (not least and self._compares(rows)):
            return Plan()
        least = min(least, self.longest)  # the steps after that bring nothing to rows that need not draft
        # A row takes what it looked up where that is the better guess; all do where the model is silent.
        better = {b: chances for b, chances in found.items() if b not in means or chances[0] >= means[b]}
        others = [mean for b, mean in means.items() if b not in better]
        mixed, steps, far = self._best(others, better, rows, least)
        alone, _, alone_far = self._best([], found, rows, least)
        if alone > mixed:
            steps, far = least, alone_far
        if steps:
            self._idle, self._patience = 0, self.EXPLORE
            return Plan(True, far)
        if means and self._tired():
            _, _, far = self._best(others or list(means.values()), better if others else {}, rows, 1)
            return Plan(True, far)
        if not means and not far and self._tired():
            return Plan(False, {b: len(chances) for b, chances in found.items()})
        return Plan(False, far)

    def _compares(self, rows: int) -> bool:
        """Whether this round is plain only to be timed. Once begun, it goes on though rows come and go."""
        wanted = self._compare.get(rows, self.SETTLED)
        if not self._comparing and self._busy.get(rows, 0) >= wanted:
            self._comparing, self._busy[rows] = self.TRIES, 0
            self._compare[rows] = min(2 * wanted, self.COMPARE)
        due = self._comparing > 0
        self._comparing = max(0, self._comparing - 1)
        return due

    def _best(
        self, means: list[float], found: Mapping[int, list[float]], rows: int, least: int
    ) -> tuple[float, int, dict[int, int]]:
        """The draft length and the looked-up tokens that give the most tokens per time.

        Returns the rate that this promises (tokens in the time of a plain round), the draft length, and how
        many looked-up tokens are verified, by row.
        """
        if not found:
            return *self._best_alone(means, rows, least), {}
        most = self.longest if means else least
        steps = np.arange(least, most + 1)[:, None]
        guessed = self._guessed(means)[least : most + 1, None]
        # By how many looked-up tokens are verified: the surest first, or as many of each row.
        ranked = sorted((-chance, i, b) for b, each in found.items() for i, chance in enumerate(each))
        if self.ragged:
            brought = np.concatenate([[0.0], np.cumsum([-chance for chance, _, _ in ranked])])
            verified = len(means) * steps + np.arange(len(brought))
        else:
            widths = np.arange(max((len(each) for each in found.values()), default=0) + 1)
            brought = np.array([sum(sum(each[:width]) for each in found.values()) for width in widths])
            verified = rows * np.maximum(steps, widths)
        rates = (rows + guessed + brought) / self.costs.relative(rows, steps, verified)
        at, last = divmod(int(rates.argmax()), rates.shape[1])
        if self.ragged:
            far = dict(Counter(b for _, _, b in ranked[:last]))  # chances fall along a row
        else:
            far = {b: min(last, len(each)) for b, each in found.items()}
        return float(rates.max()), least + at, {b: count for b, count in far.items() if count}

    def _best_alone(self, means: list[float], rows: int, least: int) -> tuple[float, int]:
        """The rate and the draft length of `_best` where nothing is looked up."""
        chances, guessed, best = [1.0] * len(means), 0.0, (0.0, least)
        each = len(means) if self.ragged else rows
        for steps in range((self.longest if means else least) + 1):
            if steps:
                chances = [chance * min(mean, 0.99) for chance, mean in zip(chances, means, strict=True)]
                guessed += sum(chances)
            rate = (rows + guessed) / self.costs.of(rows, steps, each * steps)
            if steps >= least and rate > best[0]:
                best = rate, steps
        return best

    def _guessed(self, means: list[float]) -> Floats:
        """Tokens that the model's 0 … longest steps bring, by the rows' mean acceptance alone."""
        powers = np.minimum(np.array(means), 0.99)[:, None] ** np.arange(1.0, self.longest + 1)
        return np.concatenate([[0.0], np.cumsum(powers.sum(axis=0))])

    def _tired(self) -> bool:
        """Whether to run a trial drafting round after many without the model.

        The machine may have become faster meanwhile, or the model better.
        """
        self._idle += 1
        if self._idle >= self._patience + self.TRIES:
            self._idle, self._patience = 0, min(2 * self._patience, self.PATIENCE * self.EXPLORE)
            return True
        return self._idle > self._patience

    def another(
        self,
        means: list[float],
        survival: list[float],
        expected: float,
        steps: int,
        rows: int,
        verified: Iterable[int],
        limits: Sequence[int] = (),
    ) -> bool:
        """Whether to take step `steps + 1`, in a batch of `rows`, for some of them.

        means: how likely a token not drafted yet is accepted in each of these. survival: the chance that all
        tokens of each so far are accepted. expected: tokens the round emits as it stands, Σ over rows of
        1 + Σ survival. verified: draft tokens verified without that step, with it, with one more …; costs may
        rise at one step and not at the next ones. limits: the most tokens of each of these rows, where they
        have any. Goes on while the gain of some number of further steps, per time, is at least the round's
        own average.
        """
        counts, gain, chances = iter(verified), 0.0, survival
        now = self.costs.of(rows, steps, next(counts))
        for step, tokens in zip(range(steps + 1, self.longest + 1), counts, strict=False):
            chances = [chance * mean for chance, mean in zip(chances, means, strict=True)]
            gain += sum(c for i, c in enumerate(chances) if not limits or step <= limits[i])
            if gain * now >= expected * (self.costs.of(rows, step, tokens) - now):
                return True
        return False


class StopRule:
    """Whether the draft model should draw one more token; asked after each, with its confidence by row.

    It looks at confidences, which belong to the prefix, and never at which token was drawn.
    """

    def __init__(
        self,
        budget: Budget,
        models: list[AcceptanceModel],
        means: Mapping[int, float],
        limits: list[int],
        fixed: list[bool],
        looked: Proposal,
    ) -> None:
        """models: by row. means: as in `plan`. fixed: rows with just their limit. looked: what was found."""
        self.budget, self.models, self.means = budget, models, means
        self.limits, self.looked = limits, looked
        self.free = [b for b, limit in enumerate(limits) if limit and not fixed[b]]
        self.least = max(
            (limit for limit, is_fixed in zip(limits, fixed, strict=True) if is_fixed), default=0
        )
        self.survival = dict.fromkeys(self.free, 1.0)
        self.expected = len(limits) + sum(map(sum, map(survival_of, looked.confidences)))
        self.steps = 0

    def another(self, confidences: list[float]) -> bool:
        self._take(confidences)
        open_rows = [b for b in self.free if self.limits[b] > self.steps]
        if self.steps < self.least:
            return True
        return bool(open_rows) and self.budget.another(
            [self.means[b] for b in open_rows],
            [self.survival[b] for b in open_rows],
            self.expected,
            self.steps,
            len(self.limits),
            (self._verified(steps) for steps in range(self.steps, self.budget.longest + 1)),
            [self.limits[b] for b in open_rows],
        )

    def _take(self, confidences: list[float]) -> None:
        for b in self.free:
            if self.steps < self.limits[b]:
                self.survival[b] *= self.models[b].predict(confidences[b])
                self.expected += self.survival[b]
        self.steps += 1

    def _verified(self, steps: int) -> int:
        """Draft tokens to verify after so many steps, with the padding where that costs as much."""
        if self.budget.ragged:
            return sum(self.looked.lengths) + sum(min(limit, steps) for limit in self.limits)
        return len(self.limits) * max(steps, self.looked.width)


def survival_of(chances: list[float]) -> list[float]:
    """Chances of each token if those before it are accepted → chances that all tokens up to it are."""
    return list(accumulate(chances, mul))
