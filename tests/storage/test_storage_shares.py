"""No client fills a domain's replay alone, whatever it sends."""

from __future__ import annotations

from collections import Counter
from itertools import count
from random import Random
from typing import Any

import pytest
from sqlalchemy import Engine, event, update
from storage_fakes import domain, record

from moedraft.core import ReplayRecord
from moedraft.storage import Home, Registry, ReplayBuffer
from moedraft.storage.retention.eviction import Policy, evict
from moedraft.storage.retention.shares import COPIES, LEAST_TAUGHT, Held, draw, of_many
from moedraft.storage.tables import replay as table

pytestmark = pytest.mark.usefixtures("registry")


def some(count: int, **changes: Any) -> list[ReplayRecord]:
    """Records of as many different prompts, no two calls share one."""
    return [record(token=next(PROMPTS), **changes) for _ in range(count)]


PROMPTS = count(1000)


def sources(replay: ReplayBuffer) -> Counter[str]:
    return Counter(one.source for one in replay.records("sql"))


@pytest.mark.parametrize("policy", ["fifo", "reservoir", "hardest", "stratified"])
def test_a_flood_of_pinned_records_takes_no_place_of_others(home: Home, policy: Policy) -> None:
    replay = ReplayBuffer(home, 40, policy, seed=1)
    replay.add(some(20, source="honest", drafted=4, accepted=4))
    for _ in range(10):
        replay.add(some(20, source="flood", pinned=True, drafted=4, accepted=0))
    assert sources(replay) == {"honest": 20, "flood": 20}


def test_stratified_keeps_as_many_of_each_client_and_the_newest(home: Home) -> None:
    replay = ReplayBuffer(home, 40, "stratified")
    for number, name in ((4, "few"), (70, "some"), (200, "many"), (20, "late")):
        replay.add([record(token=i, source=name) for i in range(number)])
    assert sources(replay) == {"few": 4, "some": 12, "many": 12, "late": 12}
    kept = sorted(one.token_ids[0] for one in replay.records("sql") if one.source == "many")
    assert kept == list(range(188, 200))


def test_alone_a_client_fills_everything(home: Home) -> None:
    replay = ReplayBuffer(home, 40)
    replay.add([record(token=i, source="one", pinned=True) for i in range(60)])
    assert [one.token_ids[0] for one in replay.records("sql")] == list(range(59, 19, -1))


def test_pinned_records_leave_first(home: Home) -> None:
    replay = ReplayBuffer(home, 40)
    for name in ("a", "b", "c", "d"):
        replay.add(some(10, source=name, pinned=name in "ab"))
    replay.add(some(10, source="e"))
    assert Counter(one.pinned for one in replay.records("sql")) == {True: 10, False: 30}


def test_two_that_are_too_large_give_both(home: Home) -> None:
    replay = ReplayBuffer(home, 40)
    replay.add([record(token=i, source="ab"[i % 2]) for i in range(100)])
    assert sources(replay) == {"a": 20, "b": 20}


def test_what_a_client_pins_is_a_small_part_of_what_is_learned_from(home: Home) -> None:
    replay = ReplayBuffer(home, 1000)
    replay.add(some(900, source="flood", pinned=True))
    replay.add(some(30, source="honest"))
    for drawn in (replay.sample("sql", 32, 0), replay.sample_stratified(32, 0)):
        assert Counter(one.source for one in drawn) == {"flood": 8, "honest": 24}
    assert Counter(one.source for one in replay.sample("sql", 192, 0)) == {"flood": 32, "honest": 30}


def test_one_client_is_not_most_of_what_is_drawn_though_others_leave_room(home: Home) -> None:
    """As many as all others together, or LEAST_TAUGHT; a client that is alone fills everything."""
    replay = ReplayBuffer(home, 1000)
    replay.add(some(300, source="flood"))
    first = replay.last_id()
    for drawn in (replay.sample("sql", 192, 0), replay.sample_stratified(192, 0), replay.newest(192, 1)):
        assert len(list(drawn)) == 192
    replay.add(some(20, source="honest"))
    for drawn in (replay.sample("sql", 192, 0), replay.sample_stratified(192, 0), replay.newest(192, 1)):
        assert Counter(one.source for one in drawn) == {"flood": LEAST_TAUGHT, "honest": 20}
    replay.add(some(40, source="other"))
    assert Counter(one.source for one in replay.sample("sql", 192, 0)) == {
        "flood": 60,
        "honest": 20,
        "other": 40,
    }
    assert Counter(one.source for one in replay.newest(192, first + 1)) == {"other": 32, "honest": 20}


