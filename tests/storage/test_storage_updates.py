"""The log of updates, and the requests of a span of time."""

from __future__ import annotations

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
