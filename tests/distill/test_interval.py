"""How many records an update waits for follows what traffic and updates show."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from distill_rig import record

from moedraft.core import SHARED, Domain, GateDecision, RequestStats, UpdateRecord
from moedraft.distill.pace.interval import MOST_DOUBLINGS, SERIES, Interval, has_drifted
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


def outcome(gain: float | None = None, decision: GateDecision | None = "promote", n: int = 8) -> UpdateRecord:
    """The shared adapter's row of an update that the gate measured by `n` records."""
    return UpdateRecord(SHARED, 1, 4, 8, 0.5, 1.0, None, None, decision=decision, gain=gain, gate_records=n)


def fruitless(interval: Interval, times: int = 1) -> None:
    """So many updates that the gate discarded."""
    for _ in range(times):
        interval.settled(outcome(-0.1, "discard"), 1.0, published=False)


@pytest.fixture
def interval(store: Store) -> Interval:
    """Of a home with 24 requests of each of two domains, half of whose first guesses hit."""
    for name in ("code", "prose"):
        store.registry.add_domain(Domain(name, "", ("x",) * 8, 0.0))
        store.requests.add([request(name, 8 + i % 5) for i in range(24)])
    return Interval(store, every=16, horizon=1000)


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
    for _ in range(9):
        fruitless(interval)
        waits.append(interval.wanted(0))
    interval.settled(outcome(0.1), 1.0, published=True)
    waits.append(interval.wanted(0))
    assert waits == [16, 16, 32, 32, 32, 64, 64, 64, 128, 16]
    fruitless(interval, 30)
    assert interval.wanted(0) == 16 << MOST_DOUBLINGS


def test_a_publication_that_is_not_worth_its_time_changes_nothing(interval: Interval) -> None:
    """Requests take a second for 20 tokens in 20 steps, so .1 more tokens a step save 1000 of them 91 s."""
    for _ in range(3):
        interval.settled(outcome(0.1), 95.0, published=True)
    assert interval.wanted(0) == 32
    interval.settled(outcome(0.1), 85.0, published=True)
    assert interval.wanted(0) == 16


def test_a_gain_of_few_records_or_without_a_gate_is_believed(interval: Interval) -> None:
    fruitless(interval, 3)
    interval.settled(outcome(0.0, n=3), 1e6, published=True)
    assert interval.wanted(0) == 16
    fruitless(interval, 3)
    interval.settled(outcome(None, None), 1e6, published=True)
    assert interval.wanted(0) == 16


def test_what_was_published_without_a_gain_that_shows_makes_updates_neither_rarer_nor_more_frequent(
    interval: Interval,
) -> None:
    risen = outcome(-0.001)
    fruitless(interval, 2)
    assert interval.settled(risen, 60.0, published=True), "a further update may tell"
    assert interval.barren == 2
    assert not interval.settled(outcome(0.001), 60.0, published=True)
    assert interval.barren == 3
    for one in (outcome(-0.1, "discard"), risen, risen):
        interval.store.updates.add(one)
    interval.resume()
    assert interval.barren == 1 // SERIES


def test_what_a_candidate_took_before_it_is_published_counts(interval: Interval) -> None:
    interval.settled(outcome(0.02, "keep"), 60.0, published=False)
    interval.settled(outcome(0.1), 60.0, published=True)
    assert interval.barren == 2, "120 s are more than 91"
    interval.settled(outcome(0.1), 60.0, published=True)
    assert interval.barren == 0, "and each version is counted for itself"
    interval.settled(outcome(-0.1, "discard"), 60.0, published=False)
    interval.settled(outcome(0.1), 60.0, published=True)
    assert interval.barren == 0, "what was thrown away is over"


def test_an_update_pays_by_what_it_added_to_the_candidate(interval: Interval) -> None:
    pays = [
        interval.settled(outcome(gain, "keep"), 10.0, published=False, is_fresh=False)
        for gain in (0.1, 0.1, 0.15, 0.12)
    ]
    assert pays == [True, False, True, False]
    assert interval.settled(outcome(0.2), 10.0, published=True, is_fresh=False)
    assert not interval.settled(outcome(0.0, "keep"), 10.0, published=False, is_fresh=False)
    assert not interval.settled(outcome(-0.2, "keep"), 10.0, published=False, is_fresh=False)
    assert not interval.settled(outcome(-0.05, "keep"), 10.0, published=False, is_fresh=False), "harm undone"
    assert interval.barren == 0, "no update of new records was among them"


