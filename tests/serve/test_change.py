"""How a figure changed and whether that may be chance: the interval holds what it says."""

from __future__ import annotations

import random

import pytest

from moedraft.insight.change import (
    LEAST,
    Change,
    change_of_first_step_share,
    change_of_tokens_per_step,
    estimate,
    first_step_share,
    newest,
    student,
    tokens_per_step,
)
from moedraft.serve.dashboard.markup import changed, tone_of
from moedraft.storage.requests import ExpertStats, Outcome, Window

RNG = random.Random(5)


def stats(first: Window | None, recent: Window) -> ExpertStats:
    none = (0, 0, 0, 0, 0, 0, 0.0, None, None, None)
    return ExpertStats("sql", *none, first_window=first, recent_window=recent)


def drawn(count: int, chance: float, rng: random.Random) -> Window:
    """Requests of very different lengths, whose rounds emit a second token with about this chance."""
    found = []
    for _ in range(count):
        steps, own = rng.randint(5, 60), min(1.0, max(0.0, chance + rng.uniform(-0.15, 0.15)))
        hits = sum(rng.random() < own for _ in range(steps))
        found.append(Outcome(steps + hits, steps, steps, hits))
    return tuple(found)


@pytest.mark.parametrize(
    ("freedom", "quantile"), [(4, 2.7764), (8, 2.3060), (19, 2.0930), (49, 2.0096), (1e9, 1.9600)]
)
def test_quantiles_are_those_of_the_tables(freedom: float, quantile: float) -> None:
    assert student(freedom) == pytest.approx(quantile, abs=1e-2)


def test_figures_of_a_window() -> None:
    window = (Outcome(10, 5, 4, 3), Outcome(2, 1, 0, 0))
    assert (tokens_per_step(window), first_step_share(window)) == (2.0, 0.75)
    assert (tokens_per_step(()), first_step_share((Outcome(3, 3, 0, 0),))) == (None, None)
    assert newest(None) == newest(stats(None, ())) == ()
    assert newest(stats(window, ())) == window
    assert newest(stats(window, window[:1])) == window[:1]


def test_the_estimate_is_that_of_the_mean_where_all_are_alike() -> None:
    """With y = 1 throughout it is the mean and its usual standard error."""
    found = estimate([(x, 1) for x in (1, 2, 3, 4, 5)])
    assert found is not None
    assert (found.ratio, found.variance, found.freedom) == (3.0, pytest.approx(2.5 / 5), 4)


def test_too_few_requests_say_nothing() -> None:
    few, many = drawn(LEAST - 1, 0.5, RNG), drawn(30, 0.5, RNG)
    for first, recent in ((few, many), (many, few), (None, many), (many, ())):
        assert change_of_tokens_per_step(stats(first, recent)) is None
    silent = tuple(Outcome(9, 9, 0, 0) for _ in range(30))
    assert change_of_first_step_share(stats(silent, many)) is None
    assert change_of_tokens_per_step(stats(silent, many)) is not None


def test_a_change_and_no_change() -> None:
    change = change_of_tokens_per_step(stats(drawn(20, 0.2, RNG), drawn(50, 0.6, RNG)))
    assert change is not None
    assert change.low < change.difference == change.after - change.before < change.high
    assert (change.direction, tone_of(change)) == (1, "up")
    fell = change_of_first_step_share(stats(drawn(20, 0.8, RNG), drawn(50, 0.3, RNG)))
    assert fell is not None
    assert (fell.direction, tone_of(fell)) == (-1, "down")
    assert (Change(1.0, 1.1, -0.1, 0.3).direction, tone_of(Change(1.0, 1.1, -0.1, 0.3))) == (0, "same")
    assert tone_of(None) == ""


def found_a_change(first: float, last: float, rng: random.Random) -> bool:
    change = change_of_first_step_share(stats(drawn(20, first, rng), drawn(50, last, rng)))
    assert change is not None
    return change.direction != 0


def test_chance_alone_is_called_a_change_one_time_in_twenty() -> None:
    rng, tries = random.Random(17), 1500
    wrong = sum(found_a_change(0.5, 0.5, rng) for _ in range(tries))
    assert 0.03 < wrong / tries < 0.075


def test_a_real_change_is_found_more_often() -> None:
    """The control: the same test on requests that did change."""
    rng = random.Random(18)
    assert sum(found_a_change(0.5, 0.65, rng) for _ in range(200)) > 150


def test_how_a_change_is_written() -> None:
    change = Change(2.0, 1.75, -0.5, 0.0)
    assert changed(change) == "−0.25 ± 0.25"
    assert changed(Change(0.5, 0.625, 0.1, 0.15), shares=True) == "+12.5 ± 2.5"
    assert changed(None) == "–"
