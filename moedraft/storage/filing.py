"""Moves records of "shared" to the domains whose they are.

A record that is moved gets a new id, as if it had just come. So it counts as a new record of its domain, to
be learned from, and whoever remembers it by its id finds it gone from where it was.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sqlalchemy import Connection, delete, insert, literal, select, update

from moedraft.core import SHARED
from moedraft.storage.db import Home
from moedraft.storage.tables import domains, replay, replay_states

_KEPT = [column for column in replay.c if column.name not in ("id", "domain")]


def file_under(home: Home, found: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """Move records, given by their ids, to the domains that are named, all at once. Returns how many of each.

    Left where they are: those of a domain that is gone, and those that are not of "shared" any more. Whatever
    exceeds a domain's capacity leaves with its next record. Raises StorageError, StorageFull for a full disk.
    """
    with home.write() as connection:
        known = set(connection.scalars(select(domains.c.name)))
        wanted = {name: sorted(ids) for name, ids in found.items() if name in known}
        moved = {name: sum(_move(connection, name, one) for one in ids) for name, ids in wanted.items()}
    return {name: count for name, count in moved.items() if count}


def _move(connection: Connection, name: str, number: int) -> bool:
    ours = (replay.c.id == number) & (replay.c.domain == SHARED)
    copied = select(literal(name), *_KEPT).where(ours)
    made = insert(replay).from_select(["domain", *(column.name for column in _KEPT)], copied)
    new = connection.execute(made.returning(replay.c.id)).scalar()
    if new is not None:
        states = replay_states.c.record
        connection.execute(update(replay_states).where(states == number).values(record=new))
        connection.execute(delete(replay).where(ours))
    return new is not None
