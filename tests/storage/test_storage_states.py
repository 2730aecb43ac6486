"""States that are kept with replay records: bounded, bound to a draft base, gone with their record."""

from __future__ import annotations

import logging

import pytest
import torch
from sqlalchemy import func, select, update
from storage_fakes import BASE, record

from moedraft.core import KeptStates, ReplayRecord
from moedraft.storage import Home, Registry, ReplayBuffer
from moedraft.storage.db import DATABASE, StorageFull
from moedraft.storage.records.states import HEADER
from moedraft.storage.tables import replay_states

pytestmark = pytest.mark.usefixtures("registry")

WIDTH = 8
BYTES = HEADER.size + 2 * 4 * WIDTH  # of a record of five tokens


def kept(value: float, base_hash: str = BASE) -> KeptStates:
    return KeptStates(base_hash, torch.full((4, WIDTH), value, dtype=torch.bfloat16))


def first_values(replay: ReplayBuffer, base_hash: str = BASE) -> dict[int, float]:
    """By the first token of each record that has its states, the first number of these."""
    records = replay.records()
    tokens = {one.id: one.token_ids[0] for one in records}
    return {tokens[number]: float(one[0, 0]) for number, one in replay.states(records, base_hash).items()}


def rows(home: Home) -> int:
    with home.read() as connection:
        return connection.scalar(select(func.count()).select_from(replay_states)) or 0


def numbered(count: int) -> tuple[list[ReplayRecord], list[KeptStates]]:
    return [record(token=n) for n in range(count)], [kept(float(n)) for n in range(count)]


def test_states_come_back_as_they_were(home: Home) -> None:
    replay = ReplayBuffer(home, 10, states_bytes=10_000)
    states = torch.randn(4, WIDTH).to(torch.bfloat16)
    replay.add([record(token=1), record(token=2), record(token=3)], [None, KeptStates(BASE, states), None])
    replay.add([record(token=4)])
    found = replay.states(replay.records(), BASE)
    assert [one.token_ids[0] for one in replay.records() if one.id in found] == [2]
    assert torch.equal(next(iter(found.values())), states)
    assert replay.states_size() == BYTES
    assert replay.states(replay.records(), "another base") == {}
    assert replay.states([], BASE) == {}


def test_each_record_has_its_own(home: Home) -> None:
    replay = ReplayBuffer(home, 1000, states_bytes=10**6)
    replay.add(*numbered(100))
    assert first_values(replay) == {n: float(n) for n in range(100)}


def test_the_oldest_go_first_and_their_records_stay(home: Home) -> None:
    replay = ReplayBuffer(home, 10, states_bytes=5 * BYTES + 5)
    replay.add(*numbered(4))
    assert sorted(first_values(replay)) == [0, 1, 2, 3]
    replay.add([record(token=n) for n in (5, 6)], [kept(5), kept(6)])
    assert sorted(first_values(replay)) == [1, 2, 3, 5, 6]
    assert replay.states_size() <= 5 * BYTES
    assert replay.count() == 6


def test_one_that_is_large_does_not_empty_the_rest(home: Home) -> None:
    replay = ReplayBuffer(home, 10, states_bytes=4 * BYTES)
    large = KeptStates(BASE, torch.ones(5, WIDTH))  # one position more than a quarter
    replay.add([record(token=1), record(token=2), record(token=3)], [kept(1), large, kept(3)])
    assert sorted(first_values(replay)) == [1, 3]


