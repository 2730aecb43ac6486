"""How many records an update waits for follows what traffic and updates show."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from distill_rig import record

from moedraft.core import SHARED, Domain, RequestStats, UpdateRecord
from moedraft.distill.pace.interval import MOST_DOUBLINGS, PATIENCE, Interval, has_drifted
from moedraft.distill.pace.payback import Payback
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


def outcomes(gain: float | None = None, seconds: float = 0.0, *experts: str) -> list[UpdateRecord]:
    """Of an update of the shared adapter and these experts."""
    names = (SHARED, *experts)
    times = [seconds / len(names)] * len(names)
    return [
        UpdateRecord(n, 1, 4, 8, 0.5, t, None, None, gain=gain) for n, t in zip(names, times, strict=True)
    ]


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
        interval.settled(outcomes(), published)
        waits.append(interval.wanted(0))
    assert waits == [16, 16, 32, 32, 32, 64, 64, 64, 128, 16]
    for _ in range(30):
        interval.settled(outcomes(), False)
    assert interval.wanted(0) == 16 << MOST_DOUBLINGS


def test_a_publication_that_is_not_worth_its_time_changes_nothing(interval: Interval) -> None:
    """Requests take a second for 20 tokens in 20 steps, so .1 more tokens a step save 1000 of them 91 s."""
    for _ in range(3):
        interval.settled(outcomes(0.1, 95.0), True)
    assert interval.wanted(0) == 32
    interval.settled(outcomes(0.1, 85.0), True)
    assert interval.wanted(0) == 16


def test_updates_that_follow_without_new_records_belong_to_the_same_round(interval: Interval) -> None:
    for _ in range(2):
        interval.settled(outcomes(0.0, 60.0), False)
    interval.settled(outcomes(0.1, 60.0), True)
    assert interval.barren == 0, "61 s would still have paid"
    interval.settled(outcomes(0.0, 60.0), False)
    assert interval.barren == 1
    interval.settled(outcomes(0.1, 60.0), True, False)
    assert interval.barren == 1, "the round took 120 s by now, for 91 s"
    interval.settled(outcomes(0.05, 5.0), True, False)
    assert interval.barren == 0, "and gains .15 with this one, which saves 130 s"


def test_a_domain_that_learned_little_does_not_wait_for_the_others(interval: Interval) -> None:
    for _ in range(9):
        interval.settled(outcomes(0.0, 1.0, "code", "prose"), False)
    assert [interval.wanted(news) for news in (15, 16, 127)] == [128, 128, 128]
    interval.store.registry.add_domain(Domain("law", "", ("x",) * 8, 0.0))
    interval.store.replay.add([record(i, "law") for i in range(3)])
    assert interval.wanted(16) == 128
    interval.store.replay.add([record(9, "law")])
    assert [interval.wanted(news) for news in (15, 16, 127)] == [128, 16, 16]
    for _ in range(PATIENCE):
        interval.settled(outcomes(0.0, 1.0, "law"), False)
    assert interval.wanted(16) > 16


def test_after_a_restart_experts_are_known_from_the_log(interval: Interval) -> None:
    interval.store.registry.add_domain(Domain("law", "", ("x",) * 8, 0.0))
    interval.store.replay.add([record(i, "law") for i in range(4)])
    for name in ("code", "prose", "law") * PATIENCE:
        interval.store.updates.add(UpdateRecord(name, 1, 4, 8, 0.5, 1.0, None, None))
    again = Interval(interval.store, every=16)
    again.barren = PATIENCE
    assert again.wanted(16) == 16
    again.resume()
    assert again.wanted(16) == 32


@pytest.mark.parametrize(
    ("gain", "seconds", "paid"),
    [(None, 1e9, True), (0.0, 0.0, False), (-0.1, 0.0, False), (0.1, 90.0, True), (0.1, 92.0, False)],
)
def test_what_a_gain_saves_is_compared_with_what_it_took(
    interval: Interval, gain: float | None, seconds: float, paid: bool
) -> None:
    assert Payback(interval.store, 1000).is_paid(gain, seconds) is paid
    assert Payback(interval.store, 2000).is_paid(0.1, 180.0)


def test_without_requests_every_gain_pays(store: Store) -> None:
    payback = Payback(store, 1000)
    assert payback.is_paid(1e-6, 1e9)
    assert not payback.is_paid(0.0, 1.0)


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
    interval.settled(outcomes(), True)
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
        interval.settled(outcomes(), False)
    assert interval.wanted(0) == 16
    assert Interval(store, every=1000).wanted(0) == 16
    store.close()


def test_few_requests_say_nothing() -> None:
    assert not has_drifted([0.9] * 7 + [0.0] * 8)
    assert has_drifted([0.9] * 8 + [0.0] * 8)
