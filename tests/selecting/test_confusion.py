"""The router's confusion matrix: what answers that ended say of its next answers."""

from __future__ import annotations

import numpy as np
import pytest

from moedraft.selecting.prior.confusion import MEMORY, Confusion, Mistake

ARMS = ["shared", "sql", "python", "french"]


def said(name: str, sure: float = 1.0) -> dict[str, float]:
    rest = (1 - sure) / (len(ARMS) - 1)
    return {arm: sure if arm == name else rest for arm in ARMS}


def shown(best: str, sure: float = 0.9, arms: list[str] = ARMS) -> dict[str, float]:
    rest = (1 - sure) / (len(arms) - 1)
    return {arm: sure if arm == best else rest for arm in arms}


def taught(pairs: list[tuple[str, str]], times: int) -> Confusion:
    """After answers of which the router said the first, and which showed that the second was best."""
    confusion = Confusion()
    confusion.corrected(said("sql"))
    for _ in range(times):
        for router, best in pairs:
            confusion.learn(said(router), shown(best))
    return confusion


def test_at_first_the_router_is_believed() -> None:
    prior = {"shared": 0.2, "sql": 0.5, "python": 0.3, "french": 0.0}
    assert Confusion().corrected(prior) == pytest.approx(prior)


def test_probabilities_sum_to_one_whatever_was_seen() -> None:
    confusion, rng = Confusion(), np.random.default_rng(0)
    for _ in range(200):
        shares = dict(zip(ARMS, rng.dirichlet([0.3] * 4), strict=True))
        found = confusion.corrected(shares)
        assert sum(found.values()) == pytest.approx(1)
        assert min(found.values()) >= 0
        confusion.learn(shares, dict(zip(ARMS, rng.dirichlet([0.3] * 4), strict=True)))


def test_after_a_few_answers_a_domain_that_is_taken_for_another_begins_with_the_right_arm() -> None:
    found = taught([("sql", "python")], 6).corrected(said("sql"))
    assert max(found, key=lambda arm: found[arm]) == "python"


@pytest.mark.parametrize(("count", "answers"), [(4, 30), (16, 30), (64, 30)])
def test_a_router_that_was_right_for_long_is_corrected_too(count: int, answers: int) -> None:
    """Of many arms only some are compared; the others are as likely as they were."""
    arms = [str(i) for i in range(count)]
    shares, compared = {arm: float(arm == "1") for arm in arms}, arms[: min(count, 8)]
    confusion = Confusion()
    confusion.corrected(shares)
    for best, times in (("1", 60), ("2", answers)):
        for _ in range(times):
            confusion.learn(shares, shown(best, arms=compared))
    found = confusion.corrected(shares)
    assert max(found, key=lambda arm: found[arm]) == "2"


def test_a_router_that_was_wrong_elsewhere_is_doubted_where_nothing_was_seen() -> None:
    confusion = taught([("sql", "python"), ("python", "sql"), ("shared", "sql")], MEMORY)
    found = confusion.corrected(said("french", 0.99))
    assert 0.49 < found["french"] < 0.8
    assert max(found, key=lambda arm: found[arm]) == "french"


def test_one_domain_does_not_outvote_the_others() -> None:
    confusion = taught([("python", "python"), ("shared", "shared")], 10)
    for _ in range(200):
        confusion.learn(said("sql"), shown("python"))
    assert confusion.corrected(said("french"))["french"] > 0.7


def test_a_router_that_was_right_is_believed_though_it_errs_once() -> None:
    confusion = taught([("sql", "sql"), ("python", "python")], 20)
    confusion.learn(said("sql"), shown("python"))
    assert confusion.corrected(said("sql"))["sql"] > 0.9
    assert confusion.corrected(said("french"))["french"] > 0.9


def test_an_answer_that_tells_nothing_changes_nothing() -> None:
    confusion = taught([("sql", "python"), ("python", "python")], 5)
    before = {arm: confusion.corrected(said(arm)) for arm in ARMS}
    for _ in range(50):
        for arm in ARMS:
            confusion.learn(said(arm), dict.fromkeys(ARMS, 0.25))
            confusion.learn(said(arm), {"sql": 1.0})  # nobody was beside it
    for arm in ARMS:
        assert confusion.corrected(said(arm)) == pytest.approx(before[arm])


