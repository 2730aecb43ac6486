"""The gate's decisions, from figures alone: the law of small numbers holds and harm is seen."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from moedraft.distill.judging.gate import (
    CONFIRMED,
    LONGEST_KEPT,
    MOST_KEPT,
    PROBABLE,
    RISEN,
    SURE,
    Seen,
    Verdict,
    compare,
    decide,
    decide_again,
)
from moedraft.distill.measuring.figures import FEW, Counts, Measured, expected_tokens, joined

DEPTH = 4
TRIALS = 200


def counts_of(right: np.ndarray) -> Counts:
    """bool [records, tokens]: hits and tries by depth, drafted from every token on."""
    counts = np.zeros((len(right), DEPTH, 2), np.int64)
    alive = np.ones_like(right)
    for step in range(DEPTH):
        tried = alive[:, : right.shape[1] - step]
        alive = tried & right[:, step:]
        counts[:, step] = np.stack([alive.sum(1), tried.sum(1)], axis=1)
    return counts


def a_pair(
    rng: np.random.Generator, records: int, gain: float, loss: tuple[float, float] | None = None
) -> tuple[Measured, Measured]:
    """Two drafts that agree on most tokens of the same records; records differ in how hard they are."""
    base = rng.beta(6, 5, size=(records, 1))
    luck, other_luck = rng.normal(0, 0.04, size=(2, records, 1))  # the same spread, or there were a gain
    noise, other = rng.random((2, records, 48))
    same = rng.random((records, 48)) < 0.7  # of the tokens, the draws of which the two share
    before = noise < base + luck
    after = np.where(same, noise, other) < base + gain + other_luck
    losses = loss or (None, None)
    return Measured(counts_of(before), losses[0]), Measured(counts_of(after), losses[1])


def decisions(records: int, gain: float) -> Counter[str]:
    rng = np.random.default_rng(records)
    found = Counter(decide(*a_pair(rng, records, gain)).decision for _ in range(TRIALS))
    return Counter({name: round(found[name] / TRIALS, 3) for name in ("promote", "keep", "discard")})


def test_expected_tokens_multiply_along_the_draft() -> None:
    sums = np.array([[[3, 4], [1, 2], [0, 0]], [[4, 4], [4, 4], [4, 4]]], float)
    assert expected_tokens(sums).tolist() == [1 + 0.75 + 0.375, 4.0]


@pytest.mark.parametrize("records", [4, 8, 16, 48])
def test_without_a_gain_few_candidates_pass(records: int) -> None:
    shares = decisions(records, 0.0)
    assert shares["promote"] <= 0.14  # 10 %, and what chance adds in so many trials
    assert shares["discard"] <= 0.14


@pytest.mark.parametrize(("records", "gain", "least"), [(8, 0.12, 0.75), (16, 0.10, 0.9), (48, 0.06, 0.95)])
def test_with_a_clear_gain_nearly_all_pass(records: int, gain: float, least: float) -> None:
    assert decisions(records, gain)["promote"] >= least


@pytest.mark.parametrize("records", [16, 48])
def test_what_does_harm_never_passes(records: int) -> None:
    shares = decisions(records, -0.10)
    assert shares["promote"] == 0
    assert shares["discard"] >= 0.9


def test_the_interval_holds_the_true_gain_four_times_of_five() -> None:
    rng = np.random.default_rng(5)
    big = a_pair(rng, 20_000, 0.05)
    true = compare(*big).gain
    assert true is not None
    held = 0
    for _ in range(TRIALS):
        found = compare(*a_pair(rng, 12, 0.05))
        assert found.low is not None
        assert found.high is not None
        held += found.low <= true <= found.high
    assert 0.72 <= held / TRIALS <= 0.90


def test_a_candidate_that_changes_nothing_is_kept() -> None:
    before, _ = a_pair(np.random.default_rng(0), 16, 0.0)
    found = decide(before, before)
    assert (found.decision, found.gain, found.better) == ("keep", 0.0, 0.5)


@pytest.mark.parametrize(
    ("loss", "decision"), [((2.0, 1.5), "promote"), ((1.5, 2.0), "keep"), (None, "keep")]
)
def test_with_few_records_the_training_objective_decides(
    loss: tuple[float, float] | None, decision: str
) -> None:
    rng = np.random.default_rng(1)
    assert decide(*a_pair(rng, FEW - 1, 0.2, loss)).decision == decision
    worse = a_pair(rng, FEW - 1, -0.3, loss)
    assert decide(*worse).decision == "keep"  # the objective alone is not enough


def test_nothing_held_out_publishes_nothing() -> None:
    nothing = Measured(np.zeros((0, DEPTH, 2), np.int64), None)
    found = decide(nothing, nothing)
    assert (found.decision, found.gain, found.records) == ("keep", None, 0)


def test_nothing_is_kept_for_ever() -> None:
    before, _ = a_pair(np.random.default_rng(0), 16, 0.0)
    assert [decide(before, before, kept).decision for kept in range(MOST_KEPT + 1)] == [
        *["keep"] * MOST_KEPT,
        "discard",
    ]


def test_what_is_likely_better_may_wait_longer_for_records() -> None:
    rng = np.random.default_rng(2)
    found = next(
        pair for pair in (a_pair(rng, 6, 0.05) for _ in range(100)) if 0.75 <= compare(*pair).better < 0.9
    )
    assert decide(*found, MOST_KEPT).decision == "keep"
    assert decide(*found, LONGEST_KEPT).decision == "discard"


def test_the_loss_of_all_records_is_their_mean() -> None:
    rng = np.random.default_rng(0)
    first, _ = a_pair(rng, 3, 0.0, (1.0, 1.0))
    second, _ = a_pair(rng, 1, 0.0, (3.0, 1.0))
    whole = joined([first, second])
    assert (whole.records, whole.loss) == (4, 1.5)
    assert joined([]).records == 0


# -- guesses and their witness --------------------------------------------------------------------


def judged(hits: int, chance: float, records: int = 16) -> Verdict:
    """More of 100 guesses right in each record, and more chance given to the right token, about so."""
    swing = np.where(np.arange(records) % 2, 1, -1)

    def measured(more: np.ndarray, likelier: np.ndarray) -> Measured:
        right = np.stack([50 + more, np.full(records, 100)], axis=1)[:, None]
        return Measured(right, None, np.stack([40 + 100 * likelier, np.full(records, 100.0)], axis=1))

    before = measured(np.zeros(records, np.int64), np.zeros(records))
    return decide(before, measured(hits + 6 * swing, chance + 0.01 * swing))


def test_either_guesses_or_their_witness_can_be_sure() -> None:
    assert judged(5, 0.0).decision == "promote"
    assert judged(0, 0.02).decision == "promote"
    assert judged(0, 0.0).decision == "keep"


def test_the_other_one_must_not_speak_against_it() -> None:
    assert judged(5, -0.005).decision == "keep"
    assert judged(-2, 0.02).decision == "keep"


def test_only_what_neither_speaks_for_is_thrown_away() -> None:
    assert judged(-5, -0.02).decision == "discard"
    assert judged(-5, 0.02).decision == "keep"


def test_it_is_said_where_the_guesses_themselves_gained_nothing() -> None:
    found = judged(0, 0.02)
    assert (found.gain, found.reason) == (0.0, RISEN)
    assert judged(5, 0.02).reason is None


def test_it_is_said_where_the_guesses_alone_would_not_have_sufficed() -> None:
    found = judged(2, 0.02)
    assert (found.decision, found.reason) == ("promote", PROBABLE)
    assert found.better < SURE
    assert found.witness is not None
    assert found.witness >= CONFIRMED


def test_few_records_of_its_own_do_not_speak_against_a_candidate_of_a_line() -> None:
    """One or two records do not tell how much they vary."""
    rng = np.random.default_rng(3)
    before, after = a_pair(rng, 24, 0.3)
    seen = Seen(before, after)
    worse, better = a_pair(np.random.default_rng(4), 1, 0.5)[::-1], a_pair(rng, FEW, 0.3)
    assert decide_again(*worse, seen, 0).decision == "promote"
    refused = decide_again(*a_pair(rng, FEW, -0.3), seen, 0)
    assert (refused.decision, refused.reason is not None) == ("keep", True)
    assert decide_again(*better, seen, 0).decision == "promote"
