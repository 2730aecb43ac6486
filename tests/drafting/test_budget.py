"""The draft budget: estimates that follow what verification shows, costs that never fall with width."""

from __future__ import annotations

import math
import random

import pytest

from moedraft.drafting.budget import AcceptanceModel, Budget, RoundCosts


def test_acceptance_model_learns_the_true_curve() -> None:
    rng = random.Random(0)
    model = AcceptanceModel()
    for _ in range(4000):
        confidence = rng.uniform(0.05, 0.98)
        x = math.log(confidence / (1 - confidence))
        hit = rng.random() < 1 / (1 + math.exp(-(0.6 * x + 0.8)))
        model.observe([confidence], int(hit))
    assert abs(model.w - 0.6) < 0.2
    assert abs(model.b - 0.8) < 0.25
    assert model.predict(0.9) > model.predict(0.3)


def test_only_verified_positions_count() -> None:
    model = AcceptanceModel()
    model.observe([0.9, 0.8, 0.7, 0.6], accepted=1)
    assert [hit for _, hit in model.seen] == [1.0, 0.0]


def test_a_falling_curve_is_refused() -> None:
    model = AcceptanceModel()
    for _ in range(50):
        model.observe([0.99], 0)
        model.observe([0.01], 1)
    assert model.w >= 0


def test_costs_are_medians_and_filled_in_by_a_line() -> None:
    table = RoundCosts()
    assert table.predict(1, 0) is None
    for ms in (10.0, 11.0, 500.0):
        table.observe(1, 0, ms)
    assert table.predict(1, 0) == 11.0
    assert table.predict(1, 2) is None  # nothing known about drafting yet
    table.observe(1, 2, 14.0)
    assert table.predict(1, 2) == 14.0
    assert table.predict(1, 3) == pytest.approx(14.0 + 0.15 * 11.0)
    table.observe(4, 0, 10.0)
    table.observe(4, 4, 50.0)  # dear: as dear for each token more
    assert table.predict(4, 5) == pytest.approx(60.0)
    table.observe(1, 6, 22.0)
    assert table.predict(1, 4) == pytest.approx(18.0)
    assert table.predict(2, 1) is None


def test_a_round_never_gets_cheaper_by_drafting_more() -> None:
    table = RoundCosts()
    table.observe(1, 2, 14.0)
    table.observe(1, 6, 9.0)  # noise
    predicted = [table.predict(1, k) or 0.0 for k in range(1, 9)]
    assert predicted == sorted(predicted)


def costs(budget: Budget, draft: float, verify: float, slope: float) -> None:
    budget.costs.predict = lambda rows, k: verify + slope * (k + 1) + draft * k  # type: ignore[method-assign]


def drafted(budget: Budget, acceptance: float) -> int:
    budget.model("x").mean = acceptance
    survival, expected, count = acceptance, 1 + acceptance, 1
    while budget.another(["x"], [survival], expected, count, 1):
        count += 1
        survival *= acceptance
        expected += survival
    return count


def test_drafts_longer_when_it_is_cheap_and_good() -> None:
    budget = Budget(16, 4)
    costs(budget, draft=1.0, verify=10.0, slope=0.1)
    lengths = [drafted(budget, a) for a in (0.3, 0.6, 0.8, 0.95)]
    assert lengths == sorted(lengths)
    assert lengths[0] <= 3 < 8 <= lengths[-1] <= 16
    costs(budget, draft=8.0, verify=10.0, slope=0.1)
    assert drafted(budget, 0.8) < lengths[2]


def test_the_choice_is_close_to_the_best_length() -> None:
    """Against brute force over all lengths, for a grid of costs and acceptance rates."""
    for a in (0.4, 0.6, 0.75, 0.9):
        for draft in (0.5, 1.5, 3.0):
            budget = Budget(16, 4)
            costs(budget, draft=draft, verify=10.0, slope=0.4)

            def rate(k: int, a: float = a, draft: float = draft) -> float:
                return (1 - a ** (k + 1)) / (1 - a) / (k * draft + 10.0 + 0.4 * (k + 1))

            best = max(rate(k) for k in range(1, 17))
            assert rate(drafted(budget, a)) > 0.97 * best


def test_no_draft_when_it_does_not_pay_but_now_and_then_one() -> None:
    budget = Budget(8, 4)
    costs(budget, draft=30.0, verify=10.0, slope=5.0)
    budget.model("x").mean = 0.2
    decisions = [budget.start(["x"], 1) for _ in range(100)]
    assert 2 <= sum(decisions) <= 4
    assert sum(budget.start(["x"], 1) for _ in range(2000)) <= 10  # in vain again and again: rarer
    assert not Budget(0, 0).start(["x"], 1)
    assert not budget.start([], 1)


def test_first_steps_draft_before_anything_is_measured() -> None:
    budget = Budget(8, 4)
    assert budget.start(["x"], 1)
    assert budget.another(["x"], [0.5], 1.5, 1, 1)
    assert not budget.another(["x"], [0.5], 1.5, 4, 1)
    assert not budget.another(["x"], [0.5], 1.5, 8, 1)


def test_now_and_then_a_plain_round_tells_what_drafting_is_worth() -> None:
    """Rounds of 5 ms plain and 8 ms drafted with 2 tokens: 1.25 times as fast."""
    budget = Budget(8, 4)
    budget.model("x").mean = 0.6
    assert budget.speedup is None
    plain = 0
    for _ in range(400):
        if budget.start(["x"], 1):
            budget.observe(1, 3, 2, 8.0)
        else:
            plain += 1
            budget.observe(1, 0, 1, 5.0)
    assert 4 <= plain <= 12
    assert budget.speedup == pytest.approx(1.25, abs=0.02)


def test_never_slower_than_plain_for_long() -> None:
    """Whole rounds are what counts: drafting that brings 1.5 tokens for twice the time is given up."""
    budget = Budget(8, 4)
    budget.model("x").mean = 0.34
    spent = 0.0
    tokens = 0
    for _ in range(2000):
        drafts = budget.start(["x"], 1)
        budget.observe(1, 3 if drafts else 0, 2 if drafts else 1, 12.0 if drafts else 5.0)
        spent, tokens = spent + (12.0 if drafts else 5.0), tokens + (2 if drafts else 1)
    assert spent / tokens < 1.03 * 5.0
    assert budget.speedup is not None
    assert budget.speedup > 0.97


def test_one_batch_may_mix_rows_that_draft_with_rows_that_do_not() -> None:
    budget = Budget(8, 4)
    costs(budget, draft=1.0, verify=10.0, slope=0.0)
    budget.model("x").mean = 0.7
    assert budget.start(["x"] * 8, 8)
    costs(budget, draft=4.0, verify=10.0, slope=0.0)
    assert not budget.start(["x"], 8)  # one row's tokens do not pay for eight rows' draft
