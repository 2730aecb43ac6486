"""The log of updates, and the requests of a span of time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from storage_fakes import stats

from moedraft.core import UpdateRecord
from moedraft.storage import Home, RequestLog, UpdateLog


def update(expert: str = "sql", version: int = 1) -> UpdateRecord:
    return UpdateRecord(expert, version, 20, 16, 1.5, 2.25, 0.4, None, created_at=float(version))


def test_updates_survive_and_come_oldest_first(path: Path) -> None:
    with Home.open(path) as home:
        log = UpdateLog(home)
        for version in range(1, 6):
            log.add(update(version=version))
        log.add(update("shared", 9))
    with Home.open(path, write=False) as home:
        log = UpdateLog(home)
        assert log.recent("sql") == [update(version=version) for version in range(1, 6)]
        assert [one.version for one in log.recent(limit=2)] == [5, 9]


def test_the_log_of_updates_is_bounded(path: Path) -> None:
    with Home.open(path) as home:
        log = UpdateLog(home, capacity=3)
        for version in range(1, 8):
            log.add(update(version=version))
        assert [one.version for one in log.recent()] == [5, 6, 7]


def test_what_the_gate_decided_is_kept(path: Path) -> None:
    decided = replace(
        update(),
        decision="discard",
        gain=-0.25,
        gain_low=-0.5,
        gain_high=-0.01,
        gate_records=12,
        parent=3,
        stood_on=7,
        witness=0.75,
    )
    with Home.open(path) as home:
        log = UpdateLog(home, capacity=3)
        for one in (update(), decided, replace(decided, decision="promote"), decided):
            log.add(one)
        assert log.recent()[-1] == decided
        assert log.recent()[0].decision == "discard"
        assert log.decisions() == {"discard": 2, "promote": 1}
        assert log.decisions(after=2) == {"discard": 1, "promote": 1}
        assert log.decisions(after=4) == {}
        assert log.count() == 4  # the first is no longer kept


def test_requests_are_found_by_time_and_expert(path: Path) -> None:
    rows = [
        stats(expert, created_at=float(at), confidence=0.5, drafted_at=[2, 1], accepted_at=[1])
        for at, expert in enumerate(["sql", "python", "sql", "sql"])
    ]
    with Home.open(path) as home:
        log = RequestLog(home)
        log.add(rows)
        assert log.rows() == rows
        assert log.rows(since=1.0, until=3.0) == rows[1:3]
        assert log.rows(expert="sql", limit=2) == [rows[2], rows[3]]
        assert log.rows(since=9.0) == []
