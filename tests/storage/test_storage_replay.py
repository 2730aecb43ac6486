from __future__ import annotations

import logging
from pathlib import Path

import pytest
from slow_cases import slow
from sqlalchemy import select, update
from storage_fakes import domain, record

from moedraft.core import SHARED, InvalidRequest, ReplayRecord
from moedraft.storage import Home, Policy, Registry, ReplayBuffer
from moedraft.storage.records.replay import CHUNK
from moedraft.storage.tables import replay as table

pytestmark = pytest.mark.usefixtures("registry")


def first_tokens(records: list[ReplayRecord]) -> list[int]:
    return [one.token_ids[0] for one in records]


@pytest.fixture
def mixed(home: Home, registry: Registry) -> ReplayBuffer:
    """100 of sql (tokens 0–99), 20 of python (100–119), 4 of shared (200–203)."""
    registry.add_domain(domain("python"))
    replay = ReplayBuffer(home, 1000)
    replay.add([record(token=n) for n in range(100)])
    replay.add([record("python", token=100 + n) for n in range(20)])
    replay.add([record(SHARED, token=200 + n) for n in range(4)])
    return replay


def test_records_without_an_expert_are_found(mixed: ReplayBuffer) -> None:
    mixed.add([record(token=300, expert=SHARED), record(SHARED, token=301, pinned=True)])
    assert first_tokens(mixed.unclaimed(9)) == [203, 202, 201, 200]  # 300 is a registered domain's
    assert first_tokens(mixed.unclaimed(2)) == [203, 202]


def test_records_come_back_as_they_were(home: Home) -> None:
    replay = ReplayBuffer(home, 10)
    replay.add([])
    assert replay.records() == []
    assert replay.last_id() == 0
    stood = {"weights": {"sql": 0.75, SHARED: 0.25}, "heard": {"größer": 1.0}}
    replay.add([record(**stood)])
    assert replay.records() == [record(**stood)]
    replay.purge()
    replay.add([record(), record(SHARED, drafted=0, accepted=0, rejected=[])])
    assert replay.records("sql") == [record()]
    assert replay.records() == [record(SHARED, drafted=0, accepted=0, rejected=[]), record()]


def test_answers_are_those_of_the_records(home: Home, mixed: ReplayBuffer) -> None:
    made = [record(token=n, token_ids=[n, 2, 3 + n, 4, 5]) for n in range(3)]
    mixed.add(made)
    assert [one.tolist() for one in mixed.answers("sql", 2)] == [[5, 4, 5], [4, 4, 5]]
    last = mixed.last_id("sql")
    assert [one.tolist() for one in mixed.answers("sql", 9, last)] == [[5, 4, 5]]
    assert mixed.answers("sql", 9, last + 1) == mixed.answers("nobody", 9) == []
    with home.write() as connection:
        connection.execute(update(table).where(table.c.id == last).values(payload=b"damaged"))
    assert [one.tolist() for one in mixed.answers("sql", 2)] == [[4, 4, 5]]


def test_records_are_found_by_order_limit_and_id(mixed: ReplayBuffer) -> None:
    assert first_tokens(mixed.records("sql", limit=3)) == [99, 98, 97]
    assert first_tokens(mixed.records("sql", limit=2, newest_first=False)) == [0, 1]
    last = mixed.last_id("python")
    assert first_tokens(mixed.records("python", min_id=last)) == [119]
    assert first_tokens(mixed.records(newest_first=False, min_id=last + 1)) == [200, 201, 202, 203]
    assert mixed.counts_since("python", last - 5) == 5
    assert mixed.counts_since("sql", last) == 0
    assert mixed.counts_since(None, last) == 4
    assert mixed.counts_since(None, 0) == mixed.count() == 124
    assert mixed.count("python") == 20
    assert mixed.sizes() == {"python": 20, "shared": 4, "sql": 100}
    shares = {"sql": 100 / 124, "python": 20 / 124, SHARED: 4 / 124}
    assert mixed.traffic(1000, 3) == pytest.approx(shares)
    late = {"sql": 0.0, "python": 0.6, SHARED: 0.4}
    assert mixed.traffic(10, 3) == pytest.approx({n: (shares[n] + late[n]) / 2 for n in late})
    late = {"sql": 0.0, "python": 0.7, SHARED: 0.3}
    found = mixed.traffic(10, 3, {mixed.last_id()})
    assert found == pytest.approx({n: (shares[n] + late[n]) / 2 for n in late})
    assert mixed.last_id() == mixed.last_id(SHARED)
    assert mixed.last_id("nothing") == 0


def test_a_batch_is_added_whole_or_not_at_all(home: Home) -> None:
    replay = ReplayBuffer(home, 10)
    with pytest.raises(InvalidRequest):
        replay.add([record(), record(topk_ids=[])])
    assert replay.count() == 0


def test_records_of_a_removed_domain_are_dropped(home: Home, registry: Registry) -> None:
    replay = ReplayBuffer(home, 10)
    registry.remove_domain("sql")
    replay.add([record()])
    assert replay.sizes() == {SHARED: 1}