@pytest.fixture
def journal(home: Home, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The journal's bytes whenever it was about to be emptied; of pieces of 64 kB."""
    sizes, checkpoint = list[int](), Home.checkpoint
    file = home.path / f"{DATABASE}-wal"

    def noting(home: Home, *, wait: bool = True) -> bool:
        sizes.append(file.stat().st_size)
        return checkpoint(home, wait=wait)

    home.checkpoint()
    monkeypatch.setattr(Home, "checkpoint", noting)
    for module in ("states", "replay"):
        monkeypatch.setattr(f"moedraft.storage.records.{module}.PIECE", 2**16)
    return sizes


def many(count: int) -> tuple[list[ReplayRecord], list[KeptStates]]:
    """With 16 kB of states each."""
    states = torch.ones(16, 512, dtype=torch.bfloat16)
    return [record(token=n) for n in range(count)], [KeptStates(BASE, states)] * count


@pytest.mark.parametrize("limit", [0, 2**17])
def test_a_lower_bound_needs_little_room(home: Home, journal: list[int], limit: int) -> None:
    """What is deleted is overwritten through the journal, which is to fit on a disk that is nearly full."""
    ReplayBuffer(home, 100, states_bytes=2**30).add(*many(100))
    home.checkpoint()
    journal.clear()
    lower = ReplayBuffer(home, 100, states_bytes=limit)
    lower.trim_states()
    assert lower.states_size() <= limit
    assert rows(home) == limit // 16384 - bool(limit)
    assert len(journal) > 20
    assert max(journal) < 3 * 2**16
    assert lower.count() == 100


def test_a_purge_needs_little_room(home: Home, registry: Registry, journal: list[int]) -> None:
    replay = ReplayBuffer(home, 100, states_bytes=2**30)
    replay.add([record("shared", token=1), *many(99)[0]], [kept(1), *many(99)[1]])
    home.checkpoint()
    journal.clear()
    before = registry.purges()
    assert replay.purge("sql") == 99
    assert registry.purges() > before
    assert (replay.count(), rows(home)) == (1, 1)
    assert len(journal) > 20
    assert max(journal) < 4 * 2**16


def test_a_trim_that_fails_undoes_no_record(
    home: Home, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise StorageFull("The disk is full.")

    ReplayBuffer(home, 100, states_bytes=10**6).add(*numbered(20))
    lower = ReplayBuffer(home, 100, states_bytes=4 * BYTES)
    with monkeypatch.context() as patch:
        patch.setattr("moedraft.storage.records.replay.trim_states", full)
        lower.add(*numbered(2))
        assert "above the bound cannot be deleted now: The disk is full" in caplog.text
        assert (lower.count(), rows(home)) == (22, 20)  # nothing more is kept until there is room
    lower.add([record(token=77)], [kept(77)])
    assert rows(home) == 4
    lower.add([record(token=78)], [kept(78)])
    assert sorted(first_values(lower))[-1] == 78
    assert rows(home) == 4


def test_they_go_with_their_records(home: Home, registry: Registry) -> None:
    replay = ReplayBuffer(home, 3, states_bytes=10_000)
    replay.add(*numbered(5))
    assert (replay.count(), rows(home)) == (3, 3)
    replay.add([record("shared", token=9)], [kept(9)])
    replay.purge("sql")
    assert first_values(replay) == {9: 9.0}
    replay.add(*numbered(2))
    registry.remove_domain("sql")
    assert rows(home) == 1
    replay.purge()
    assert rows(home) == 0


def test_a_purge_overwrites_their_bytes(home: Home) -> None:
    states = torch.full((400, 64), 1.2345).to(torch.bfloat16)  # more than a page of the database
    needle = states[:2].view(torch.uint8).numpy().tobytes()

    def found() -> bool:
        return any(needle in file.read_bytes() for file in home.path.glob(f"{DATABASE}*"))

    replay = ReplayBuffer(home, 10, states_bytes=10**6)
    replay.add([record()], [KeptStates(BASE, states)])
    assert found()
    replay.purge("sql")
    assert not found()


def test_without_a_bound_none_are_added_and_only_a_server_drops_those_there_are(home: Home) -> None:
    """A command with other settings than the server's takes nothing from it."""
    ReplayBuffer(home, 10, states_bytes=10_000).add(*numbered(2))
    plain = ReplayBuffer(home, 10)
    plain.add([record(token=7)], [kept(7)])
    assert (rows(home), plain.count()) == (2, 3)
    plain.trim_states()
    assert (rows(home), plain.count()) == (0, 3)


@pytest.mark.parametrize("damage", [b"", b"\0" * 9, b"\0" * BYTES])
def test_damaged_ones_are_missing(home: Home, caplog: pytest.LogCaptureFixture, damage: bytes) -> None:
    replay = ReplayBuffer(home, 10, states_bytes=10_000)
    replay.add(*numbered(2))
    with home.write() as connection:
        connection.execute(update(replay_states).where(replay_states.c.record == 1).values(payload=damage))
    with caplog.at_level(logging.WARNING):
        assert first_values(replay) == {1: 1.0}
    assert "kept with replay record 1 are damaged" in caplog.text
