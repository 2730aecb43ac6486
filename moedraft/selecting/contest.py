"""The contest between the arms for one answer: their standings, and when they are compared next.

Comparing costs time, so it is done where it can change something: at the end of the prompt, unless the router
is sure, then each time that the target has refused some more guesses, and more seldom while that changes
nothing. As long as the one who drafts guesses right, nobody guesses better. While nothing is drafted for a
row, its answer is not compared; its prompt is, since with another arm drafting may pay. Only arms near the
leader are compared, and one more at random, so that none is forgotten.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence

from moedraft import core
from moedraft.core import SHARED
from moedraft.evidence import Passage
from moedraft.selecting.prior.confusion import Confusion
from moedraft.selecting.standings import Standings
from moedraft.speculation import Standing

REFUSALS = (4, 8, 16)  # guesses refused until arms are compared again, after 0, 1, 2 … calm comparisons
TRUSTED = 0.95  # weight of the router's choice with which the prompt is not compared
PATIENCE = 4  # tokens of an answer by which the router should have said something
CALM = 0.8  # a comparison is calm where the leader stays, with at least this weight or no less than before
LONGEST_GAP = 32  # tokens read by the drafter, after which arms are compared though few were refused
PROMPT_DEPTH = 24  # of the prompt's last tokens, how many are compared
ANSWER_DEPTH = 8  # of an answer's last tokens, how many are compared at once
PROMPT_STRENGTH = 0.6  # how much a token of the prompt counts beside one of the answer
FEW_LEFT = 8  # with at most so many tokens left in an answer, comparing no longer pays
ALL_ARMS = 8  # up to so many arms are all compared at a prompt
NEAR_ARMS = 4  # most arms that are compared later on, besides those drawn at random
HEARD_RATE = 0.7  # RATE of the evidence alone: four more guesses than any other arm make about 90 %
HEARD_SHARE = 0.001  # SHARE of it: what counts is all that was compared of the answer, not its end
MOST_STANDINGS = 64  # of an answer that are kept, to be shown
NOBODY = ""  # in a record's weights: what stands for some other domain, nobody knows which
LEAST_WEIGHT = 0.005  # of an arm, to be kept when the request ends
NEAR = 0.003  # part of the leader's weight that an arm needs to be compared again

# Why an answer was not compared
SURE = "The router was sure, and few of its expert's guesses were refused."
UNGUESSED = "The router was sure, and the draft model guessed nothing: lookup did, or nobody."
LATE = "The router was sure, and guesses were refused only at its end, where comparing no longer pays."
UNREAD = "The draft model has read nothing of it: lookup did the guessing, or nobody."
SHORT = "The answer was too short."
NO_TIME = "The time for comparing was used up by other answers."
FAILED = "The comparison failed; the server's log says why."


class Contest:
    """The arms of one request."""

    def __init__(self, row: core.Sequence, arms: Sequence[str], confusion: Confusion) -> None:
        """confusion: what the router's answers have turned out to be worth, of the router that is asked."""
        self.row, self.confusion = row, confusion
        self.standings = Standings(arms)  # who drafts
        # Whose the text is. Nothing but the router and this answer decides that: what is learned from it must
        # not follow from other answers.
        self.own = Standings(arms)
        self.heard = Standings(arms, rate=HEARD_RATE, share=HEARD_SHARE)  # without the router's prior
        self.looked_at: set[str] = set()  # arms that were compared
        self.compared = 0  # entries of the drafter's cache that were compared or passed over
        self.times = 0
        self.believed = False  # whether the router has said something
        self.prior: dict[str, float] = {}  # what it has said, by domain
        self.shares: dict[str, float] = {}  # the same by arm
        self.calm = 0  # comparisons in a row that were calm; see CALM
        self.waited = False  # whether there was no time for it once
        self.refused = 0  # guesses that the target had refused by the last comparison
        self.drafts = 0  # verifications of a draft by then

    @property
    def depth(self) -> int:
        """The most tokens to compare next."""
        return PROMPT_DEPTH if self.at_prompt else ANSWER_DEPTH

    @property
    def at_prompt(self) -> bool:
        """Whether the end of the prompt is what is compared next."""
        if self.times:
            return False
        sure = self.believed and max(self.own.weights.values()) >= TRUSTED
        return not (sure and self.standings.leader == self.own.leader)

    def wants(self, passage: Passage) -> bool:
        """Whether to compare the arms now, on this passage, and not when there is more of it."""
        row = self.row
        if passage.end <= passage.first or row.target_cached < row.num_prompt_tokens - 1:
            return False
        if row.speculation.num_drafts == self.drafts and not self.at_prompt:
            return False
        if not self.times and not self.believed and row.num_generated < PATIENCE:
            return False
        if row.params.max_tokens - row.num_generated <= FEW_LEFT:
            return False
        refused = len(row.rejected) - self.refused
        calm = self.calm if row.owner in (None, row.expert) else 0
        enough = self.at_prompt or refused >= REFUSALS[min(calm, len(REFUSALS) - 1)]
        return enough or passage.end - max(self.compared, row.num_prompt_tokens) >= LONGEST_GAP

    def believe(self, prior: Mapping[str, float]) -> None:
        """Take in the router's answer: the probability of each domain, and of none of them."""
        self.prior = dict(prior)
        shares = dict.fromkeys(self.standings.arms, 0.0)
        for name, probability in prior.items():  # the shared draft drafts where no expert was trained
            shares[name if name in shares else SHARED] += probability
        chosen = self.row.expert
        if chosen != SHARED and chosen in shares:
            # A wrong expert costs about what the right one gains, and the first tokens tell which it is. So a
            # domain above the threshold is tried first, even where "none of them" is likelier.
            shares[SHARED] = min(shares[SHARED], shares[chosen] / 2)
        self.believed = True
        self.row.unlearned = self.row.routed not in (None, *self.standings.arms)
        total = sum(shares.values())
        if total > 0:
            self.shares = {arm: share / total for arm, share in shares.items()}
            corrected = self.shares if self.row.unlearned else self.confusion.corrected(self.shares)
            self.standings.believe(corrected)
            self.own.believe(self.shares)
        self._choose()

    def keep(self, arms: Collection[str]) -> None:
        """Leave out whoever is not among `arms`, because it was removed while the answer went on."""
        if not set(self.standings.arms) <= set(arms):
            for standings in (self.standings, self.own, self.heard):
                standings.keep(arms)
            self.looked_at &= set(arms)
            self.shares = {arm: share for arm, share in self.shares.items() if arm in arms}
            if self.row.expert not in arms:
                self.row.expert = self.standings.leader
            if self.row.owner not in (None, *arms):
                self.row.owner = self.own.leader

    def learn(self, hits: Mapping[str, Sequence[float]], end: int) -> bool:
        """Take in which tokens the arms would have guessed, up to entry `end` of the drafter's cache.

        Returns whether another arm leads since. Arms that have come since the request began are left out.
        """
        known = {arm: found for arm, found in hits.items() if arm in self.standings.arms}
        if not self.at_prompt:  # where the prior alone may have chosen another
            self._note_gain(known)
        now, strength = self.standings, PROMPT_STRENGTH if self.at_prompt else 1.0
        leader, before = now.leader, now.weights[now.leader]
        for standings in (self.standings, self.own, self.heard):
            standings.learn(known, strength)
        self.looked_at |= known.keys()
        self.compared = end
        stays = leader == now.leader
        self.calm = self.calm + 1 if stays and now.weights[leader] >= min(CALM, before) else 0
        self.refused, self.drafts = len(self.row.rejected), self.row.speculation.num_drafts
        self.times += 1
        if len(self.row.standings) < MOST_STANDINGS:
            self.row.standings.append(Standing(self.row.num_generated, _kept(self.standings.weights)))
        self._choose()
        return not stays

    def _note_gain(self, hits: Mapping[str, Sequence[float]]) -> None:
        """Count how who leads by this answer guesses beside the router's choice, on tokens since then."""
        row = self.row
        routed = row.routed if row.routed in self.standings.arms else SHARED
        drafts = self.own.leader if row.expert in self.standings.arms else SHARED
        if row.routed is not None and routed != drafts and {routed, drafts} <= hits.keys():
            row.speculation.overruled_tokens += len(hits[drafts])
            row.speculation.overruled_gain += sum(hits[drafts]) - sum(hits[routed])

    def end(self) -> None:
        """Leave the final standings with the row, from which its replay record gets them.

        The evidence alone says nothing of arms that were never compared, nor of one beside none. Of a domain
        that has no trained expert yet all of it says nothing, so that its records teach it. Where nothing was
        compared the router's word is left, unless it was sure.
        """
        row = self.row
        row.uncompared = "" if self.times else self._why_not()
        if self.times and not row.unlearned:
            row.weights = _kept(self.own.weights)
            row.heard = _kept(self.heard.among(self.looked_at)) if len(self.looked_at) > 1 else {}
        elif not self.times and row.owner not in (None, row.expert):
            # Earlier answers speak against the router. Whose it is instead must not follow from them.
            mine = {arm: w for arm, w in self.standings.weights.items() if arm in (row.owner, SHARED)}
            row.weights = _kept({**mine, NOBODY: 1 - sum(mine.values())})
        elif not self.times and not row.unlearned and max(self.prior.values(), default=1.0) < TRUSTED:
            row.weights = _kept(self.prior)

    def tell(self) -> None:
        """Let the router's next answers be corrected by what this answer has shown, once it has ended.

        Only what may be learned from counts. A domain without a trained expert says nothing of the router.
        """
        if self.shares and self.row.capture and not self.row.unlearned and len(self.looked_at) > 1:
            self.confusion.learn(self.shares, self.heard.among(self.looked_at), self.row.source)

    def _why_not(self) -> str:
        row = self.row
        if not self.at_prompt:
            if not row.speculation.num_drafts:
                return UNGUESSED
            if len(row.rejected) < REFUSALS[0]:
                return SURE
        elif row.num_generated >= PATIENCE and not row.draft_cached:
            return UNREAD
        elif row.num_generated < PATIENCE or not self.waited:
            return SHORT
        return NO_TIME if self.waited else LATE

    def _choose(self) -> None:
        """Let the leader draft. An untrained expert keeps its row while SHARED leads, which drafts for it."""
        leader, row = self.standings.leader, self.row
        if leader != SHARED or row.expert in self.standings.arms:
            row.expert, row.owner = leader, self.own.leader
        else:
            row.owner = None