def test_fifo_is_bounded_per_domain(home: Home) -> None:
    replay = ReplayBuffer(home, 5)
    replay.add([record(token=n) for n in range(8)])
    replay.add([record(SHARED, token=50)])
    replay.add([record(token=8)])
    assert first_tokens(replay.records("sql")) == [8, 7, 6, 5, 4]
    assert replay.sizes() == {SHARED: 1, "sql": 5}


def test_hardest_keeps_the_most_refused(home: Home) -> None:
    replay = ReplayBuffer(home, 3, "hardest")
    replay.add([record(token=n, drafted=10, accepted=n) for n in (9, 2, 5, 0)])
    replay.add([record(token=77, drafted=0, accepted=0)])
    assert sorted(first_tokens(replay.records())) == [0, 2, 5]
    replay.add([record(token=78, drafted=10, accepted=5)])  # a tie: the newer stays
    assert sorted(first_tokens(replay.records())) == [0, 2, 78]


def deciles_chi_square(home: Home, policy: Policy, trials: int) -> float:
    """How unevenly 100 arrivals survive in a buffer of 10: chi-square of their deciles, 9 degrees."""
    replay, kept = ReplayBuffer(home, 10, policy, seed=1), [0] * 10
    for _ in range(trials):
        replay.add([record(token=n) for n in range(37)])
        replay.add([record(token=n) for n in range(37, 100)])
        for token in first_tokens(replay.records()):
            kept[token // 10] += 1
        replay.purge()
    assert sum(kept) == 10 * trials
    return sum((count - trials) ** 2 / trials for count in kept)


@pytest.mark.parametrize("trials", [40, slow(150)])
def test_the_reservoir_samples_uniformly(home: Home, trials: int) -> None:
    assert deciles_chi_square(home, "reservoir", trials) < 27.9  # p = 0.001


def test_control_fifo_is_not_uniform(home: Home) -> None:
    assert deciles_chi_square(home, "fifo", trials=20) > 100


def draws(home: Home) -> list[float]:
    with home.read() as connection:
        return list(connection.scalars(select(table.c.draw)))


def test_draws_are_repeatable_but_differ(path: Path, tmp_path: Path) -> None:
    def run(folder: Path) -> list[float]:
        for _ in range(2):  # the second time is a restart with the same seed
            with Home.open(folder) as home:
                ReplayBuffer(home, 100, "reservoir", seed=3).add([record(SHARED)] * 5)
                found = draws(home)
        return found

    first, second = run(tmp_path / "a"), run(tmp_path / "b")
    assert first == second
    assert len(set(first)) == 10


def test_without_a_seed_draws_differ(home: Home) -> None:
    for _ in range(2):
        ReplayBuffer(home, 100, "reservoir").add([record()] * 5)
    assert len(set(draws(home))) == 10


@pytest.mark.parametrize(("capacity", "policy"), [(0, "fifo"), (-1, "fifo"), (5, "lifo")])
def test_bad_settings_are_refused(home: Home, capacity: int, policy: Policy) -> None:
    with pytest.raises(InvalidRequest, match="replay"):
        ReplayBuffer(home, capacity, policy)


def test_a_sample_has_no_repeats_and_a_seed(mixed: ReplayBuffer) -> None:
    def drawn(name: str | None, n: int, seed: int) -> list[int]:
        return first_tokens(list(mixed.sample(name, n, seed)))

    sample = drawn("sql", 30, 5)
    assert len(set(sample)) == 30
    assert max(sample) < 100
    assert sample == drawn("sql", 30, 5)
    assert sample != drawn("sql", 30, 6)
    assert sample != sorted(sample)
    assert sorted(drawn("python", 99, 0)) == list(range(100, 120))
    assert len(drawn(None, 124, 0)) == 124
    assert drawn("nothing", 3, 0) == []


def test_a_sample_may_need_several_queries(home: Home) -> None:
    replay = ReplayBuffer(home, 10_000)
    replay.add([record(token=n) for n in range(CHUNK + 20)])
    sample = first_tokens(list(replay.sample("sql", CHUNK + 10, seed=1)))
    assert min(sample) < CHUNK
    assert len(set(sample)) == CHUNK + 10


@pytest.mark.parametrize(
    ("n", "shares"),
    [
        (6, (2, 2, 2)),
        (7, (3, 2, 2)),
        (24, (10, 10, 4)),
        (60, (36, 20, 4)),
        (999, (100, 20, 4)),
        (1, (1, 0, 0)),
        (0, (0, 0, 0)),
    ],
)
def test_stratified_samples_are_shared_evenly(
    mixed: ReplayBuffer, n: int, shares: tuple[int, int, int]
) -> None:
    sample = list(mixed.sample_stratified(n, seed=2))
    names = [one.domain for one in sample]
    assert (names.count("sql"), names.count("python"), names.count(SHARED)) == shares
    assert len(set(first_tokens(sample))) == len(sample)
    assert sample == list(mixed.sample_stratified(n, seed=2))


def test_stratified_is_shuffled_and_may_be_empty(mixed: ReplayBuffer) -> None:
    names = [one.domain for one in mixed.sample_stratified(40, seed=2)]
    assert names != sorted(names)
    assert names != sorted(names, reverse=True)
    mixed.purge()
    assert list(mixed.sample_stratified(4, seed=1)) == []


def test_a_sample_holds_one_target_only(mixed: ReplayBuffer) -> None:
    """The few records of the present target are all drawn, however many there are of a former one."""
    mixed.add([record(token=300 + n, target_id="new") for n in range(6)])
    mixed.add([record("python", token=400 + n, target_id="new") for n in range(2)])
    sql, python = list(range(300, 306)), [400, 401]
    assert sorted(first_tokens(list(mixed.sample("sql", 10, 1, "new")))) == sql
    assert sorted(first_tokens(list(mixed.sample_stratified(10, 1, "new")))) == sql + python
    assert len(list(mixed.sample(None, 5, 1, "new"))) == 5
    assert {one.target_id for one in mixed.sample_stratified(10, 1, "tiny")} == {"tiny"}
    assert list(mixed.sample_stratified(10, 1, "other")) == []


def test_a_sample_is_read_as_it_is_used(home: Home, mixed: ReplayBuffer) -> None:
    """What went meanwhile is left out, and nothing is held open."""
    sample = mixed.sample_stratified(124, seed=1)
    first = next(sample)
    mixed.purge("sql")
    rest = first_tokens(list(sample))
    assert len(rest) <= CHUNK - 1 + 24
    assert {*range(100, 120), *range(200, 204)} <= {first.token_ids[0], *rest}


def test_purging_removes_records_but_no_ids(mixed: ReplayBuffer) -> None:
    last = mixed.last_id()
    assert mixed.purge("sql") == 100
    assert mixed.sizes() == {"python": 20, SHARED: 4}
    assert mixed.purge() == 24
    assert mixed.purge() == 0
    mixed.add([record()])
    assert mixed.last_id() == last + 1  # ids are never reused


def test_a_damaged_record_is_skipped(
    home: Home, mixed: ReplayBuffer, caplog: pytest.LogCaptureFixture
) -> None:
    with home.write() as connection:
        connection.execute(update(table).where(table.c.id == 2).values(payload=b"nonsense"))
    with caplog.at_level(logging.WARNING):
        assert first_tokens(mixed.records("sql", newest_first=False, limit=3)) == [0, 2]
        assert len(list(mixed.sample("sql", 100, seed=1))) == 99
    assert "replay record 2 of 'sql' is damaged and skipped" in caplog.text


DAMAGED = (  # where JSON with a share for each arm is expected
    "{",
    "[" * 100_000,
    '"text"',
    "[1]",
    '{"sql": "much"}',
    '{"sql": null}',
    '{"sql": true}',
    '{"sql": NaN}',
    '{"sql": 1e999}',
    '{"sql": -0.5}',
    '{"sql": 1.5}',
    b"\xff\xfe",
)


@pytest.mark.parametrize("damage", ["'hot'", "-1.0", "9e999", "x'ff00'", "1e5"])
def test_a_damaged_temperature_counts_as_greedy(home: Home, mixed: ReplayBuffer, damage: str) -> None:
    mixed.add([record()])
    with home.write() as connection:
        connection.exec_driver_sql(f"UPDATE replay SET temperature = {damage} WHERE id = 2")
    assert [one.temperature for one in mixed.by_ids([1, 2])] == [0.75, 0.0]


@pytest.mark.parametrize("damage", DAMAGED)
def test_damaged_notes_of_how_the_drafts_stood_count_as_none(
    home: Home, mixed: ReplayBuffer, damage: str | bytes
) -> None:
    """One such row must not stop what reads records: learning, and refits of the router."""
    mixed.add([record(weights={"sql": 0.25, "maths": 0.75}, heard={"sql": 1.0})])
    with home.write() as connection:
        connection.execute(update(table).where(table.c.id == 2).values(weights=damage, heard=damage))
    (found,) = mixed.by_ids([2])
    assert (found.weights, found.heard, found.belief) == ({}, {}, 1.0)
    sound, damaged = mixed.compared(2)
    assert (sound.heard, damaged.id, damaged.heard) == ({"sql": 1.0}, 2, {})
    (newest,) = mixed.records("sql", limit=1)
    assert newest.belief == 0.25


def test_a_wrong_prompt_length_is_damage(
    home: Home, mixed: ReplayBuffer, caplog: pytest.LogCaptureFixture
) -> None:
    with home.write() as connection:
        connection.execute(update(table).where(table.c.id == 2).values(num_prompt_tokens=4))
    with caplog.at_level(logging.WARNING):
        assert first_tokens(mixed.records("sql", newest_first=False, limit=3)) == [0, 2]
    assert "replay record 2 of 'sql' is damaged and skipped" in caplog.text
