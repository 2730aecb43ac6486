"""Which records are held out is decided once, when they are stored, so that every domain has its share."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import update
from storage_fakes import domain, record

from moedraft.core import SHARED, ReplayRecord
from moedraft.storage import Home, Registry, ReplayBuffer
from moedraft.storage.filing import file_under
from moedraft.storage.retention.holding import EVERY, FIRST, is_held_out, share
from moedraft.storage.store import Store
from moedraft.storage.tables import replay as table

pytestmark = pytest.mark.usefixtures("registry")

BY_HASH = [n for n in range(400) if is_held_out(record(token=n))]
OTHERS = [n for n in range(400) if n not in BY_HASH]


@pytest.fixture
def replay(home: Home) -> ReplayBuffer:
    return ReplayBuffer(home, 1000)


def sides(records: list[ReplayRecord]) -> list[bool]:
    """Whether each is held out, oldest first."""
    return [is_held_out(one) for one in reversed(records)]


def stored(
    replay: ReplayBuffer, tokens: list[int], name: str = "sql", *, together: bool = True
) -> list[bool]:
    """Add records with these prompts, at once or one by one; whether each of the domain is held out."""
    records = [record(name, token=n) for n in tokens]
    for some in [records] if together else [[one] for one in records]:
        replay.add(some)
    return sides(replay.records(name))


def test_the_hash_holds_out_one_of_eight() -> None:
    assert len(BY_HASH) == pytest.approx(400 / EVERY, rel=0.3)
    assert is_held_out(record(token=OTHERS[0], held_out=True))
    assert not is_held_out(record(token=BY_HASH[0], held_out=False))


@pytest.mark.parametrize("together", [True, False])
def test_a_domain_has_its_share_whatever_its_prompts_are(replay: ReplayBuffer, together: bool) -> None:
    found = stored(replay, OTHERS[:27], together=together)
    assert [n for n, one in enumerate(found, start=1) if one] == [FIRST, FIRST + EVERY, FIRST + 2 * EVERY, 27]
    for n in range(1, 28):
        assert sum(found[:n]) == share(n)


def test_what_the_hash_holds_out_counts(replay: ReplayBuffer) -> None:
    found = stored(replay, [*BY_HASH[:3], *OTHERS[:20]])
    assert found == [True] * 3 + [False] * 20


def test_each_domain_has_its_own_share(replay: ReplayBuffer, registry: Registry) -> None:
    registry.add_domain(domain("python"))
    names = {"sql": 0, "python": 4, "gone": 8}
    replay.add([record(name, token=OTHERS[n + begin]) for n in range(4) for name, begin in names.items()])
    for name in ("sql", "python", SHARED):  # a domain that is not registered is the shared one
        assert sides(replay.records(name)) == [False, False, True, False]


@pytest.mark.parametrize("together", [True, False])
def test_a_prompt_is_on_the_same_side_in_every_domain(
    replay: ReplayBuffer, registry: Registry, together: bool
) -> None:
    """The shared adapter learns from all of them."""
    registry.add_domain(domain("python"))
    made = [record(token=n) for n in OTHERS[:FIRST]]
    made += [record("python", token=n) for n in [OTHERS[FIRST - 1], *OTHERS[:FIRST]]]
    for some in [made] if together else [[one] for one in made]:
        replay.add(some)
    assert sides(replay.records("sql")) == [False, False, True]
    assert sides(replay.records("python")) == [True, False, False, True]


@pytest.mark.parametrize("together", [True, False])
def test_copies_of_a_prompt_stay_on_one_side(replay: ReplayBuffer, together: bool) -> None:
    first, second, third, fourth = OTHERS[:4]
    found = stored(replay, [first] * 9 + [second, third, third, first, fourth], together=together)
    assert found == [False] * 10 + [True, True] + [False] * 2


def test_a_flood_of_one_prompt_holds_out_nobody_else(replay: ReplayBuffer) -> None:
    assert sum(stored(replay, [OTHERS[0]] * 50 + OTHERS[1:8])) == 1


def test_who_says_so_decides(replay: ReplayBuffer) -> None:
    replay.add([record(token=OTHERS[0], held_out=True), record(token=BY_HASH[0], held_out=False)])
    assert sides(replay.records()) == [True, False]


def test_records_from_before_keep_their_side(home: Home, replay: ReplayBuffer) -> None:
    """They count for nothing, or all new prompts would be held out until there is one in eight."""
    stored(replay, OTHERS[:40])
    with home.write() as connection:
        connection.execute(update(table).values(held_out=None))
    assert not any(sides(replay.records()))
    found = stored(replay, [OTHERS[FIRST - 1], *OTHERS[40:50]])
    assert not any(found[:41])
    assert [n for n, one in enumerate(found[41:], start=1) if one] == [FIRST]


def test_a_record_that_moves_to_a_domain_keeps_its_side(tmp_path: Path) -> None:
    with closing(Store.open(tmp_path / "another")) as store:
        store.registry.add_domain(domain())
        store.replay.add([record(SHARED, token=n) for n in OTHERS[:4]])
        assert file_under(store, "sql", [one.id for one in store.replay.records()]) == 4
        assert sides(store.replay.records("sql")) == [False, False, True, False]


def test_renewed_as_records_leave(home: Home) -> None:
    small = ReplayBuffer(home, 16)
    stored(small, OTHERS[:200])
    kept = small.records()
    assert len(kept) == 16
    assert share(16) <= sum(sides(kept)) <= share(16) + 1
