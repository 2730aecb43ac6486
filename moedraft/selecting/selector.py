"""Chooses who drafts, by the router's prior and by which verified tokens every expert would have guessed.

The choice depends on the prompt, on tokens that the target has confirmed, of this answer and of others that
have ended, and on when they were compared; never on a token that is proposed and not verified yet. So sampled
answers keep the target's distribution. A reproducible request keeps the expert that the router chose, since
its answer may not depend on timing; under coupled verification it does not, whoever drafts, and seeded
requests are compared like others.

It compares the experts between rounds, on tokens that have entered the rows and that the drafter has read.
How many guesses were refused tells it only when to compare: that says nothing of those who did not guess. So
passages where the leader guessed wrong are compared more often than others.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Protocol

from moedraft import core
from moedraft.evidence import Passage
from moedraft.routing.router import Router
from moedraft.routing.selector import BackgroundSelector, needs_expert
from moedraft.selecting.contest import FAILED, Contest, arms_to_compare
from moedraft.selecting.prior.confusion import Confusion, Mistake

TIME_SHARE = 0.03  # share of the time that comparing may take on average, where it often changes who drafts
LEAST_PART = 0.25  # of it, where it changes nothing
OFTEN = 0.25  # part of the comparisons that change who drafts, from which on all of TIME_SHARE may be used
MEMORY = 32  # comparisons over which that part is averaged
DEEPEST = 0.3  # seconds of debt at most, so that a single slow comparison does not stop them for minutes
SAVED = 0.03  # seconds that may be saved up while nothing is compared, for the prompts after a pause, at most

log = logging.getLogger(__name__)


class ArmJudge(Protocol):
    """Tells how well each arm would have guessed; `FeatureJudge` is one."""

    most_rows: int  # that are compared at once; the others wait for the next step

    @property
    def comparable(self) -> bool:
        """Whether arms can be compared now."""

    @property
    def arms(self) -> list[str]:
        """Whoever can draft otherwise than others, the shared draft first."""

    @property
    def ready(self) -> Collection[str]:
        """Those of them for whose guesses nothing has to be made first."""

    def known(self, row: core.Sequence, since: int, most: int) -> Passage:
        """The last verified positions that can be compared, `most` at most and none before `since`."""

    def hits(self, passages: Sequence[Passage], arms: Sequence[str]) -> list[dict[str, list[float]]]:
        """By passage and arm, for each position: 1 where the arm's first guess is the text's token.

        The first arm is always among them, with one other at least.
        """


class EvidenceSelector(BackgroundSelector):
    """The router's choice is where an answer begins; the standings of its arms decide from then on.

    time_share: see TIME_SHARE; None: comparing may take any time, so that what is chosen does not depend on
    the clock, but for the order in which answers end.
    """

    def __init__(
        self,
        router: Router,
        judge: ArmJudge,
        *,
        time_share: float | None = TIME_SHARE,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__(router)
        self.judge = judge
        self.time_share = time_share
        self.comparisons = 0  # of rows, since the start
        self.failures = 0  # comparisons that failed
        self.confusion, self._fits = Confusion(), router.fits
        self._clock = clock
        self._settled_at = clock()
        self._balance = SAVED  # seconds that comparing may take now
        self._changes = OFTEN  # part of the last comparisons that have changed who drafts
        self._contests: dict[str, Contest] = {}  # by request
        self._random = random.Random(0)

    @property
    def compares(self) -> bool:
        """Whether there is more than one arm, and arms can be compared."""
        return self.judge.comparable and len(self.judge.arms) > 1

    def assign(self, sequences: list[core.Sequence]) -> None:
        """Ask the router, and let the arms of those that it may be wrong about compete."""
        super().assign(sequences)
        if self.router.fits != self._fits:  # answers that an older fit began do not count for this one
            self.confusion, self._fits = Confusion(), self.router.fits
        arms, confusion = self.judge.arms, self.confusion
        if self.compares:
            for row in sequences:
                if needs_expert(row) and row.draft and not row.reproducible:
                    self._contests[row.request_id] = Contest(row, arms, confusion)

    def settle(self, ending: core.Sequence | None = None) -> list[core.Sequence]:
        """As `ExpertSelector.settle`; between two steps the experts are compared as well."""
        before = {name: contest.row.expert for name, contest in self._contests.items()}
        for row in (routed := super().settle(ending)):
            if contest := self._contests.get(row.request_id):
                contest.believe(row.prior)
        if self._contests:
            arms = self.judge.arms
            for contest in self._contests.values():
                contest.keep(arms)
        if ending is None:
            self._compare()
        elif contest := self._contests.get(ending.request_id):
            contest.end()
            contest.tell()
        changed = [
            contest.row for name, contest in self._contests.items() if contest.row.expert != before[name]
        ]
        self._contests = {
            name: contest
            for name, contest in self._contests.items()
            if contest.row is not ending and contest.row.finish_reason is None
        }
        known = set(map(id, changed))
        return changed + [row for row in routed if id(row) not in known]

    def mistakes(self) -> list[Mistake]:
        """What the router takes for what again and again, as it was fitted last. For any thread."""
        return self.confusion.mistakes() if self.router.fits == self._fits else []

    def _compare(self) -> None:
        """Compare the arms of the rows that are due, if the time balance allows it. Never raises."""
        began = self._clock()
        self._earn(began - self._settled_at)
        self._settled_at = began
        if self._balance <= 0 or not self._contests:
            _wait(self._contests.values())
            return
        try:
            self._compare_due()
        except Exception:
            self.failures += 1
            log.exception("The experts could not be compared; the router's choice stands.")
            for contest in self._contests.values():
                contest.row.uncompared = FAILED
            self._contests.clear()
        self._balance = max(self._balance - (self._clock() - began), -DEEPEST)

    def _earn(self, seconds: float) -> None:
        """Add to the time balance for the `seconds` that have passed; without a limit it is always full.

        Where comparing seldom changes who drafts, it earns less of them.
        """
        if self.time_share is None:
            self._balance = SAVED
        else:
            part = min(1.0, max(LEAST_PART, self._changes / OFTEN))
            self._balance = min(part * SAVED, self._balance + part * self.time_share * seconds)

    def _compare_due(self) -> None:
        judge = self.judge
        due = []
        for contest in self._contests.values():
            if contest.row.slot >= 0:
                passage = judge.known(contest.row, contest.compared, contest.depth)
                if contest.wants(passage):
                    due.append((contest, passage))
        # Those that were never compared go first, then those whose leader is least sure.
        due.sort(key=lambda pair: (pair[0].times > 0, max(pair[0].standings.weights.values())))
        _wait(contest for contest, _ in due[judge.most_rows :])
        if chosen := due[: judge.most_rows]:
            contests = [contest for contest, _ in chosen]
            arms = arms_to_compare(contests, judge.arms, self._random, judge.ready)
            hits = judge.hits([passage for _, passage in chosen], arms)
            for (contest, passage), found in zip(chosen, hits, strict=True):
                changed = contest.learn(found, passage.end)
                self._changes += (changed - self._changes) / MEMORY
            self.comparisons += len(chosen)


def _wait(contests: Iterable[Contest]) -> None:
    """Note that there was no time to compare them."""
    for contest in contests:
        contest.waited = True
