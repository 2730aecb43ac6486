"""Which records leave a domain's buffer when it holds more than its capacity."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, get_args

from sqlalchemy import ColumnElement, Connection, case, delete, func, select, true

from moedraft.storage.retention.shares import COPIES, PINNED_SHARE, SOURCE_SHARE
from moedraft.storage.tables import replay

Policy = Literal["fifo", "reservoir", "hardest", "stratified"]
POLICIES: tuple[Policy, ...] = get_args(Policy)

_drafted = case((replay.c.drafted > 0, replay.c.drafted), else_=1)
_rate = case((replay.c.drafted > 0, replay.c.accepted * 1.0 / _drafted), else_=1.0)
_place_of_its_source = func.row_number().over(partition_by=replay.c.source, order_by=replay.c.id.desc())
# the order in which records are removed when a domain has more than its capacity
_EVICTION: dict[Policy, tuple[Any, ...]] = {
    "fifo": (replay.c.id,),
    "reservoir": (replay.c.draw.desc(), replay.c.id),
    "hardest": (_rate.desc(), replay.c.id),
    "stratified": (_place_of_its_source.desc(), replay.c.id),
}


def evict(
    connection: Connection, domain: str, capacity: int, policy: Policy, added: Iterable[tuple[str, int]]
) -> None:
    """Remove what exceeds the capacity: copies, then of clients above their share, then by the policy.

    added: the clients and prompts whose copies are looked for. Copies of others, which came while there was
    room, leave when their prompt comes again, or by the policy as all records do.
    """
    excess = _count(connection, domain) - capacity
    for source, prompt in added if excess > 0 else ():
        same = (replay.c.domain == domain) & (replay.c.source == source) & (replay.c.prompt == prompt)
        newest = select(replay.c.id).where(same).order_by(replay.c.id.desc()).limit(COPIES)
        copies = delete(replay).where(same & replay.c.id.not_in(newest.scalar_subquery()))
        excess -= connection.execute(copies).rowcount
    if excess <= 0:
        return
    half, quarter = capacity // SOURCE_SHARE, capacity // PINNED_SHARE
    pinned = replay.c.pinned
    big = [replay.c.source == source for source in _sources_above(connection, domain, half)]
    turns = [
        *((one & pinned, one, half) for one in big),
        (pinned, pinned, quarter),
        *((one, one, half) for one in big),
        (true(), true(), capacity),
    ]
    for removed, counted, most in turns:
        too_many = min(excess, _count(connection, domain, counted) - most)
        if too_many > 0:
            chosen = select(replay.c.id).where(replay.c.domain == domain, removed)
            first = chosen.order_by(*_EVICTION[policy]).limit(too_many).scalar_subquery()
            excess -= connection.execute(delete(replay).where(replay.c.id.in_(first))).rowcount


def _count(connection: Connection, domain: str, which: ColumnElement[bool] | None = None) -> int:
    query = select(func.count()).select_from(replay).where(replay.c.domain == domain)
    return connection.scalar(query if which is None else query.where(which)) or 0


def _sources_above(connection: Connection, domain: str, most: int) -> list[str]:
    """The sources with more than `most` records of `domain`."""
    query = select(replay.c.source).where(replay.c.domain == domain).group_by(replay.c.source)
    return list(connection.scalars(query.having(func.count() > most)))
