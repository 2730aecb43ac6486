"""How a forward grows with its tokens, and what a budget makes of that."""

from __future__ import annotations

import numpy as np
import pytest

from moedraft.drafting.lengths.budget import Budget
from moedraft.drafting.lengths.costs import PRIOR, RoundCosts
from moedraft.drafting.lengths.growth import Growth

STAIRS = {1: 10.0, 2: 10.0, 3: 10.0, 4: 10.0, 5: 12.0, 6: 12.0, 7: 18.0, 8: 18.0, 9: 18.0}


def stairs() -> Growth:
    growth = Growth.through(STAIRS, 8)
    assert growth is not None
    return growth


def test_between_and_beyond_what_was_measured_there_are_lines() -> None:
    growth = Growth.through({2: 20.0, 1: 10.0, 4: 30.0}, 3)
    assert growth is not None
    assert growth.at([1, 1.5, 3, 4, 6]).tolist() == pytest.approx([10, 15, 25, 30, 40])


def test_noise_does_not_make_more_tokens_cheaper() -> None:
    growth = Growth.through({1: 10.0, 2: 14.0, 3: 12.0}, 2)
    assert growth is not None
    assert growth.at([1, 2, 3, 9]).tolist() == [10.0, 12.0, 12.0, 12.0]


@pytest.mark.parametrize(("measured", "longest"), [({}, 8), ({1: 10.0}, 8), (STAIRS, 0)])
def test_too_little_tells_nothing(measured: dict[int, float], longest: int) -> None:
    assert Growth.through(measured, longest) is None


def test_tokens_that_cost_nothing_add_nothing() -> None:
    growth = stairs()
    assert growth.more(1, np.arange(9)).tolist() == pytest.approx([0, 0, 0, 0, 0.2, 0.2, 0.8, 0.8, 0.8])
    assert growth.more(2, 2) == pytest.approx(0)
    assert growth.more(5, 2) == pytest.approx(0.5)


def test_of_a_forward_that_hardly_grows_the_steps_are_noise() -> None:
    growth = Growth.through({1: 5.0, 4: 5.0, 5: 5.2, 9: 5.3}, 8)
    assert growth is not None
    assert growth.table(1).tolist() == pytest.approx([0.06 * n / 8 for n in range(9)])
    assert stairs().table(1).tolist() == pytest.approx(stairs().more(1, np.arange(9)).tolist())
    assert RoundCosts(growth=growth).of(1, 0, 4) == pytest.approx(1.03)


def test_what_is_flat_on_a_gpu_is_known_to_be_flat_for_any_number_of_rows() -> None:
    """Flat up to 128 tokens of 32 rows; no round of real requests was timed yet."""
    growth = Growth.through({n: 5.0 + max(0, n - 128) * 0.02 for n in (1, 5, 9, 32, 64, 96, 160, 256)}, 8)
    costs = RoundCosts(growth=growth)
    for rows in (1, 4, 8, 12):
        assert costs.of(rows, 0, 8) == pytest.approx(1.0, abs=0.05)


def test_costs_follow_the_stairs_before_and_after_rounds_are_timed() -> None:
    costs = RoundCosts(growth=stairs())
    assert [costs.of(1, 0, count) for count in (0, 3, 4, 8)] == pytest.approx([1, 1, 1.2, 1.8])
    assert costs.of(1, 1, 1) == pytest.approx(1 + PRIOR[0] + PRIOR[1])
    for _ in range(9):  # in truth what lies around the forward takes half of a round
        for verified, ms in ((0, 20.0), (3, 20.0), (5, 22.0), (8, 28.0)):
            costs.observe(1, 0, verified, ms)
    assert costs.of(1, 0, 3) == 1
    assert costs.of(1, 0, 8) == pytest.approx(1.4, abs=0.03)
    assert costs.of(1, 0, 12) == pytest.approx(float(costs.relative(1, 0, 12)))  # longer than any draft
    many = costs.relative(1, [[0], [1]], [0, 3, 8])
    assert many == pytest.approx(np.array([[costs.of(1, s, v) for v in (0, 3, 8)] for s in (0, 1)]))


def test_guesses_end_where_the_next_one_would_climb_a_stair() -> None:
    """Looked-up tokens of which each is accepted in nine of ten cases, or in one of five."""
    chances = [0.9**n for n in range(1, 9)]
    plain, steps = Budget(8, ragged=True), Budget(8, ragged=True)
    plain.costs = RoundCosts({1: np.array([0.0, 0.0, 0.1])})
    steps.costs = RoundCosts({1: np.array([0.0, 0.0, 0.1])}, stairs())
    assert plain.plan({}, {0: chances}, 1).looking == {0: 8}
    assert steps.plan({}, {0: chances}, 1).looking == {0: 5}
    weak = [0.2**n for n in range(1, 9)]
    assert plain.plan({}, {0: weak}, 1).looking == {0: 1}
    assert steps.plan({}, {0: weak}, 1).looking == {0: 3}  # they cost nothing


def test_rows_that_are_alike_do_not_make_a_round_climb_a_stair() -> None:
    """Four rows have looked up a token of the same chance each; for two of them there is room."""
    growth = Growth.through({1: 10.0, 4: 10.0, 6: 10.0, 7: 15.0, 36: 60.0}, 8)
    budget = Budget(8, ragged=True)
    budget.costs = RoundCosts(growth=growth)
    looking = budget.plan({}, {b: [0.24] for b in range(4)}, 4).looking
    assert list(looking.values()) == [1, 1]


def test_rows_of_numbers_that_were_not_timed_follow_the_growth_of_their_own() -> None:
    """One row does not grow before the fifth token, and eight do at once."""
    growth = Growth.through({1: 10.0, 4: 10.0, 8: 20.0, 16: 40.0, 72: 180.0}, 8)
    costs = RoundCosts({1: np.array([0.0, 0.0, 0.12]), 8: np.array([0.0, 0.0, 0.12])}, growth)
    assert costs.of(2, 0, 2) == pytest.approx(1.0)
    assert costs.of(6, 0, 6) == pytest.approx(growth.at(12) / growth.at(6))  # type: ignore[union-attr]


def test_a_step_is_taken_where_those_after_it_are_free() -> None:
    """The fourth guess climbs a stair that pays with the fifth; nothing pays for the next stair."""
    budget = Budget(8, ragged=True)
    budget.costs = RoundCosts({1: np.array([0.0, 0.02, 0.12])}, stairs())
    survival, expected, taken = 1.0, 1.0, 0
    while budget.another([0.85], [survival], expected, taken, 1, range(taken, 9)):
        survival, taken = 0.85 * survival, taken + 1
        expected += survival
    assert taken == 5
    assert not budget.another([0.85], [0.85**3], expected, 3, 1, (3, 4)), "by the next step alone"


def test_a_step_that_only_rows_at_their_limit_would_gain_by_is_not_taken() -> None:
    budget = Budget(8, ragged=True)
    budget.costs = RoundCosts(growth=stairs())
    asked = ([0.9], [0.9**3], 3.4, 3, 1)
    assert budget.another(*asked, range(3, 9))
    assert not budget.another(*asked, [3, 4, 4, 4, 4, 4], [4])