def test_of_the_newest_a_flood_is_half(home: Home) -> None:
    """Half of each update of the feature drafter learns from what came last."""
    replay = ReplayBuffer(home, 1000)
    replay.add([record(source="before")])
    first = replay.last_id() + 1
    replay.add([record(token=i, source="honest") for i in range(30)])
    replay.add([record(token=100 + i, source="flood", pinned=i % 2 == 0) for i in range(500)])
    newest = list(replay.newest(32, first))
    assert Counter(one.source for one in newest) == {"flood": 16, "honest": 16}
    assert sum(one.pinned for one in newest) == 8
    assert newest[0].token_ids[0] == 599
    assert all(one.source != "before" for one in replay.newest(1000, first))


def test_the_newest_of_one_client_come_in_their_order(home: Home) -> None:
    replay = ReplayBuffer(home, 1000)
    replay.add([record(token=i) for i in range(20)])
    assert [one.token_ids[0] for one in replay.newest(8, 0)] == list(range(19, 11, -1))
    assert not list(replay.newest(8, 0, "another target"))


@pytest.mark.parametrize("policy", ["fifo", "reservoir", "hardest", "stratified"])
def test_one_prompt_asked_again_and_again_takes_few_places(home: Home, policy: Policy) -> None:
    """A health probe without a key, say; while there is room, copies have it, and other domains' stay."""
    replay = ReplayBuffer(home, 40, policy, seed=1)
    replay.add([record("shared", token=7) for _ in range(9)])
    replay.add(some(30, drafted=4, accepted=2))
    for _ in range(10):
        replay.add([record(token=7, drafted=4, accepted=0)])
    assert Counter(one.token_ids[0] for one in replay.records("sql"))[7] == 10
    for _ in range(50):
        replay.add([record(token=7, drafted=4, accepted=0)])
    assert replay.count("sql") == 30 + COPIES
    replay.add(some(6, drafted=4, accepted=2))
    assert replay.count("sql") == 40
    assert Counter(one.token_ids[0] for one in replay.records("sql"))[7] == COPIES
    assert replay.count("shared") == 9


def test_the_newest_copies_stay(home: Home) -> None:
    replay = ReplayBuffer(home, COPIES + 1)
    replay.add([record(token=7, accepted=i) for i in range(COPIES + 3)])
    replay.add([record(token=8)])
    kept = [one.accepted for one in replay.records("sql", newest_first=False) if one.token_ids[0] == 7]
    assert kept == [3, 4, 5, 6]


def test_a_client_cannot_push_out_the_record_of_another_with_its_prompt(home: Home) -> None:
    replay = ReplayBuffer(home, 40)
    replay.add([record(token=7, source="honest")])
    for i in range(100):
        replay.add([record(token=7, source="copier"), record(token=100 + i, source="busy")])
    assert sources(replay)["honest"] == 1


def test_prompts_that_differ_are_no_copies(home: Home) -> None:
    """One is the beginning of the other, or has the same tokens in another order."""
    replay = ReplayBuffer(home, 30)
    prompts = ([7, 2], [2, 7], [7, 2, 3])
    for _ in range(10):
        ids = [{"token_ids": [*one, 3, 4, 5], "num_prompt_tokens": len(one)} for one in prompts]
        replay.add([record(**one) for one in ids])
    replay.add([record(token=9)])
    held = Counter(tuple(r.token_ids[: r.num_prompt_tokens]) for r in replay.records("sql"))
    assert held == {(7, 2): 9, (2, 7): 10, (7, 2, 3): 10, (9, 2): 1}


def test_of_a_prompt_few_copies_are_drawn(home: Home) -> None:
    """The newest ones; other prompts are as likely as without them."""
    replay = ReplayBuffer(home, 1000)
    replay.add([record(token=i) for i in range(20)])
    replay.add([record(token=7, accepted=i) for i in range(300)])
    expected = sorted([*range(7), *[7] * COPIES, *range(8, 20)])
    for drawn in (replay.sample("sql", 64, 0), replay.sample_stratified(64, 0), replay.newest(64, 0)):
        records = list(drawn)
        assert sorted(one.token_ids[0] for one in records) == expected
        assert {one.accepted for one in records if one.token_ids[0] == 7} == {296, 297, 298, 299}
    newest = [one.token_ids[0] for one in replay.newest(COPIES + 2, 0)]
    assert newest == [7] * COPIES + [19, 18]