def test_what_was_long_ago_fades() -> None:
    confusion = taught([("sql", "python")], 100)
    for _ in range(2 * MEMORY):
        confusion.learn(said("sql"), shown("sql"))
    assert confusion.corrected(said("sql"))["sql"] > 0.7


def test_the_rates_of_a_simulated_router_are_found() -> None:
    """A router that takes two of three SQL prompts for Python; what answers show is noisy."""
    rng, confusion, seen = np.random.default_rng(1), Confusion(), []
    confusion.corrected(said("sql"))
    for i in range(400):
        best = rng.choice(["sql", "python"])
        says = "python" if best == "python" or rng.random() < 2 / 3 else "sql"
        shows = {arm: np.exp(2.5 * (arm == best) + rng.normal(0, 0.5)) for arm in ARMS}
        total = sum(shows.values())
        confusion.learn(said(says, 0.97), {arm: share / total for arm, share in shows.items()})
        if i >= 100:
            seen.append([confusion.corrected(said("python"))["sql"], confusion.corrected(said("sql"))["sql"]])
    wrong, right = np.mean(seen, axis=0)
    assert 0.3 < wrong < 0.5  # 2/5
    assert right > 0.8


def test_arms_come_and_go_and_others_keep_what_is_known_of_them() -> None:
    confusion = taught([("sql", "python")], 10)
    more = {"maths": 0.0, **said("sql")}
    assert confusion.corrected(more)["python"] > 0.5
    confusion.learn(said("sql"), shown("python"))  # an answer from before there was maths
    assert confusion.arms == [*more]
    fewer = {arm: p for arm, p in more.items() if arm not in ("french", "maths")}
    assert confusion.corrected(fewer)["python"] > 0.5
    assert confusion.corrected({"shared": 0.0, "sql": 1.0})["sql"] > 0.4
    assert confusion.corrected(said("sql"))["python"] < 0.3  # it was gone, and nothing is known of it now


def test_one_client_cannot_decide_for_all_others() -> None:
    """Of the last answers it counts as often as all others together; the others still correct the router."""
    confusion = Confusion()
    confusion.corrected(said("sql"))
    for i in range(30):
        confusion.learn(said("sql"), shown("sql"), f"client {i % 5}")
        for _ in range(20):
            confusion.learn(said("sql"), shown("python"), "flood")
    assert confusion.corrected(said("sql"))["sql"] > 0.5
    often = Confusion()
    often.corrected(said("sql"))
    for i in range(64):  # who asks most of all is counted too
        often.learn(said("sql"), shown("python"), "a probe" if i % 8 == 0 else "the main one")
    assert often.corrected(said("sql"))["python"] > 0.5
    alone = Confusion()
    alone.corrected(said("sql"))
    for _ in range(10):
        alone.learn(said("sql"), shown("python"), "the only one")
    assert alone.corrected(said("sql"))["python"] > 0.5


def test_what_cannot_have_been_seen_is_left_out() -> None:
    confusion = taught([], 0)
    confusion.learn(dict.fromkeys(ARMS, 0.0), shown("python"))
    confusion.learn(said("sql"), {})
    confusion.learn(said("sql"), {"nobody knows": 0.9, "nor this one": 0.1})
    assert confusion.corrected(said("sql")) == pytest.approx(said("sql"))


def test_with_a_single_arm_there_is_nothing_to_confuse() -> None:
    confusion = Confusion()
    assert confusion.corrected({"shared": 1.0}) == {"shared": 1.0}
    confusion.learn({"shared": 1.0}, {"shared": 1.0})
    assert confusion.corrected({"shared": 1.0}) == {"shared": 1.0}


def test_mistakes_are_told_where_answers_begin_otherwise() -> None:
    assert Confusion().mistakes() == []
    assert taught([("sql", "python")], 1).mistakes() == []
    [found] = taught([("sql", "python"), ("french", "french")], 12).mistakes()
    assert (found.said, found.best) == ("sql", "python")
    assert found == Mistake(
        "sql",
        "python",
        taught([("sql", "python"), ("french", "french")], 12).corrected(said("sql"))["python"],
    )
