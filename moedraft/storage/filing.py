"""Moves records of "shared" to the domains whose they are.

A record that is moved gets a new id, as if it had just come. So it counts as a new record of its domain, to
be learned from, and whoever remembers it by its id finds it gone from where it was. Which records are no new
requests for all that, `filed` tells.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from sqlalchemy import Connection, delete, insert, literal, select, update

from moedraft.core import SHARED
from moedraft.storage.registry import Registry
from moedraft.storage.store import Store
from moedraft.storage.tables import domains, replay, replay_states

MOST_TOLD = 2000  # ids that `filed` keeps
_FILED = "filed_records"  # meta key: their ids
# "weights" tells whose text it may be of domains among which this one was not; the router now says it is its.
_KEPT = [column for column in replay.c if column.name not in ("id", "domain", "weights")]


def file_under(store: Store, name: str, ids: Sequence[int]) -> int:
    """Move the records with these ids to domain `name`. Returns how many.

    Left where they are: those that are not of "shared" any more, and all of them where the domain is gone.
    Whatever exceeds the domain's capacity leaves with its next record. Raises StorageError, StorageFull for a
    full disk. Features that are kept are written again, so move some megabytes of them at a time.
    """
    with store.home.write() as connection:
        if connection.scalar(select(domains.c.name).where(domains.c.name == name)) is None:
            return 0
        moved = [new for new in (_moved(connection, name, one) for one in sorted(ids)) if new is not None]
    if moved:
        told = [*sorted(filed(store.registry)), *moved][-MOST_TOLD:]
        store.registry.set_meta(_FILED, json.dumps(told))
    return len(moved)


def filed(registry: Registry) -> set[int]:
    """The ids of the newest records that were moved: no new requests, an earlier update may know them."""
    return set(json.loads(registry.get_meta(_FILED) or "[]"))


def _moved(connection: Connection, name: str, number: int) -> int | None:
    """Its new id; None where it is not of "shared"."""
    ours = (replay.c.id == number) & (replay.c.domain == SHARED)
    copied = select(literal(name), *_KEPT).where(ours)
    made = insert(replay).from_select(["domain", *(column.name for column in _KEPT)], copied)
    new: int | None = connection.execute(made.returning(replay.c.id)).scalar()
    if new is not None:
        states = replay_states.c.record
        connection.execute(update(replay_states).where(states == number).values(record=new))
        connection.execute(delete(replay).where(ours))
    return new