def test_a_domain_that_learned_little_does_not_wait_for_the_others(interval: Interval) -> None:
    store = interval.store
    fruitless(interval, 9)
    store.replay.add([record(i) for i in range(60)])
    store.registry.set_meta(f"trained:{SHARED}", str(store.replay.last_id()))
    store.replay.add([record(60 + i) for i in range(16)])
    assert [interval.wanted(news) for news in (15, 16, 127)] == [128, 128, 128]
    store.registry.add_domain(Domain("law", "", ("x",) * 8, 0.0))
    store.replay.add([record(i, "law") for i in range(3)])
    assert interval.wanted(19) == 128
    store.replay.add([record(9, "law")])
    assert [interval.wanted(news) for news in (15, 20, 127)] == [128, 16, 16]
    store.replay.add([record(100 + i, "law") for i in range(3 * 16)])
    store.registry.set_meta(f"trained:{SHARED}", str(store.replay.last_id()))
    store.replay.add([record(200 + i, "law") for i in range(16)])
    assert interval.wanted(16) == 128


def test_a_restart_goes_on_from_the_log(interval: Interval) -> None:
    def logged(shared: UpdateRecord, seconds: float = 1.0) -> None:
        """An update of three adapters and, before it, a version that was taken back."""
        log = interval.store.updates
        log.add(replace(shared, expert="code", decision="withdraw", seconds=0.0))
        for name in (SHARED, "code", "prose"):
            log.add(replace(shared, expert=name, seconds=seconds / 3))

    def resumed() -> Interval:
        made = Interval(interval.store, every=16, horizon=1000)
        made.resume()
        return made

    assert resumed().barren == 0
    for _ in range(3 * SERIES):
        logged(outcome(0.0, "discard"))
    assert resumed().wanted(0) == 32
    logged(outcome(0.1), seconds=95.0)
    assert resumed().wanted(0) == 32
    logged(outcome(0.1), seconds=85.0)
    assert resumed().wanted(0) == 16


@pytest.mark.parametrize(
    ("gain", "seconds", "paid"),
    [(None, 1e9, True), (0.0, 0.0, False), (-0.1, 0.0, False), (0.1, 90.0, True), (0.1, 92.0, False)],
)
def test_what_a_gain_saves_is_compared_with_what_it_took(
    interval: Interval, gain: float | None, seconds: float, paid: bool
) -> None:
    assert Payback(interval.store, 1000).is_paid(gain, seconds) is paid
    assert Payback(interval.store, 2000).is_paid(0.1, 180.0)
    assert Payback(interval.store, 10**9).is_paid(0.1, 1e6)


def test_only_decoding_is_made_shorter(store: Store) -> None:
    waited = replace(request("code", 10), seconds=10.0, time_to_first_token=9.0)
    store.requests.add([waited])
    payback = Payback(store, 1000)
    assert payback.is_paid(0.1, 90.0)
    assert not payback.is_paid(0.1, 92.0)


@pytest.mark.parametrize(("drafts", "most"), [(20, 91.0), (10, 47.6), (2, 9.9), (0, 9.9)])
def test_a_gain_counts_in_steps_that_the_model_guesses_in(store: Store, drafts: int, most: float) -> None:
    """Of 20 steps with one token each; in a tenth of them at least, since a better one would."""
    usual = request("code", 10)
    store.requests.add([replace(usual, speculation=replace(usual.speculation, num_drafts=drafts))])
    payback = Payback(store, 1000)
    assert payback.is_paid(0.1, most - 0.2)
    assert not payback.is_paid(0.1, most + 0.2)


def test_without_requests_every_gain_pays(store: Store) -> None:
    payback = Payback(store, 1000)
    assert payback.is_paid(1e-6, 1e9)
    assert not payback.is_paid(0.0, 1.0)
    store.requests.add([replace(request("code", 10), seconds=0.0)])
    assert payback.is_paid(1e-6, 1e9)


@pytest.mark.parametrize("seed", range(3))
def test_chance_is_no_drift(seed: int) -> None:
    rng = random.Random(seed)
    found = [has_drifted([rng.gauss(0.5, 0.15) for _ in range(32)]) for _ in range(300)]
    assert sum(found) <= 3
    moved = [
        has_drifted([rng.gauss(0.5, 0.1) for _ in range(24)] + [rng.gauss(0.2, 0.1) for _ in range(8)])
        for _ in range(300)
    ]
    assert sum(moved) >= 290


def test_drift_is_learned_from_once(interval: Interval) -> None:
    """A domain that fell silent after bad requests does not have everything updated for ever."""
    interval.store.requests.add([request("code", 2) for _ in range(8)])
    assert interval.wanted(4) == 4
    interval.settled(outcome(0.1), 1.0, published=True)
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
    interval = Interval(store, every=16, horizon=1000)
    fruitless(interval, 9)
    assert interval.wanted(0) == 16
    assert Interval(store, every=1000, horizon=1000).wanted(0) == 16
    store.close()


def test_few_requests_say_nothing() -> None:
    assert not has_drifted([0.9] * 7 + [0.0] * 8)
    assert has_drifted([0.9] * 8 + [0.0] * 8)
