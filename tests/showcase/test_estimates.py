"""Figures with intervals, on numbers known beforehand."""

from __future__ import annotations

import numpy as np
import pytest

from moedraft.showcase.findings.estimates import change, quotient, ratio


def test_a_ratio_is_that_of_the_sums_and_lies_in_its_interval() -> None:
    found = ratio([(10, 10), (30, 10), (20, 10)] * 3)
    assert found.value == pytest.approx(2.0)
    assert 1.0 <= found.low < 2.0 < found.high <= 3.0


def test_the_interval_of_few_prompts_holds_the_truth_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    for prompts in (6, 12, 40):
        missed = 0
        for drawn in rng.normal(2.0, 0.3, (400, prompts)):
            found = ratio([(float(one), 1.0) for one in drawn])
            missed += not found.low <= 2.0 <= found.high
        assert 0.02 <= missed / 400 <= 0.08  # a bootstrap's own interval misses .12 with six


def test_equal_prompts_leave_no_doubt() -> None:
    found = ratio([(3, 2)] * 5)
    assert (found.low, found.high) == (pytest.approx(1.5), pytest.approx(1.5))


def test_a_change_is_paired() -> None:
    """The prompts differ far more from each other than each does from before to after."""
    before = [(10.0 * n, 10) for n in range(1, 9)]
    after = [(10.0 * n + 2, 10) for n in range(1, 9)]
    found = change(before, after)
    assert found.difference.value == pytest.approx(0.2)
    assert found.difference.low == pytest.approx(0.2)
    assert found.before.high > found.after.low
    assert found.verdict == "better"
    assert change(after, before).verdict == "worse"


def test_a_change_either_way_is_open() -> None:
    found = change([(1, 1), (2, 1), (3, 1), (4, 1)], [(2, 1), (1, 1), (4, 1), (3, 1)])
    assert found.verdict == "open"


def test_a_quotient_is_paired() -> None:
    """Each prompt is twice as fast, however long it takes."""
    slow = [(10, 1.0 * n) for n in range(1, 9)]
    fast = [(10, 0.5 * n) for n in range(1, 9)]
    found = quotient(fast, slow)
    assert (found.value, found.low, found.high) == (pytest.approx(2.0),) * 3
