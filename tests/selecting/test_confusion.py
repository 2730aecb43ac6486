"""The router's confusion matrix: what answers that ended say of its next answers."""

from __future__ import annotations

import numpy as np
import pytest

from moedraft.selecting.prior.confusion import Confusion, Mistake

ARMS = ["shared", "sql", "python", "french"]


def said(name: str, sure: float = 1.0) -> dict[str, float]:
    rest = (1 - sure) / (len(ARMS) - 1)
    return {arm: sure if arm == name else rest for arm in ARMS}


def taught(pairs: list[tuple[str, str]], times: int) -> Confusion:
    """After answers of which the router said the first, and whose best arm was surely the second."""
    confusion = Confusion()
    for _ in range(times):
        for router, best in pairs:
            confusion.learn(said(router), {best: 1.0})
    return confusion


def test_at_first_the_router_is_believed() -> None:
    prior = {"shared": 0.2, "sql": 0.5, "python": 0.3, "french": 0.0}
    assert Confusion().corrected(prior) == pytest.approx(prior)


def test_probabilities_sum_to_one_whatever_was_seen() -> None:
    confusion, rng = Confusion(), np.random.default_rng(0)
    for _ in range(200):
        shares = dict(zip(ARMS, rng.dirichlet([0.3] * 4), strict=True))
        assert sum(confusion.corrected(shares).values()) == pytest.approx(1)
        confusion.learn(shares, dict(zip(ARMS, rng.random(4), strict=True)))


def test_after_four_answers_a_domain_that_is_taken_for_another_begins_with_the_right_arm() -> None:
    confusion = taught([("sql", "python")], 4)
    found = confusion.corrected(said("sql"))
    assert max(found, key=lambda arm: found[arm]) == "python"
    assert found["python"] > 0.5


def test_a_router_that_was_wrong_elsewhere_is_doubted_where_nothing_was_seen() -> None:
    before = Confusion().corrected(said("french"))["french"]
    doubted = taught([("sql", "python"), ("python", "sql")], 8).corrected(said("french"))
    assert before == pytest.approx(1)
    assert doubted["french"] < 0.7
    assert doubted["sql"] == pytest.approx(doubted["python"], rel=0.01)


def test_a_router_that_was_right_is_believed_though_it_errs_once() -> None:
    confusion = taught([("sql", "sql"), ("python", "python")], 20)
    confusion.learn(said("sql"), {"python": 1.0})
    assert confusion.corrected(said("sql"))["sql"] > 0.93
    assert confusion.corrected(said("french"))["french"] > 0.93


def test_an_answer_that_tells_nothing_changes_nothing() -> None:
    confusion = taught([("sql", "python"), ("python", "python")], 5)
    before = {arm: confusion.corrected(said(arm)) for arm in ARMS}
    for _ in range(50):
        for arm in ARMS:
            confusion.learn(said(arm), dict.fromkeys(ARMS, 0.25))
    for arm in ARMS:
        assert confusion.corrected(said(arm)) == pytest.approx(before[arm], abs=1e-6)


def test_likelihoods_count_by_their_ratios_only() -> None:
    one, other = Confusion(), Confusion()
    likelihoods = {"shared": 0.1, "sql": 0.2, "python": 0.6, "french": 0.1}
    for _ in range(10):
        one.learn(said("sql", 0.7), likelihoods)
        other.learn(said("sql", 0.7), {arm: 1e-9 * p for arm, p in likelihoods.items()})
    assert one.corrected(said("sql")) == pytest.approx(other.corrected(said("sql")))


def test_what_was_long_ago_fades() -> None:
    confusion = taught([("sql", "python")], 100)
    for _ in range(60):
        confusion.learn(said("sql"), {"sql": 1.0})
    assert confusion.corrected(said("sql"))["sql"] > 0.7


def test_the_rates_of_a_simulated_router_are_found() -> None:
    """A router that takes two of three SQL prompts for Python; what answers show is noisy."""
    rng, confusion = np.random.default_rng(1), Confusion()
    for _ in range(300):
        best = rng.choice(["sql", "python"])
        says = "python" if best == "python" or rng.random() < 2 / 3 else "sql"
        shows = {arm: np.exp(1.5 * (arm == best) + rng.normal(0, 0.5)) for arm in ARMS}
        confusion.learn(said(says, 0.97), shows)
    found = confusion.corrected(said("python"))
    assert 0.2 < found["sql"] < 0.6  # 2/5
    assert 0.4 < found["python"] < 0.8
    assert confusion.corrected(said("sql"))["sql"] > 0.8


def test_arms_come_and_go_and_others_keep_what_is_known_of_them() -> None:
    confusion = taught([("sql", "python")], 8)
    more = {**said("sql"), "maths": 0.0}
    found = confusion.corrected(more)
    assert found["python"] > 0.5
    assert "maths" in found
    fewer = {arm: p for arm, p in more.items() if arm not in ("french", "maths")}
    assert confusion.corrected(fewer)["python"] > 0.5
    without = {"shared": 0.0, "sql": 1.0, "french": 0.0}
    assert confusion.corrected(without)["sql"] == pytest.approx(1, abs=0.4)
    assert confusion.corrected(said("sql"))["python"] < 0.3  # it was gone, and nothing is known of it now


def test_what_cannot_have_been_seen_is_left_out() -> None:
    confusion = Confusion()
    confusion.learn(said("sql"), {"python": 0.0})
    confusion.learn(dict.fromkeys(ARMS, 0.0), {"python": 1.0})
    assert confusion.corrected(said("sql")) == pytest.approx(said("sql"))


def test_with_a_single_arm_there_is_nothing_to_confuse() -> None:
    confusion = Confusion()
    confusion.learn({"shared": 1.0}, {"shared": 1.0})
    assert confusion.corrected({"shared": 1.0}) == {"shared": 1.0}


def test_another_router_begins_anew() -> None:
    confusion = taught([("sql", "python")], 8)
    confusion.restart()
    assert confusion.corrected(said("sql")) == pytest.approx(said("sql"))


def test_mistakes_are_told_once_they_are_usual() -> None:
    assert Confusion().mistakes() == []
    assert taught([("sql", "python")], 3).mistakes() == []
    [found] = taught([("sql", "python"), ("french", "french")], 10).mistakes()
    assert found == Mistake("sql", "python", pytest.approx(1))
    confusion = taught([("sql", "python")], 10)
    for _ in range(30):
        confusion.learn(said("sql"), {"sql": 1.0})
    assert confusion.mistakes() == []