def test_a_client_that_repeats_the_prompts_of_another_takes_no_place_of_it(home: Home) -> None:
    replay = ReplayBuffer(home, 1000)
    replay.add([record(token=i, source="honest") for i in range(100)])
    for _ in range(3):
        replay.add([record(token=i, source="copier") for i in range(100)])
    for drawn in (replay.sample("sql", 64, 0), replay.sample_stratified(64, 0), replay.newest(64, 0)):
        assert Counter(one.source for one in drawn) == {"honest": 32, "copier": 32}


def test_the_same_prompts_in_another_domain_are_no_copies(home: Home, registry: Registry) -> None:
    registry.add_domain(domain("python"))
    replay = ReplayBuffer(home, 1000)
    replay.add([record(token=i) for i in range(20)])
    replay.add([record("python", token=i) for i in range(20) for _ in range(9)])
    counts = Counter(one.domain for one in replay.newest(1000, 0))
    assert counts == {"sql": 20, "python": 20 * COPIES}


def test_a_domain_of_copies_leaves_its_share_to_others(home: Home, registry: Registry) -> None:
    registry.add_domain(domain("python"))
    replay = ReplayBuffer(home, 1000)
    replay.add([record("python", token=7) for _ in range(300)])
    replay.add(some(100))
    counts = Counter(one.domain for one in replay.sample_stratified(32, 0))
    assert counts == {"python": COPIES, "sql": 32 - COPIES}


def test_no_query_of_an_eviction_reads_payloads(home: Home) -> None:
    """They lie in front of the columns that are asked for, on pages of their own; no client has too many."""
    ReplayBuffer(home, 8).add([record(token=i, source="abcd"[i % 4]) for i in range(8)])
    plans: list[str] = []

    def plan(connection: Any, cursor: Any, statement: str, parameters: Any, *_: Any) -> None:
        if statement.startswith(("SELECT", "DELETE")):
            found = connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", parameters)
            plans.extend(row.detail for row in found if "replay" in row.detail)

    event.listen(Engine, "after_cursor_execute", plan)
    try:
        with home.write() as connection:
            evict(connection, "sql", 7, "fifo", [("a", 5)])
    finally:
        event.remove(Engine, "after_cursor_execute", plan)
    searches = [one for one in plans if "SEARCH" in one or "SCAN" in one]
    assert any("COVERING INDEX replay_by_prompt (domain=? AND source=? AND prompt=?)" in o for o in searches)
    assert all("COVERING INDEX" in one or "INTEGER PRIMARY KEY" in one for one in searches), searches


def test_records_without_a_hash_are_unlike_all_others(home: Home) -> None:
    replay = ReplayBuffer(home, 12)
    replay.add([record(token=7) for _ in range(10)])
    with home.write() as connection:
        connection.execute(update(table).values(prompt=None))
    replay.add(some(4))
    assert len(list(replay.sample("sql", 99, 0))) == 12


def test_draws_are_uniform_where_nobody_dominates() -> None:
    """With a flood beside it, as a control, the only record of another source is always drawn."""
    held = [Held(i, "ab"[i % 2], False) for i in range(20)]
    counts = Counter(number for seed in range(2000) for number in draw(held, 10, Random(seed)))
    assert all(900 < counts[i] < 1100 for i in range(20))
    flooded = [Held(i, "a" if i else "b", False) for i in range(20)]
    counts = Counter(number for seed in range(200) for number in draw(flooded, 10, Random(seed)))
    assert counts[0] == 200


def test_drawing_repeats_by_its_seed_and_gives_all_there_are() -> None:
    held = [Held(i, "abc"[i % 3], i % 4 == 0) for i in range(30)]
    assert draw(held, 12, Random(5)) == draw(held, 12, Random(5)) != draw(held, 12, Random(6))
    assert sorted(draw(held, 100, Random(1))) == list(range(30))
    assert draw([], 5, Random(1)) == []


def test_an_operators_records_are_no_rival_of_the_only_key() -> None:
    """A warm start's have no key; beside them one key still gives all that it has."""
    held = [Held(i, "key" if i < 40 else "", False) for i in range(42)]
    assert len(of_many(held, 64, 3)) == 42
    rival = [*held, Held(42, "other", False)]
    assert len([i for i in of_many(rival, 64, 3) if i < 40]) == 3, "as many as the others have"
