"""How often the first guess is right, counted on all tokens of an answer, whether they were drafted or not.

What was accepted of drafts says nothing of the tokens for which nothing was drafted: budget and lookup choose
these, so such a figure moves with the draft length. Therefore some tokens of an answer that has ended are
looked at once more: for each of them, whether the draft that serves the row guesses it from those before.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Sequence

from moedraft import core
from moedraft.core import SHARED
from moedraft.drafting.arms.feature_judge import FeatureJudge
from moedraft.drafting.base import DraftBase, FeatureBase, first_guesses
from moedraft.drafting.chooser import DraftSource
from moedraft.drafting.drafter import ExpertDrafter
from moedraft.drafting.experts.lora import ExpertBank
from moedraft.drafting.feature import FeatureDrafter
from moedraft.drafting.kept import KEPT
from moedraft.evidence import Passage
from moedraft.models import LanguageModel

TOKENS = 16  # of an answer that are looked at, in one place
TIME_SHARE = 0.005  # share of the time that looking may take on average
SAVED = 0.03  # seconds that may be saved up, at most
LONGEST = 1024  # tokens of a text that an independent draft model reads once more for this
TOO_LONG = 0.2  # seconds that a look may take, by what the one before took for each token of its text
FORGETS = 0.95  # factor of that, each time that a look was left out for it

log = logging.getLogger(__name__)

Look = Callable[[core.Sequence], Sequence[bool]]  # for some tokens of a row: whether the first guess is right


class Glances:
    """Looks at answers that have ended, as long as that takes little of the time."""

    def __init__(self, look: Look, clock: Callable[[], float] = time.perf_counter) -> None:
        self.failures = 0
        self._look, self._clock = look, clock
        self._seen_at, self._balance = clock(), SAVED
        self._each = 0.0  # seconds for each token of the last text

    def __call__(self, row: core.Sequence) -> None:
        """Add what is seen to the row's statistics. Its slot must still be its own. Never raises."""
        if not (row.draft and row.counted):
            return
        began = self._clock()
        self._balance = min(SAVED, self._balance + TIME_SHARE * (began - self._seen_at))
        self._seen_at = began
        if self._balance <= 0:
            return
        if self._each * len(row.token_ids) > TOO_LONG:
            self._each *= FORGETS  # one slow look, such as the very first, must not be the last
            return
        try:
            right = self._look(row)
        except Exception:
            self.failures += 1
            if self.failures == 1:  # what fails once may fail at every answer
                log.exception("First guesses could not be counted; no answer is affected.")
            right = ()
        row.speculation.saw(sum(right), len(right), shared=row.expert == SHARED)
        spent = self._clock() - began
        self._balance -= spent
        self._each = spent / max(1, len(row.token_ids))


def glances_of(drafter: ExpertDrafter, base: DraftBase, bank: ExpertBank, source: DraftSource) -> Glances:
    """The glances at what this drafter serves; they see nothing where lookup alone drafts."""
    if source == "lookup":
        return Glances(lambda row: ())
    if isinstance(base, FeatureBase):
        assert isinstance(drafter, FeatureDrafter)
        return Glances(FeatureLook(drafter, FeatureJudge(drafter, bank)))
    return Glances(lambda row: look_of_model(row, base, bank))


class FeatureLook:
    """A feature drafter's guesses, from the states that it has read last."""

    def __init__(self, drafter: FeatureDrafter, judge: FeatureJudge) -> None:
        self.drafter, self.judge = drafter, judge
        self._random = random.Random(0)

    def __call__(self, row: core.Sequence) -> list[bool]:
        """Of TOKENS tokens behind each other, anywhere among the last ones that are kept."""
        arm = row.expert if row.expert in self.judge.arms else SHARED
        self.drafter.read_all(row)
        # The answer's first token is left out: the target has it before anything can be drafted.
        known = self.judge.known(row, row.num_prompt_tokens - 1, 2 * KEPT)
        first = known.first + self._random.randint(0, max(0, known.end - known.first - TOKENS))
        end = min(known.end, first + TOKENS)
        if end <= first:
            return []
        [found] = self.judge.hits([Passage(row, first, end)], [arm])
        return [hit > 0 for hit in found[arm]]


def look_of_model(row: core.Sequence, base: LanguageModel, bank: ExpertBank) -> list[bool]:
    """An independent draft model's guesses, for which it reads the text again."""
    first = row.num_prompt_tokens + 1
    if not first < len(row.token_ids) <= min(LONGEST, base.max_len):
        return []
    bank.select([row.expert])
    # A target's vocabulary may be padded with tokens that the draft does not have.
    ids = [token if token < base.vocab_size else 0 for token in row.token_ids]
    guesses = first_guesses(base, ids, None)
    return [guess == token for guess, token in zip(guesses[first:], row.token_ids[first:], strict=True)]
