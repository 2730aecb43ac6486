"""How the arms of one answer stand: weights that begin with the router's prior and follow the evidence.

An arm is whoever could draft: an expert, or the shared draft. The evidence is, token by token, whether an
arm's first guess would have been the token that was emitted. The weights are exponential ones with a prior
and a fixed share (Herbster and Warmuth, "Tracking the best expert", 1998): the share that every arm gets of
all others' weight after each token lets an arm that was far behind come back when the text changes. An arm
that was not looked at keeps its weight (Freund et al., "Using and combining predictors that specialize",
1997), so that not all of them have to be scored every time. Knows no model, no request and no clock.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

RATE = 2.0  # a token that one arm guesses and another does not changes their odds by a factor of e ** RATE
SHARE = 0.005  # part of each arm's weight that is spread over all arms after each token
DOUBT = 0.02  # part of the prior that is spread evenly: the router may be sure and wrong


class Standings:
    """The weights of the arms of one answer; they sum to 1."""

    def __init__(self, arms: Sequence[str], *, rate: float = RATE, share: float = SHARE) -> None:
        """All arms begin alike. rate, share: see RATE and SHARE."""
        self.arms = list(arms)
        self.rate, self.share = rate, share
        self._place = {arm: i for i, arm in enumerate(self.arms)}
        self._logs: Floats = np.zeros(len(self.arms))  # of the weights, up to a constant

    @property
    def weights(self) -> dict[str, float]:
        return dict(zip(self.arms, self._weights().tolist(), strict=True))

    def keep(self, arms: Collection[str]) -> None:
        """Leave out all other arms. One at least must stay."""
        places = [self._place[arm] for arm in self.arms if arm in arms]
        self.arms = [self.arms[place] for place in places]
        self._place = {arm: i for i, arm in enumerate(self.arms)}
        self._set(self._logs[places])

    def among(self, arms: Collection[str]) -> dict[str, float]:
        """The weights of some arms beside each other alone, summing to 1."""
        found = {arm: weight for arm, weight in self.weights.items() if arm in arms}
        total = sum(found.values())
        return {arm: weight / total for arm, weight in found.items()}

    @property
    def leader(self) -> str:
        """The arm that should draft next; the first one where several stand alike."""
        return self.arms[int(self._logs.argmax())]

    def believe(self, prior: Mapping[str, float]) -> None:
        """Take in the router's probabilities, whenever they come. Arms that it does not name have none."""
        believed = np.array([max(0.0, prior.get(arm, 0.0)) for arm in self.arms])
        total = believed.sum()
        if total > 0:
            mixed = (1 - DOUBT) * believed / total + DOUBT / len(self.arms)
            self._set(self._logs + np.log(mixed))

    def learn(self, gains: Mapping[str, Sequence[float]], strength: float = 1.0) -> None:
        """Take in what arms would have gained at some tokens: 0 to 1 for each token, in the text's order.

        Arms that are not among them keep their weight, but for what is shared. strength: how much these
        tokens count beside others.
        """
        places = [self._place[arm] for arm in gains]
        table = np.array([list(gains[arm]) for arm in gains], dtype=float)
        if len(places) < 2:
            return
        weights = self._weights()
        for column in np.exp(self.rate * strength * table).T:
            seen = weights[places]
            moved = seen * column
            weights[places] = moved * (seen.sum() / moved.sum())
            weights = (1 - self.share) * weights + self.share / len(weights)
        self._set(np.log(weights))

    def _weights(self) -> Floats:
        raw = np.exp(self._logs - self._logs.max())
        result: Floats = raw / raw.sum()
        return result

    def _set(self, logs: Floats) -> None:
        self._logs = logs - logs.max()
