"""The draft budget: estimates that follow what verification shows, plans near the best there is."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Mapping

import pytest

from moedraft.drafting.lengths.acceptance import BELIEF, AcceptanceModel, RowAcceptance
from moedraft.drafting.lengths.budget import Budget, Plan


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


def test_a_new_version_is_not_judged_by_what_the_one_before_guessed() -> None:
    models = [AcceptanceModel(), AcceptanceModel()]
    for version, model in zip((2, 3), models, strict=True):
        for _ in range(1000):
            model.observe([0.5], 0, version=2)
        for _ in range(50):
            model.observe([0.5], 1, version)
    same, new = models
    assert len(new.seen) < len(same.seen) / 5
    assert new.mean > 0.45 > same.mean


def test_a_falling_curve_is_refused() -> None:
    model = AcceptanceModel()
    for _ in range(50):
        model.observe([0.99], 0)
        model.observe([0.01], 1)
    assert model.w >= 0


@pytest.mark.parametrize(
    ("confidences", "chances"),
    [
        ([1.0], [0.7]),  # always sure of itself
        ([1.0], [0.0]),
        ([1e-6], [0.9]),  # never sure, and right
        ([0.999, 1.0], [0.5, 0.9]),
        ([1.0, 0.5], [0.3, 0.4]),
        ([1.0, 0.01], [0.2, 0.9]),  # the wrong way round: one chance for all
    ],
)
def test_a_draft_that_is_wrong_about_itself_is_seen_through(
    confidences: list[float], chances: list[float]
) -> None:
    """Whatever it was believed before."""
    model, rng, falling = AcceptanceModel(), random.Random(0), chances == [0.2, 0.9]
    for _ in range(500):
        model.observe([0.5], int(rng.random() < 0.5))
    for confidence, chance in [*zip(confidences, chances, strict=True)] * 1000:
        model.observe([confidence], int(rng.random() < chance))
    expected = [sum(chances) / 2] * 2 if falling else chances
    assert [model.predict(confidence) for confidence in confidences] == pytest.approx(expected, abs=0.12)


def test_the_mean_learns_fast_at_first_and_slowly_then() -> None:
    """A request or two tell most; later no single request moves it by much."""
    model = AcceptanceModel()
    for _ in range(40):
        model.observe([0.5], 0)
    assert model.mean < 0.15
    for _ in range(1000):
        model.observe([0.5], 0)
    for _ in range(20):
        model.observe([0.5], 1)
    assert model.mean < 0.11


def test_a_row_is_what_its_expert_is_until_its_own_tokens_say_more() -> None:
    row = RowAcceptance()
    assert row.mean(0.3) == 0.3
    for _ in range(int(BELIEF)):
        row.observe(drafted=1, accepted=1)
    assert 0.6 < row.mean(0.3) < 0.7
    for _ in range(60):
        row.observe(drafted=3, accepted=0)
    assert row.mean(0.3) < 0.15
    for _ in range(100):  # it is not drafted for: there is nothing new to say, so it is given another chance
        row.observe(drafted=0, accepted=0)
    assert row.mean(0.3) == pytest.approx(0.3, abs=0.15)


def test_of_a_rows_tokens_only_those_that_were_judged_count() -> None:
    row = RowAcceptance()
    row.observe(drafted=4, accepted=1)  # one right, one wrong, two never looked at
    assert row.mean(0.5) == 0.5


def plain_first(budget: Budget, begin: float, step: float, wide: float, rows: int = 1) -> None:
    """Rounds that were measured: a plain one of 10 ms, and what each thing more costs in plain rounds."""
    budget.costs.observe(rows, 0, 0, 10.0)
    for steps in range(9):
        for width in range(max(steps, 1), 9):
            extra = (begin + step * steps if steps else 0.0) + wide * width
            for _ in range(9):
                budget.costs.observe(rows, steps, rows * width, 10.0 * (1 + extra))


def drafted(budget: Budget, acceptance: float) -> int:
    survival, expected, count = acceptance, 1 + acceptance, 1
    while budget.another([acceptance], [survival], expected, count, 1, (count, count + 1)):
        count += 1
        survival *= acceptance
        expected += survival
    return count


def test_drafts_longer_when_it_is_cheap_and_good() -> None:
    budget = Budget(8)
    plain_first(budget, 0.0, 0.1, 0.01)
    lengths = [drafted(budget, a) for a in (0.3, 0.6, 0.8, 0.95)]
    assert lengths == sorted(lengths)
    assert lengths[0] <= 3 < 7 <= lengths[-1] <= 8
    dear = Budget(8)
    plain_first(dear, 0.0, 0.8, 0.01)
    assert drafted(dear, 0.8) < lengths[2]


def test_the_choice_is_close_to_the_best_length() -> None:
    """Against brute force over all lengths, for a grid of costs and acceptance rates."""
    for a in (0.4, 0.6, 0.75, 0.9):
        for step in (0.05, 0.15, 0.3):
            budget = Budget(8)
            plain_first(budget, 0.1, step, 0.04)

            def rate(k: int, a: float = a, step: float = step) -> float:
                return (1 - a ** (k + 1)) / (1 - a) / (1.1 + k * (step + 0.04))

            best = max(rate(k) for k in range(1, 9))
            assert rate(drafted(budget, a)) > 0.97 * best


def test_no_draft_when_it_does_not_pay_but_now_and_then_one() -> None:
    budget = Budget(8)
    plain_first(budget, 1.0, 3.0, 0.5)
    decisions = [budget.plan({0: 0.2}, {}, 1).model for _ in range(200)]
    assert 2 <= sum(decisions) <= 4
    later = sum(budget.plan({0: 0.2}, {}, 1).model for _ in range(2000))
    assert later <= 27  # in vain again and again: rarer
    assert budget.plan({}, {}, 1) == Plan()
    assert Budget(0).plan({0: 0.2}, {0: [0.9]}, 1) == Plan()


def test_first_steps_draft_before_anything_is_measured() -> None:
    budget = Budget(8)
    assert budget.plan({0: 0.6}, {}, 1).model
    assert budget.another([0.6], [0.6], 1.6, 1, 1, (1, 2))
    assert not budget.another([0.6], [0.05], 2.0, 2, 1, (2, 3))
    assert not budget.another([0.6], [1.0], 9.0, 8, 1, (8, 9))


def test_now_and_then_a_plain_round_tells_what_drafting_is_worth() -> None:
    """Rounds of 5 ms plain and 8 ms drafted with 2 tokens: 1.25 times as fast."""
    budget = Budget(8)
    assert budget.speedup is None
    plain = 0
    for _ in range(400):
        if budget.plan({0: 0.6}, {}, 1).model:
            budget.observe(1, 3, 3, 2, 8.0)
        else:
            plain += 1
            budget.observe(1, 0, 0, 1, 5.0)
    assert 15 <= plain <= 18  # after 8, 16, 32, 64 and 128 drafting rounds, and after 128 more
    assert budget.speedup == pytest.approx(1.25, abs=0.02)


def test_a_comparison_is_not_drawn_out_by_rows_that_come_and_go() -> None:
    """Seven and eight rows by turns: three plain rounds when the one is due, and not half of all."""
    budget = Budget(8)
    plain = 0
    for number in range(600):
        rows = 7 + number % 2
        drafts = budget.plan(dict.fromkeys(range(rows), 0.8), {}, rows).model
        budget.observe(rows, int(drafts), rows * drafts, rows + rows * drafts, 10.0 + 3 * drafts)
        plain += not drafts
    assert 6 <= plain <= 40


def test_never_slower_than_plain_for_long() -> None:
    """Whole rounds are what counts: drafting that brings 1.5 tokens for twice the time is given up."""
    budget = Budget(8)
    spent = 0.0
    tokens = 0
    for _ in range(2000):
        drafts = budget.plan({0: 0.34}, {}, 1).model
        budget.observe(1, 3 if drafts else 0, 3 if drafts else 0, 2 if drafts else 1, 12.0 if drafts else 5.0)
        spent, tokens = spent + (12.0 if drafts else 5.0), tokens + (2 if drafts else 1)
    assert spent / tokens < 1.03 * 5.0
    assert budget.speedup is not None
    assert budget.speedup > 0.97


def test_a_slow_moment_of_the_machine_is_made_good_by_the_next_trial() -> None:
    """Drafting pays; for some rounds it takes three times as long, as beside other work."""
    budget, drafts = Budget(8), list[bool]()
    for number in range(700):
        model = budget.plan({0: 0.5}, {}, 1).model
        steps = drafted(budget, 0.5) if model else 0
        ms = 5.0 * (1 + 0.12 * steps)
        slow = model and 100 <= number < 120
        budget.observe(1, steps, steps, 1 + bool(steps), 3 * ms if slow else ms)
        drafts.append(model)
    assert sum(drafts[120:220]) < 10  # given up at such a price
    assert sum(drafts[120 + Budget.EXPLORE + 20 : 700]) > 400


def test_plain_rounds_of_a_slow_machine_count_no_longer_than_until_the_next_comparison() -> None:
    """Drafting takes 1.8 times as long and brings half a token. Plain rounds took three times as long once.

    Drafting is taken up when the machine has become fast again, since it looks cheap beside those, and given
    up when the plain rounds of one comparison have shown that it is not.
    """
    budget, drafts = Budget(8), list[bool]()
    budget._compare[1] = Budget.COMPARE  # as after many comparisons
    for _ in range(20):
        budget.observe(1, 0, 0, 1, 15.0)
    for _ in range(400):
        model = budget.plan({0: 0.5}, {}, 1).model
        budget.observe(1, int(model), int(model), 1 + model, 9.0 if model else 5.0)
        drafts.append(model)
    assert sum(drafts[: Budget.COMPARE]) == Budget.COMPARE
    assert sum(drafts[Budget.COMPARE + Budget.TRIES :]) < 10


@pytest.mark.parametrize(("before", "after"), [(5.0, 15.0), (15.0, 5.0)])
def test_one_comparison_tells_that_the_machine_has_become_slower_or_faster(
    before: float, after: float
) -> None:
    budget = Budget(8)
    for _ in range(9):
        budget.observe(1, 0, 0, 1, before)
    for _ in range(20):
        budget.observe(1, 1, 1, 1, 2 * after)
    for _ in range(Budget.TRIES):
        budget.observe(1, 0, 0, 1, after)
    assert budget.costs.measured(1, 0, 0) == after
    assert budget.costs.of(1, 1, 1) == pytest.approx(2.0, abs=0.2)


def test_comparisons_do_not_make_plain_rounds_look_fast() -> None:
    """Each time is off by up to a fifth either way; plain rounds are timed some at a time, others often."""
    rng, budget, found = random.Random(5), Budget(8), list[float]()
    for _ in range(300):
        for _ in range(20):
            budget.observe(1, 1, 1, 1, 9.0 * rng.uniform(0.8, 1.2))
        for _ in range(Budget.TRIES):
            budget.observe(1, 0, 0, 1, 6.0 * rng.uniform(0.8, 1.2))
        plain = budget.costs.measured(1, 0, 0)
        assert plain is not None
        found.append(plain)
    assert sum(found) / len(found) == pytest.approx(6.0, rel=0.01)


def test_one_batch_may_mix_rows_that_draft_with_rows_that_do_not() -> None:
    budget = Budget(8)
    plain_first(budget, 0.0, 0.2, 0.0, rows=8)
    assert budget.plan(dict.fromkeys(range(8), 0.7), {}, 8).model
    assert not budget.plan({0: 0.7}, {}, 8).model  # one row's tokens do not pay for eight rows' draft


# -- what was looked up -----------------------------------------------------------------------------


def test_the_model_is_tried_now_and_then_where_looking_up_suffices() -> None:
    """Else nobody would notice that it has learned."""
    budget = Budget(4, ragged=True)
    plain_first(budget, 0.3, 0.2, 0.02, rows=2)
    found = {0: [0.9, 0.8], 1: [0.9, 0.8]}
    plans = []
    for _ in range(2000):
        plan = budget.plan({0: 0.2, 1: 0.2}, found, 2)
        ms = 15.2 if plan.model else 10.2 if plan.looking else 10.0
        budget.observe(2, int(plan.model), 2 if plan.looking or plan.model else 0, 3, ms)
        plans.append(plan)
    tried = [plan for plan in plans if plan.model]
    assert 8 <= len(tried) <= 60
    assert budget.plan({0: 0.99, 1: 0.99}, {0: [0.3], 1: [0.3]}, 2).model


ragged = pytest.mark.parametrize("ragged", [False, True], ids=["padded", "ragged"])


@ragged
def test_a_row_takes_the_better_guess(ragged: bool) -> None:
    budget = Budget(4, ragged)
    plain_first(budget, 0.0, 0.05, 0.02, rows=2)
    sure, doubtful = [0.9, 0.8, 0.7, 0.6], [0.1, 0.01]
    plan = budget.plan({0: 0.6, 1: 0.6}, {0: sure, 1: doubtful}, 2)
    assert plan == Plan(True, {0: 4})


@ragged
def test_where_the_model_does_not_pay_a_doubtful_guess_still_does(ragged: bool) -> None:
    budget = Budget(4, ragged)
    plain_first(budget, 2.0, 1.0, 0.02, rows=2)
    plan = budget.plan({0: 0.6, 1: 0.6}, {1: [0.3, 0.1]}, 2)
    assert not plan.model
    assert plan.looking in ({1: 1}, {1: 2})


@ragged
def test_a_guess_that_costs_more_than_it_brings_is_left(ragged: bool) -> None:
    budget = Budget(4, ragged)
    plain_first(budget, 2.0, 1.0, 0.5, rows=8)
    chance = 0.3 if not ragged else 0.05
    assert budget.plan({}, {3: [chance, 0.01]}, 8) == Plan()


def test_without_padding_each_row_goes_as_far_as_it_pays() -> None:
    budget = Budget(4, ragged=True)
    plain_first(budget, 2.0, 1.0, 0.5, rows=2)
    assert budget.plan({}, {0: [0.9, 0.8, 0.7, 0.1], 1: [0.35, 0.1]}, 2) == Plan(False, {0: 3})


@ragged
def test_a_round_that_must_draft_takes_the_others_along(ragged: bool) -> None:
    """A seeded row drafts four tokens in any case; the rest pays nothing for the model any more."""
    budget = Budget(8, ragged)
    plain_first(budget, 2.0, 1.0, 0.1, rows=2)
    assert not budget.plan({1: 0.6}, {}, 2).model
    assert budget.plan({1: 0.6}, {}, 2, least=4).model


@ragged
@pytest.mark.parametrize("means", [{}, {1: 0.6}])
def test_a_seeded_row_may_draft_further_than_the_others(ragged: bool, means: dict[int, float]) -> None:
    """Its length is `num_speculative_tokens`, which may be more than `max_speculative_tokens`."""
    for found in ({}, {1: [0.9, 0.8]}):
        plan = Budget(4, ragged).plan(means, found, 2, least=9)
        assert set(plan.looking) <= set(found)


@ragged
def test_the_plan_is_close_to_the_best_of_all(ragged: bool) -> None:
    """Against brute force over what each row looks up, and every number of steps."""
    rng = random.Random(1)
    for _ in range(30):
        budget = Budget(4, ragged)
        slopes = rng.uniform(0, 0.3), rng.uniform(0.02, 0.2), rng.uniform(0.01, 0.15)
        plain_first(budget, *slopes, rows=3)
        a = rng.uniform(0.3, 0.9)
        found = {b: _chances(rng) for b in range(3) if rng.random() < 0.7}
        args = (slopes, a, found, ragged)
        choices = [range(len(found.get(b, ())) + 1) for b in range(3)]
        best = max(
            _rate(*args, dict(enumerate(far)), steps)
            for far in itertools.product(*choices)
            for steps in range(5)
        )
        plan = budget.plan(dict.fromkeys(range(3), a), found, 3)
        reached = max(_rate(*args, plan.looking, k) for k in (range(1, 5) if plan.model else range(1)))
        assert reached > 0.93 * best


@ragged
def test_without_anything_looked_up_the_length_is_the_best_one(ragged: bool) -> None:
    """Against brute force, exactly: there is nothing else to choose."""
    rng = random.Random(2)
    for _ in range(30):
        budget = Budget(4, ragged)
        slopes = rng.uniform(0, 0.3), rng.uniform(0.02, 0.2), rng.uniform(0.01, 0.15)
        plain_first(budget, *slopes, rows=3)
        means, least = [rng.uniform(0.2, 0.9) for _ in range(rng.randint(1, 3))], rng.choice([0, 0, 2])
        rates = {
            steps: (3 + sum(mean ** (i + 1) for mean in means for i in range(steps)))
            / float(budget.costs.relative(3, steps, steps * (len(means) if ragged else 3)))
            for steps in range(least, 5)
        }
        rate, steps, far = budget._best(means, {}, 3, least)
        assert (steps, far) == (max(rates, key=lambda one: rates[one]), {})
        assert rate == pytest.approx(rates[steps])


def _chances(rng: random.Random) -> list[float]:
    start = rng.uniform(0.2, 0.95)
    return [start ** (i + 1) for i in range(rng.randint(1, 4))]


def _rate(
    slopes: tuple[float, float, float],
    a: float,
    found: dict[int, list[float]],
    ragged: bool,
    far: Mapping[int, int],
    steps: int,
) -> float:
    """Tokens of a round of three rows per plain round's time; rows that look nothing up use the model."""
    begin, step, wide = slopes
    lengths = [far.get(b, 0) or steps for b in range(3)]
    tokens = 3.0 + sum(sum(found[b][:count]) for b, count in far.items() if count)
    tokens += sum(sum(a**k for k in range(1, steps + 1)) for b in range(3) if not far.get(b, 0))
    verified = sum(lengths) / 3 if ragged else max(lengths)
    return tokens / (1 + (begin + step * steps if steps else 0.0) + wide * verified)
