"""Standings in simulated answers: the prior is kept, corrected and followed; regret stays small."""

from __future__ import annotations

import numpy as np
import pytest

from moedraft.selecting.standings import Standings

ARMS = ["shared", "sql", "python", "french", "support", "maths"]
GOOD, BAD = 0.55, 0.30  # how often a fitting arm guesses right, and another one
RUNS, TOKENS = 100, 128


def hits(rng: np.random.Generator, best: list[int]) -> np.ndarray:
    """[arms, tokens] of 0 and 1; `best` is the fitting arm of each token. Guesses of all arms go together."""
    luck = rng.random(len(best))
    chance = np.full((len(ARMS), len(best)), BAD)
    chance[best, np.arange(len(best))] = GOOD
    alone = rng.random((len(ARMS), len(best)))
    # Half of the tokens are easy or hard for everybody alike, as in real text.
    together = rng.random(len(best)) < 0.5
    return np.where(together, luck < chance, alone < chance).astype(float)


def play(prior: dict[str, float], table: np.ndarray, step: int = 2) -> tuple[Standings, list[int]]:
    """The standings at the end, and who drafted each token; each round emits `step` tokens."""
    standings, drafted = Standings(ARMS), []
    standings.believe(prior)
    for first in range(0, table.shape[1], step):
        part = table[:, first : first + step]
        drafted += [ARMS.index(standings.leader)] * part.shape[1]
        standings.learn(dict(zip(ARMS, part.tolist(), strict=True)))
    return standings, drafted


def prior_for(arm: str, sure: float = 0.9) -> dict[str, float]:
    return {name: sure if name == arm else (1 - sure) / (len(ARMS) - 1) for name in ARMS}


def share_drafted(best: list[int], prior: dict[str, float], seed: int = 0) -> np.ndarray:
    """By token, how often the fitting arm drafted it."""
    rng, right = np.random.default_rng(seed), np.zeros(len(best))
    for _ in range(RUNS):
        _, drafted = play(prior, hits(rng, best))
        right += np.array(drafted) == np.array(best)
    return right / RUNS


def test_a_prior_that_is_right_costs_nothing() -> None:
    best = [1] * TOKENS
    right = share_drafted(best, prior_for("sql"))
    assert right[0] == 1
    assert right.mean() > 0.97


def test_a_prior_that_is_wrong_is_overruled() -> None:
    right = share_drafted([2] * TOKENS, prior_for("sql", 0.98))
    assert right[0] == 0
    assert right[32:].mean() > 0.7
    assert right[64:].mean() > 0.85
    assert right[16:32].mean() > 0.4


def test_without_a_prior_the_fitting_arm_is_found() -> None:
    assert share_drafted([3] * TOKENS, {})[24:].mean() > 0.8


def test_a_change_within_the_answer_is_followed() -> None:
    right = share_drafted([1] * TOKENS + [4] * TOKENS, prior_for("sql"))
    assert right[:TOKENS].mean() > 0.95
    assert right[TOKENS + 48 :].mean() > 0.8


def test_without_a_share_a_change_is_followed_late() -> None:
    """Negative control: what follows changes is the share."""
    rng, late, kept = np.random.default_rng(0), 0, 0
    for _ in range(50):
        table = hits(rng, [1] * TOKENS + [4] * TOKENS)
        for share in (0.0, 0.005):
            standings = Standings(ARMS, share=share)
            standings.believe(prior_for("sql"))
            standings.learn(dict(zip(ARMS, table[:, : TOKENS + 40].tolist(), strict=True)))
            late, kept = (
                late + (share == 0 and standings.leader == "support"),
                kept + (share > 0 and standings.leader == "support"),
            )
    assert late < 10 < 30 < kept


@pytest.mark.parametrize("prior", [prior_for("sql"), prior_for("french"), {}])
def test_regret_to_the_best_fixed_arm(prior: dict[str, float]) -> None:
    """Tokens that the best arm in hindsight would have guessed and those who drafted did not."""
    rng, regrets = np.random.default_rng(1), []
    for _ in range(RUNS):
        table = hits(rng, [1] * TOKENS)
        _, drafted = play(prior, table)
        regrets.append(table.sum(1).max() - table[drafted, np.arange(TOKENS)].sum())
    assert np.mean(regrets) < (1.5 if prior == prior_for("sql") else 8)


def test_an_arm_that_is_not_looked_at_keeps_its_weight() -> None:
    standings = Standings(ARMS, share=0.0)
    standings.believe(prior_for("maths", 0.5))
    before = standings.weights
    standings.learn({"sql": [1, 1, 1], "python": [0, 0, 0]})
    after = standings.weights
    assert after["maths"] == pytest.approx(before["maths"])
    assert after["sql"] + after["python"] == pytest.approx(before["sql"] + before["python"])
    assert after["sql"] > 50 * after["python"]


def test_one_arm_alone_tells_nothing() -> None:
    standings = Standings(ARMS)
    standings.learn({"sql": [0, 0, 0]})
    assert len(set(standings.weights.values())) == 1


def test_a_prior_of_unknown_names_changes_nothing() -> None:
    standings = Standings(ARMS)
    standings.believe({"other": 1.0})
    assert standings.leader == ARMS[0]
    assert sum(standings.weights.values()) == pytest.approx(1)
