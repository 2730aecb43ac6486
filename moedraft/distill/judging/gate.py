"""The gate: figures of a candidate on held-out records in, a decision out. It knows no model and no storage.

What counts is the number of tokens that one step of the target is expected to give (`measuring.figures`). The
candidate and what serves now are measured on the same records. How sure the gain is comes from a Bayesian
bootstrap over the records (Rubin 1981), made wider where there are few of them, as Student's t is wider than
the normal distribution.

Whether a guess is right varies two or three times more by chance than the probability that the draft gives
the right token, and both rise together. So a candidate is published too where the right tokens have become
more probable, which is the `witness` of a gain. One of the two has to be sure, and the other at least
DOUBTFUL (docs/experiments.md, "What the gate goes by").
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from moedraft.core import GateDecision
from moedraft.distill.measuring.figures import FEW, Chances, Measured, expected_tokens, joined

Shares = NDArray[np.float64]

SURE = 0.9  # probability of a gain that a promotion needs; with 1 − SURE or less a candidate surely does harm
SURE_AGAIN = 0.95  # the same where a line of candidates is looked at again
CONFIRMED = 0.95  # probability that right tokens became more probable, which suffices as well
DOUBTFUL = 0.3  # a promotion needs as much of the other of the two, and of a candidate's own records
MOST_KEPT = 6  # candidates in a row that may be trained on without being published …
LONGEST_KEPT = 9  # … or so many where a gain is LIKELY, so that only records are missing
LIKELY = 0.5  # beyond it a gain is likelier than a loss
RUINED = 0.1  # tokens per step; a candidate of a joint update that surely loses more is thrown away at once
WORSE = "It is surely worse than what serves, which goes on serving; training goes on from it for some time."
RISEN = "The right tokens have become more probable; that no more of them are guessed is within chance."
PROBABLE = "The right tokens have become more probable, which suffices; by guesses alone a gain is not sure."
DRAWS = 1000
SEED = 0  # of the bootstrap, so that the same figures always get the same answer
Z, Z_CONFIRMED = 1.2816, 1.6449  # of the normal distribution at SURE and at CONFIRMED


@dataclass(frozen=True)
class Seen:
    """What earlier candidates of the same line did on records that none of them had been trained on.

    A line is a candidate that was kept and those that were trained on from it.
    """

    before: Measured  # what serves, on the same records
    after: Measured


@dataclass(frozen=True)
class Verdict:
    """What is done with a candidate, and why."""

    decision: GateDecision
    records: int = 0  # held-out records that it was measured by
    gain: float | None = None  # in expected tokens per target step
    low: float | None = None  # the gain lies between these with a probability of 80 %
    high: float | None = None
    better: float = 0.5  # probability that it is better than what serves
    witness: float | None = None  # probability that the right tokens have become more probable
    static: float | None = None  # the gain over the draft base without any adapter
    reason: str | None = None  # why, where the figures alone do not say it
    unadapted: bool | None = None  # whether the draft base alone serves the domain now; None: as before

    @property
    def is_published(self) -> bool:
        return self.decision in ("promote", "along")


def compare(
    before: Measured,
    after: Measured,
    shares: Shares | None = None,
    enough: float = SURE,
) -> Verdict:
    """The gain and how sure it is; the decision is that of `decide` with nothing kept before.

    shares [records]: how much of the traffic each record stands for; without them, all the same.
    enough: the probability of a gain that a promotion needs.
    """
    count = before.records
    if not count:
        return Verdict("keep")
    both = np.stack([before.counts, after.counts], axis=1).astype(float)  # [records, 2, depth, 2]
    both *= 1.0 if shares is None else shares[:, None, None, None]
    old, new = expected_tokens(both.sum(0))
    gain = float(new - old)
    weights = np.random.default_rng(SEED).standard_exponential((DRAWS, count))
    drawn = expected_tokens(np.tensordot(weights, both, axes=1))  # [draws, 2]
    gains = gain + _widening(count if shares is None else counts_as(shares)) * (
        drawn[:, 1] - drawn[:, 0] - gain
    )
    better = float((gains > 0).mean() + (gains == 0).mean() / 2)
    low, high = np.quantile(gains, [1 - SURE, SURE])
    found = Verdict("keep", count, gain, float(low), float(high), better)
    if before.chances is not None and after.chances is not None:
        found = replace(found, witness=_witness(before.chances, after.chances, shares))
    decision = _decision(found, before.loss, after.loss, enough)
    unsure = decision == "promote" and count >= FEW and better < enough
    return replace(found, decision=decision, reason=(RISEN if gain <= 0 else PROBABLE) if unsure else None)


def _witness(before: Chances, after: Chances, shares: Shares | None) -> float:
    """The probability that the right token's own probability has risen, by the bootstrap of `compare`."""
    both = np.stack([before, after], axis=1) * (1.0 if shares is None else shares[:, None, None])
    weights = np.random.default_rng(SEED).standard_exponential((DRAWS, len(both)))
    sums = np.tensordot(weights, both, axes=1)  # [draws, 2, 2]
    rates = sums[..., 0] / np.maximum(sums[..., 1], 1e-9)
    risen = rates[:, 1] - rates[:, 0]
    wider = _widening(len(both) if shares is None else counts_as(shares), Z_CONFIRMED)
    risen = risen.mean() + wider * (risen - risen.mean())
    return float((risen > 0).mean() + (risen == 0).mean() / 2)


