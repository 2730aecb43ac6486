"""A log of the newest updates of adapters, with what each of them did, for people to look at."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from threading import Lock

from sqlalchemy import delete, func, insert, select

from moedraft.core import UpdateRecord
from moedraft.storage.db import Home
from moedraft.storage.tables import updates


class UpdateLog:
    """Keeps the newest `capacity` updates. All methods raise StorageError where the home fails."""

    def __init__(self, home: Home, capacity: int = 10_000) -> None:
        self._home = home
        self._capacity = capacity

    def add(self, update: UpdateRecord) -> None:
        with self._home.write() as connection:
            connection.execute(insert(updates).values(asdict(update)))
            last = connection.scalar(select(func.max(updates.c.id))) or 0
            connection.execute(delete(updates).where(updates.c.id <= last - self._capacity))

    def recent(self, expert: str | None = None, limit: int = 200) -> list[UpdateRecord]:
        """The last `limit` updates, of `expert` or of all, oldest first."""
        query = select(updates).order_by(updates.c.id.desc()).limit(limit)
        if expert is not None:
            query = query.where(updates.c.expert == expert)
        with self._home.read() as connection:
            rows = connection.execute(query).mappings().all()
        return [UpdateRecord(**{key: row[key] for key in row if key != "id"}) for row in reversed(rows)]

    def count(self) -> int:
        """How many updates there ever were."""
        with self._home.read() as connection:
            return connection.scalar(select(func.max(updates.c.id))) or 0

    def decisions(self, after: int = 0, until: int = 2**62) -> dict[str, int]:
        """How often the gate decided what, over the kept updates behind number `after`, up to `until`."""
        judged = updates.c.decision.is_not(None) & updates.c.id.between(after + 1, until)
        query = select(updates.c.decision, func.count()).where(judged)
        with self._home.read() as connection:
            return {row[0]: row[1] for row in connection.execute(query.group_by(updates.c.decision))}


class Decided:
    """What the gate decided since this was made; no count ever falls, though old updates are forgotten."""

    def __init__(self, log: UpdateLog) -> None:
        self._log, self._until = log, log.count()
        self._counts = Counter[str]()
        self._lock = Lock()  # two threads may ask at once

    def counts(self) -> dict[str, int]:
        """How often, by decision. Raises StorageError, and then nothing is lost of the next answer."""
        with self._lock:
            now = self._log.count()
            self._counts.update(self._log.decisions(self._until, now))
            self._until = now
            return dict(self._counts)
