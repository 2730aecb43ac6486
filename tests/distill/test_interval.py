"""How many records an update waits for follows what traffic and updates show."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from distill_rig import record

from moedraft.core import Domain, RequestStats
from moedraft.distill.interval import Interval, has_drifted
from moedraft.speculation import SpeculationStats
from moedraft.storage.store import Store


def request(expert: str, hits: int, guesses: int = 20) -> RequestStats:
    """guesses: of the request's own expert that were looked at."""
    speculation = SpeculationStats(
        num_steps=guesses,
        num_drafts=guesses,
        num_draft_tokens=guesses,
        num_accepted_tokens=hits,
        first_guesses=guesses,
        right_first_guesses=hits,
    )
    return RequestStats("r", expert, 1, "", 8, 20, speculation, 1.0, "length")


@pytest.fixture
def interval(store: Store) -> Interval:
    """Of a home with 24 requests of each of two domains, half of whose first guesses hit."""
    for name in ("code", "prose"):
        store.registry.add_domain(Domain(name, "", ("x",) * 8, 0.0))
        store.requests.add([request(name, 8 + i % 5) for i in range(24)])
    return Interval(store, every=16)


def test_it_is_the_setting_while_nothing_moves(interval: Interval) -> None:
    interval.store.requests.add([request("code", 9 + i % 3) for i in range(8)])
    assert [interval.wanted(news) for news in (0, 4, 16)] == [16, 16, 16]


def test_after_a_drop_in_one_domain_a_few_records_are_enough(interval: Interval) -> None:
    interval.store.requests.add([request("code", 2 + i % 2) for i in range(8)])
    assert interval.wanted(3) == 16
    assert interval.wanted(4) == 4


def test_a_drop_is_seen_when_more_records_have_come(interval: Interval) -> None:
    assert interval.wanted(4) == 16
    interval.store.requests.add([request("prose", 1) for _ in range(8)])
    interval.store.replay.add([record(i) for i in range(4)])
    assert interval.wanted(4) == 4


def test_updates_that_bring_nothing_become_rarer_until_one_does(interval: Interval) -> None:
    waits = []
    for published in (False,) * 9 + (True,):
        interval.settled(published)
        waits.append(interval.wanted(0))
    assert waits == [16, 16, 32, 32, 32, 64, 64, 64, 64, 16]


@pytest.mark.parametrize("seed", range(3))
def test_chance_is_no_drift(seed: int) -> None:
    rng = random.Random(seed)
    found = [has_drifted([rng.gauss(0.5, 0.15) for _ in range(32)]) for _ in range(300)]
    assert sum(found) <= 9
    moved = [
        has_drifted([rng.gauss(0.5, 0.1) for _ in range(24)] + [rng.gauss(0.2, 0.1) for _ in range(8)])
        for _ in range(300)
    ]
    assert sum(moved) >= 290


def test_drift_is_learned_from_once(interval: Interval) -> None:
    """A domain that fell silent after bad requests does not have everything updated for ever."""
    interval.store.requests.add([request("code", 2) for _ in range(8)])
    assert interval.wanted(4) == 4
    interval.settled(True)
    assert interval.wanted(4) == 16
    interval.store.requests.add([request("prose", 9) for _ in range(8)])
    assert interval.wanted(4) == 16
    interval.store.requests.add([request("code", 2)])
    interval.store.replay.add([record(i) for i in range(4)])
    assert interval.wanted(4) == 4


def test_requests_for_which_others_drafted_say_nothing(interval: Interval) -> None:
    interval.store.requests.add([request("code", 2) for _ in range(8)])
    interval.store.requests.add([request("code", 0, 0) for _ in range(40)])
    assert interval.wanted(4) == 4


def test_it_never_waits_for_more_than_the_replay_holds(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "small", replay_capacity=32)
    interval = Interval(store, every=16)
    for _ in range(9):
        interval.settled(False)
    assert interval.wanted(0) == 16
    assert Interval(store, every=1000).wanted(0) == 16
    store.close()


def test_few_requests_say_nothing() -> None:
    assert not has_drifted([0.9] * 7 + [0.0] * 8)
    assert has_drifted([0.9] * 8 + [0.0] * 8)
