"""What rounds cost: medians, a line through them, and a guess before anything is measured."""

from __future__ import annotations

import numpy as np
import pytest

from moedraft.drafting.lengths.costs import (
    FORGOTTEN,
    PAUSE,
    PLAIN,
    PRIOR,
    REFIT_EVERY,
    RoundCosts,
    shape_of,
)


def test_a_shape_is_known_by_its_median() -> None:
    costs = RoundCosts()
    assert costs.measured(1, 0, 0) is None
    for ms in (10.0, 11.0, 500.0):
        costs.observe(1, 0, 0, ms)
    assert costs.measured(1, 0, 0) == 11.0
    assert costs.measured(2, 0, 0) is None


def test_before_anything_is_measured_there_is_a_guess() -> None:
    begin, step, wide = PRIOR
    assert RoundCosts().relative(4, 2, 12) == pytest.approx(1 + begin + 2 * step + 3 * wide)
    assert RoundCosts().relative(4, 0, 0) == 1.0
    for shape in ((4, 0, 0), (4, 2, 12), (1, 3, 3), (8, 0, 5)):
        assert RoundCosts().of(*shape) == pytest.approx(float(RoundCosts().relative(*shape)))


def test_what_was_measured_before_holds_until_real_rounds_are_timed() -> None:
    cheap, dear = np.array([0.0, 0.1, 0.0]), np.array([0.1, 0.2, 0.1])
    costs = RoundCosts({1: cheap, 8: dear})
    assert costs.relative(1, 2, 2) == pytest.approx(1.2)
    assert costs.relative(6, 1, 6) == pytest.approx(1.4)  # as eight rows, which are nearer
    assert costs.measured(8, 0, 0) is None
    for _ in range(9):
        costs.observe(8, 0, 0, 10.0)
        costs.observe(8, 1, 8, 18.0)
        costs.observe(8, 2, 16, 24.0)
    assert costs.relative(8, 1, 8) == pytest.approx(1.8, rel=0.05)
    assert costs.relative(8, 3, 24) > 2.6


def test_full_batches_say_nothing_about_one_row_that_was_measured_before() -> None:
    """After a busy hour in which drafting did not pay, a single request is drafted for at once."""
    costs = RoundCosts({1: np.array([0.0, 0.07, 0.02]), 8: np.array([0.1, 0.2, 0.1])})
    for _ in range(9):
        for steps, ms in ((0, 60.0), (1, 100.0), (2, 130.0)):
            costs.observe(8, steps, 8 * steps, ms)
            costs.observe(6, steps, 6 * steps, ms)
    assert costs.relative(1, 2, 2) == pytest.approx(1.18)
    assert costs.relative(7, 1, 7) > 1.5  # as eight rows in truth


def test_the_line_follows_what_is_measured() -> None:
    costs = RoundCosts()
    costs.observe(4, 0, 0, 10.0)
    for steps, width in [(0, 1), (0, 4), (1, 1), (2, 4), (4, 4), (8, 8)]:
        ms = 10.0 * (1 + (0.5 + 0.2 * steps if steps else 0.0) + 0.03 * width)
        for _ in range(8):
            costs.observe(4, steps, 4 * width, ms)
    assert costs.relative(4, 3, 20) == pytest.approx(1 + 0.5 + 0.6 + 0.15, rel=0.15)
    assert costs.relative(4, 0, 24) == pytest.approx(1.18, rel=0.1)
    # Another number of rows of which only plain rounds are known takes after it.
    costs.observe(5, 0, 0, 12.0)
    assert costs.relative(5, 3, 25) == pytest.approx(costs.relative(4, 3, 20), rel=0.1)


def test_a_round_never_gets_cheaper_by_drafting_more() -> None:
    costs = RoundCosts()
    costs.observe(1, 0, 0, 10.0)
    costs.observe(1, 2, 2, 14.0)
    costs.observe(1, 6, 6, 5.0)  # noise
    predicted = [costs.relative(1, k, k) for k in range(9)]
    assert predicted == sorted(predicted)
    assert min(predicted) == 1.0


def test_many_shapes_at_once() -> None:
    costs = RoundCosts()
    costs.observe(2, 0, 0, 10.0)
    costs.observe(2, 3, 10, 21.0)
    steps, verified = np.arange(5)[:, None], np.arange(9)
    expected = [[float(costs.relative(2, int(s), int(v))) for v in verified] for s in steps[:, 0]]
    np.testing.assert_allclose(costs.relative(2, steps, verified), expected)


def test_a_little_drafting_is_not_taken_for_none() -> None:
    assert shape_of(8, 0, 0) == PLAIN
    assert shape_of(8, 0, 1) == (0, 0.5)
    assert shape_of(8, 1, 8) == (1, 1.0)
    assert shape_of(8, 2, 27) == (2, 3.5)


def test_a_shape_not_seen_for_long_is_forgotten() -> None:
    """Four slow rounds in a bad moment; then plain ones only, for nobody drafts at such a price."""
    costs = RoundCosts()
    for ms in (40.0, 45.0, 50.0, 40.0):
        costs.observe(1, 4, 4, ms)
    costs.observe(1, 0, 0, 5.0)
    dear = float(costs.relative(1, 2, 2))
    for _ in range(FORGOTTEN + 20):
        costs.observe(1, 0, 0, 5.0)
    assert dear > 2
    assert float(costs.relative(1, 2, 2)) == pytest.approx(float(1 + PRIOR @ [1, 2, 2]))
    assert costs.measured(1, 4, 4) is None


def test_what_a_trial_shows_after_a_pause_outweighs_what_was_timed_before() -> None:
    costs = RoundCosts()
    for steps in (1, 2):
        for _ in range(9):
            costs.observe(1, steps, steps, 50.0)
    for _ in range(PAUSE + 1):
        costs.observe(1, 0, 0, 5.0)
    dear = costs.of(1, 2, 2)
    for _ in range(REFIT_EVERY):
        costs.observe(1, 1, 1, 6.0)
    assert dear > 5
    assert costs.of(1, 1, 1) == pytest.approx(1.2, abs=0.1)
    assert costs.of(1, 2, 2) < 2  # of two steps only old times are known, and these count no more


def test_old_times_are_forgotten() -> None:
    costs = RoundCosts()
    costs.observe(1, 0, 0, 10.0)
    for ms in [100.0] * 20 + [15.0] * 20:
        costs.observe(1, 1, 1, ms)
    assert costs.relative(1, 1, 1) < 2