def decide(before: Measured, after: Measured, kept: int = 0, shares: Shares | None = None) -> Verdict:
    """Publish the candidate, train on from it, or go back to what serves.

    kept: how many candidates before this one were trained on without being published; shares: of the traffic.
    """
    return bounded(compare(before, after, shares), kept)


def decide_again(
    before: Measured, after: Measured, seen: Seen, kept: int, shares: Shares | None = None
) -> Verdict:
    """As `decide`, by the candidate's own records and all that its line has shown.

    So that more looks publish no more by chance, more certainty is asked for. The line's evidence is that of
    weights from before the last update, which must not speak against it.

    shares [records]: of the candidate's own records first, then of the line's.
    """
    befores, afters = joined([before, seen.before]), joined([after, seen.after])
    found = compare(befores, afters, shares, SURE_AGAIN)
    own = compare(before, after, None if shares is None else shares[: before.records])
    if found.decision == "promote" and own.better < DOUBTFUL and own.records >= FEW:
        reason = "The candidates before it were better than what serves, but it is not likely to be."
        found = replace(found, decision="keep", reason=reason)
    return bounded(found, kept)


def counts_as(shares: Shares) -> float:
    """How many records of equal shares tell as much as these (Kish's effective sample size)."""
    return float(shares.sum() ** 2 / (shares**2).sum())


def _widening(count: float, z: float = Z) -> float:
    """The factor that widens the bootstrap's spread over few records to that of Student's t, at `z`."""
    free = max(count - 1, 1.0)
    student = 1 + (z**2 + 1) / (4 * free) + (5 * z**4 + 16 * z**2 + 3) / (96 * free**2)
    return float(student * ((count + 1) / free) ** 0.5)


def _decision(found: Verdict, before: float | None, after: float | None, enough: float) -> GateDecision:
    assert found.gain is not None
    if found.records < FEW:
        improved = before is not None and after is not None and after < before
        return "promote" if improved and found.gain >= 0 else "keep"
    witness = 0.5 if found.witness is None else found.witness
    if suffices(found.better, witness, enough):
        return "promote"
    return "discard" if found.better <= 1 - SURE and witness <= LIKELY else "keep"


def suffices(better: float, witness: float, enough: float = SURE) -> bool:
    """Whether one of the two probabilities is sure, and the other not too small."""
    return (better >= enough or witness >= CONFIRMED) and min(better, witness) >= DOUBTFUL


def is_unseen(decision: GateDecision | None, gain: float | None, records: int | None) -> bool:
    """Whether something was published for its witness alone, while guesses showed no gain."""
    return decision == "promote" and gain is not None and gain <= 0 and (records or 0) >= FEW


def patient(found: Verdict, kept: int) -> Verdict:
    """The verdict, but a joint update's candidate that does some harm is kept, as one that shows nothing.

    Going back to what serves would lose all that was learned since. Where it was tried, the next updates made
    up for the harm (docs/experiments.md, "What the gate threw away"). kept: as in `bounded`.
    """
    ruined = found.high is not None and found.high < -RUINED
    if found.decision != "discard" or ruined or kept >= MOST_KEPT:
        return found
    return replace(found, decision="keep", reason=found.reason or WORSE)


def bounded(found: Verdict, kept: int) -> Verdict:
    """Discard a candidate where too many before it, in a row, were trained on without being published."""
    most = LONGEST_KEPT if found.better > LIKELY else MOST_KEPT
    worn_out = found.decision == "keep" and kept >= most
    return replace(found, decision="discard") if worn_out else found