def _kept(weights: Mapping[str, float]) -> dict[str, float]:
    """Those of the arms that count, rounded."""
    return {arm: round(weight, 3) for arm, weight in weights.items() if weight >= LEAST_WEIGHT}


def arms_to_compare(
    contests: Sequence[Contest], arms: Sequence[str], chance: random.Random, ready: Collection[str]
) -> list[str]:
    """The arms to compare in one pass for these rows: those near the leader of any row, and one more.

    At most one of them is not among `ready`, the arms that can be compared at once.
    """
    chosen = _near_and_one_more(contests, arms, chance)
    return [arm for arm in chosen if arm in ready] + [arm for arm in chosen if arm not in ready][:1]


def _near_and_one_more(contests: Sequence[Contest], arms: Sequence[str], chance: random.Random) -> list[str]:
    """As `arms_to_compare`, whether they are ready or not; those nearest to a leader come first."""
    weights = dict.fromkeys(arms, 0.0)
    for contest in contests:
        for found in (contest.standings.weights, *([contest.own.weights] if contest.shares else [])):
            best = max(found.values())
            for arm in weights:
                weights[arm] = max(weights[arm], found.get(arm, 0.0) / best)
    first = any(not contest.times for contest in contests)
    order = sorted(arms, key=lambda arm: -weights[arm])
    if first and len(order) <= ALL_ARMS:
        return order
    near = order[: ALL_ARMS - 2 if first else NEAR_ARMS]
    near = [arm for arm in near if first or weights[arm] >= NEAR]
    rest = [arm for arm in order if arm not in near]
    return near + chance.sample(rest, min(len(rest), max(1, 2 - len(near))))
